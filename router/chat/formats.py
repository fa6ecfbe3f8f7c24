"""Formats in which models write tool calls. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format of tool calls: an object each, with a name and ``arguments``.

    ``opens`` stands before a call, ``closes`` behind it, or one of ``separators`` before the next
    one. One that ``may_be_bare`` needs no mark where it begins the output, or follows another one.
    Of an output that ``is_enforced`` by a grammar nothing is content, not even what was cut off.
    """

    name: str
    opens: str
    closes: str = ""
    separators: str = ""
    arguments: str = "arguments"
    may_be_bare: bool = False
    is_enforced: bool = False


#: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, each call in a pair of its own; text
#: may be around them. Of Hermes, Qwen and many others.
HERMES = ToolFormat("hermes", opens="<tool_call>", closes="</tool_call>")
#: {"name": ..., "parameters": {...}}; {...}, as the whole output. The mark is a special token, and
#: so mostly not in the text.
LLAMA3 = ToolFormat(
    "llama3",
    opens="<|python_tag|>",
    separators=";",
    arguments="parameters",
    may_be_bare=True,
)
#: [{"name": ..., "arguments": {...}}, ...], to which a grammar keeps an output that has to call.
LISTED = ToolFormat("listed", opens="[", closes="]", separators=",", is_enforced=True)

_BY_NAME: Mapping[str, ToolFormat] = {tools.name: tools for tools in (HERMES, LLAMA3)}
AUTO = "auto"


def tool_format(setting: str, template: str) -> ToolFormat | None:
    """Return the format of tool calls by ``setting`` or, for "auto", as detected in ``template``.

    None if it is unknown.
    """
    return detected(template) if setting == AUTO else _BY_NAME[setting]


def detected(template: str) -> ToolFormat | None:
    # Others have the same mark around something else.
    is_other = "<function=" in template or "<arg_key>" in template
    if HERMES.opens in template and not is_other:
        return HERMES
    is_llama = LLAMA3.opens in template or "<|start_header_id|>" in template
    return LLAMA3 if is_llama and '"parameters"' in template else None
