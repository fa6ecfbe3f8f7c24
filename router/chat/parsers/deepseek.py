"""Calls as DeepSeek V3 and R1, and DeepSeek V3.1, write them. Pure.

    V3, R1   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
             ```json
             {...}
             ```<｜tool▁call▁end｜>
    V3.1     <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>

<｜tool▁calls▁begin｜> precedes all calls of an output, and <｜tool▁calls▁end｜> follows them.
"""

from __future__ import annotations

from router.chat.parsers.base import (
    MAX_NAME,
    MarkedCallParser,
    NoCall,
    Reading,
    ToolFormat,
)

_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"


class DeepSeekParser(MarkedCallParser):
    """Parser of an output with calls in either of DeepSeek's formats."""

    _opens = (_ALL_BEGIN, _BEGIN)

    def _calls(self, mark: str) -> Reading[None]:
        if mark == _ALL_BEGIN and not (yield from self._read_mark(_BEGIN)):
            raise NoCall
        mark = _BEGIN
        while mark == _BEGIN:
            yield from self._call()
            mark = yield from self._marks_after_call()

    def _call(self) -> Reading[None]:
        name = yield from self._read_until(_SEPARATOR, MAX_NAME)
        is_type = (yield from self._read_nonspace()) != "{"
        self._push_back(1)
        if is_type:
            name = yield from self._read_name()
            if not (yield from self._read_mark(f"{_FENCE}json")):
                raise NoCall
        self._known(name)
        if not (yield from self._read_mark("{")):
            raise NoCall
        yield from self._arguments(name)
        yield from self._end_call()

    def _marks_after_call(self) -> Reading[str]:
        """Skip the marks after a call; return the mark of the next call, or "" if none follows."""
        while mark := (yield from self._read_mark(_FENCE, _END, _ALL_END, _BEGIN)):
            if mark == _BEGIN:
                self._at_end = self._emit_content
                return mark
            self._drop()
        self._drop_space()
        return ""


DEEPSEEK = ToolFormat(
    "deepseek",
    (_ALL_BEGIN, _BEGIN, _SEPARATOR, _END, _ALL_END),
    DeepSeekParser,
    lambda template: _ALL_BEGIN in template,
)
