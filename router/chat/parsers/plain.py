"""Parser of outputs without tools and reasoning. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from router.chat.deltas import Delta, Deltas


class PlainParser:
    """Parser of the output of a request without tools: the whole text is content."""

    has_calls = False
    reasoning_ranges: Sequence[range] = ()

    def __init__(self) -> None:
        self._num_fed = 0

    @property
    def content_ranges(self) -> Sequence[range]:
        return [range(self._num_fed)]

    def feed(self, text: str) -> list[Delta]:
        self._num_fed += len(text)
        deltas = Deltas()
        deltas.content(text)
        return deltas.drain()

    def finish(self) -> list[Delta]:
        return []
