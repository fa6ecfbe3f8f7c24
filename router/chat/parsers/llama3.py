"""Calls as Llama 3 writes them in JSON. Pure.

    {"name": ..., "parameters": {...}}; {...}

The calls are the whole output, or follow the mark <|python_tag|>, which is a special token.
"""

from __future__ import annotations

from router.chat.parsers.base import ToolFormat
from router.chat.parsers.json_calls import JsonCallParser, JsonMarks

_MARKS = JsonMarks(opens="<|python_tag|>", separators=";", may_be_bare=True)


def _is_shown(template: str) -> bool:
    is_llama = _MARKS.opens in template or "<|start_header_id|>" in template
    return is_llama and '"parameters"' in template


LLAMA3 = ToolFormat(
    "llama3",
    (_MARKS.opens,),
    lambda tools: JsonCallParser(_MARKS, tools),
    _is_shown,
    arguments="parameters",
)
