"""Reasoning between two marks at the beginning of an output, as many models write it. Pure.

<think>...</think>...        DeepSeek R1, Qwen 3 and many others
[THINK]...[/THINK]...        Mistral's reasoning models
"""

from __future__ import annotations

from collections.abc import Sequence

from router.chat.deltas import Delta
from router.chat.parsers.base import CallableTools, CharParser, Parser, Reading, ReasoningFormat

_NO_TOOLS = CallableTools({}, str)
#: Number of characters at the end of a prompt in which the opening mark is searched for.
_TAIL = 256


class ThinkParser(CharParser):
    """Parser that separates the reasoning, and gives the text after it to the parser ``inner``.

    Reasoning begins at the start of the output if ``prompt`` ends with the mark ``opens``; else the
    output must begin with this mark. Any other output has no reasoning, as is usual after a prompt
    that ends with an empty reasoning. Line breaks after either mark are dropped, as is whitespace
    before either mark.
    """

    def __init__(self, opens: str, closes: str, inner: Parser, prompt: str) -> None:
        self._opens = opens
        self._closes = closes
        self._inner = inner
        self._begins_inside = prompt[-_TAIL:].rstrip().endswith(opens)
        #: whether the rest of the output is the inner parser's
        self._is_over = False
        #: position of the first character of the reasoning, and of the first one behind it
        self._start: int | None = None
        self._end: int | None = None
        super().__init__(_NO_TOOLS)

    @property
    def has_calls(self) -> bool:
        return self._inner.has_calls

    @property
    def reasoning_ranges(self) -> Sequence[range]:
        if self._start is None:
            return ()
        return [range(self._start, self._num_fed if self._end is None else self._end)]

    @property
    def content_ranges(self) -> Sequence[range]:
        first = self._num_fed
        return [range(it.start + first, it.stop + first) for it in self._inner.content_ranges]

    def feed(self, text: str) -> list[Delta]:
        for place, char in enumerate(text):
            if self._is_over:
                return self._deltas.drain() + self._inner.feed(self._handed_over() + text[place:])
            self._num_fed += 1
            self._unread.append(char)
            while self._unread and not self._is_over:
                self._reading.send(self._unread.popleft())
        deltas = self._deltas.drain()
        return deltas + self._inner.feed(self._handed_over()) if self._is_over else deltas

    def finish(self) -> list[Delta]:
        if self._is_over:
            return self._inner.finish()
        deltas = super().finish()
        return deltas + self._inner.feed(self._handed_over()) + self._inner.finish()

    def _handed_over(self) -> str:
        """Remove the characters that this parser leaves to the inner parser, and return them.

        The text is empty if the inner parser has received all of them. Returned characters no
        longer count in ``_num_fed``.
        """
        text = "".join((*self._pending, *self._unread))
        self._num_fed -= len(text)
        self._pending.clear()
        self._unread.clear()
        return text

    def _output(self) -> Reading[None]:
        # What is not reasoning remains pending for the inner parser.
        self._at_end = lambda: None
        if self._begins_inside or (yield from self._read_mark(self._opens)):
            yield from self._thinking()
        self._is_over = True
        yield from self._ignore_rest()

    def _thinking(self) -> Reading[None]:
        self._drop()
        self._start = self._num_fed
        self._at_end = self._emit_reasoning
        yield from self._skip_line_breaks()
        while not (yield from self._read_mark(self._closes)):
            self._emit_reasoning()
        self._end = self._num_fed - len(self._closes)
        self._drop()
        self._at_end = self._drop
        yield from self._skip_line_breaks()

    def _skip_line_breaks(self) -> Reading[None]:
        while (yield from self._read()) == "\n":
            self._drop()
        self._push_back(1)

    def _emit_reasoning(self) -> None:
        self._deltas.reasoning("".join(self._pending))
        self._pending.clear()


def _format(name: str, opens: str, closes: str) -> ReasoningFormat:
    return ReasoningFormat(
        name,
        (opens, closes),
        lambda inner, prompt: ThinkParser(opens, closes, inner, prompt),
        lambda template: closes in template,
    )


THINK = _format("think", "<think>", "</think>")
MISTRAL_THINK = _format("mistral_think", "[THINK]", "[/THINK]")
