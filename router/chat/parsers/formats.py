"""Formats in which models write tool calls. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format in which a model writes tool calls: JSON objects with a name and arguments.

    The text ``opens`` precedes a call. The text ``closes`` follows it, or one of the characters in
    ``separators`` if another call follows. ``arguments`` is the key of the arguments in the object.
    If ``may_be_bare``, a call needs no opening text at the beginning of the output or after another
    call. If ``is_enforced``, a grammar enforces the format, so the output has no content, not even
    if a call is cut off.
    """

    name: str
    opens: str
    closes: str = ""
    separators: str = ""
    arguments: str = "arguments"
    may_be_bare: bool = False
    is_enforced: bool = False


#: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, with a pair of marks for each call.
#: Text may surround them. Hermes, Qwen and many other models use it.
HERMES = ToolFormat("hermes", opens="<tool_call>", closes="</tool_call>")
#: {"name": ..., "parameters": {...}}; {...}, as the whole output. The opening mark is a special
#: token, so it is usually absent from the text.
LLAMA3 = ToolFormat(
    "llama3",
    opens="<|python_tag|>",
    separators=";",
    arguments="parameters",
    may_be_bare=True,
)
#: [{"name": ..., "arguments": {...}}, ...], which a grammar enforces if the output must be calls.
LISTED = ToolFormat("listed", opens="[", closes="]", separators=",", is_enforced=True)

_BY_NAME: Mapping[str, ToolFormat] = {tools.name: tools for tools in (HERMES, LLAMA3)}
AUTO = "auto"


def tool_format(setting: str, template: str) -> ToolFormat | None:
    """Return the format that ``setting`` names or, for "auto", the one found in ``template``.

    Return None for "auto" if the template shows no known format.
    """
    return detected(template) if setting == AUTO else _BY_NAME[setting]


def detected(template: str) -> ToolFormat | None:
    """Return the format of tool calls that a chat template shows, or None if it is unknown."""
    # Other formats use the same opening mark for calls of another form.
    is_other = "<function=" in template or "<arg_key>" in template
    if HERMES.opens in template and not is_other:
        return HERMES
    is_llama = LLAMA3.opens in template or "<|start_header_id|>" in template
    return LLAMA3 if is_llama and '"parameters"' in template else None
