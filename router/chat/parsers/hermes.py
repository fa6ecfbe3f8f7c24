"""Calls as Hermes, Qwen 2.5 and Qwen 3 write them. Pure.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>

Each call has its own pair of marks. Text may surround them.
"""

from __future__ import annotations

from router.chat.parsers.base import ToolFormat
from router.chat.parsers.json_calls import JsonCallParser, JsonMarks

_MARKS = JsonMarks(opens="<tool_call>", closes="</tool_call>")
#: Texts in templates for calls of another form between the same marks.
_OTHERS = ("<function=", "<arg_key>")


def _is_shown(template: str) -> bool:
    return _MARKS.opens in template and not any(text in template for text in _OTHERS)


HERMES = ToolFormat(
    "hermes",
    (_MARKS.opens, _MARKS.closes),
    lambda tools: JsonCallParser(_MARKS, tools),
    _is_shown,
)
