"""Calls in the format that a grammar enforces if tool_choice requires calls. Pure.

[{"name": ..., "arguments": {...}}, ...]
"""

from __future__ import annotations

from router.chat.parsers.base import CallableTools
from router.chat.parsers.json_calls import JsonCallParser, JsonMarks

_MARKS = JsonMarks(opens="[", closes="]", separators=",", is_enforced=True)


class ListedCallParser(JsonCallParser):
    """Parser of an output that is a JSON array of calls."""

    def __init__(self, tools: CallableTools) -> None:
        super().__init__(_MARKS, tools)
