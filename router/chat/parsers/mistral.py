"""Calls as Mistral's models write them. Pure.

    [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]     up to version 7 of the tokenizer
    [TOOL_CALLS]name{...}[TOOL_CALLS]name{...}               version 11
    [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}                   version 13; [CALL_ID]id may be missing

The marks are special tokens. The ids that the model writes are replaced by those of the request.
"""

from __future__ import annotations

from router.chat.parsers.base import CallableTools, NoCall, Reading, ToolFormat
from router.chat.parsers.json_calls import JsonCallParser, JsonMarks

_OPENS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MARKS = JsonMarks(opens=_OPENS, closes="]", separators=",")
_MAX_ID = 64


class MistralParser(JsonCallParser):
    """Parser of an output with calls in any of Mistral's formats."""

    def __init__(self, tools: CallableTools) -> None:
        super().__init__(_MARKS, tools)

    def _calls(self) -> Reading[None]:
        if (yield from self._read_nonspace()) == "[":
            yield from super()._calls()
            return
        self._push_back(1)
        try:
            yield from self._named_call()
        except NoCall:
            self._backtrack()
        else:
            yield from self._end_call()

    def _named_call(self) -> Reading[None]:
        name = yield from self._read_name()
        mark = yield from self._read_mark("{", _ARGS, _CALL_ID)
        if mark == _CALL_ID:
            yield from self._read_until(_ARGS, _MAX_ID)
            mark = _ARGS
        if mark == _ARGS:
            mark = yield from self._read_mark("{")
        if mark != "{":
            raise NoCall
        yield from self._arguments(name)


MISTRAL = ToolFormat(
    "mistral", (_OPENS, _CALL_ID, _ARGS), MistralParser, lambda template: _OPENS in template
)
