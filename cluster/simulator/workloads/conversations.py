"""Prompts that begin as earlier ones did. Pure: randomness is handed in."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from random import Random

#: Conversations that may go on.
_OPEN = 512


class Conversations:
    """Of a conversation each prompt is the one before with something behind it. A prompt is its
    parts' names; a part that occurred before has the same name again.

    With probability ``share`` a prompt goes on with the longest of the open conversations that is
    not longer than itself; else it begins a new one, in the place of any other. Lengths are thereby
    what they are without conversations."""

    def __init__(self, share: float, names: Iterator[int], rng: Random) -> None:
        """``names`` are of new parts."""
        self._share = share
        self._names = names
        self._rng = rng
        #: by the number of their parts; a name occurs once as a last one
        self._open: list[tuple[int, int, tuple[int, ...]]] = []

    def prompt(self, parts: int) -> tuple[int, ...]:
        """Names of a prompt of so many whole parts."""
        begun = self._taken(parts) if self._rng.random() < self._share else ()
        prompt = (*begun, *(next(self._names) for _ in range(parts - len(begun))))
        if prompt:
            self._leave_open(prompt)
        return prompt

    def _taken(self, parts: int) -> tuple[int, ...]:
        """The conversation to go on with; none, where all are longer."""
        place = bisect_right(self._open, parts, key=lambda each: each[0])
        return self._open.pop(place - 1)[2] if place else ()

    def _leave_open(self, prompt: tuple[int, ...]) -> None:
        if len(self._open) == _OPEN:
            self._open.pop(self._rng.randrange(_OPEN))
        insort(self._open, (len(prompt), prompt[-1], prompt))
