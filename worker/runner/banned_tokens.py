"""Tokens that would complete a forbidden sequence (``SamplingParams.banned_sequences``). Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence


class BannedTokens:
    """Tokens that must not follow the output of one sequence.

    A token is banned if it would complete a banned sequence. Only output tokens count, so the state
    can be created again from the output after a migration or preemption.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], output: Sequence[int]) -> None:
        """Create the state after ``output``; no sequence may be empty."""
        #: tokens that are banned everywhere
        self._always: set[int] = set()
        #: for each token before a banned one, the tokens up to it, and the banned token
        self._by_previous: dict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        longest = 0
        for *before, last in sequences:
            if before:
                self._by_previous[before[-1]].append((tuple(before), last))
                longest = max(longest, len(before))
            else:
                self._always.add(last)
        #: last tokens of the output, as many as a banned sequence can begin with
        self._recent = deque(output, maxlen=longest)

    def after(self, drafts: Sequence[int] = ()) -> set[int]:
        """Return the tokens that must not follow the output and ``drafts``."""
        known = (*self._recent, *drafts)
        endings = self._by_previous.get(known[-1], ()) if known else ()
        return self._always.union(
            last for before, last in endings if known[-len(before) :] == before
        )

    def accept(self, tokens: Iterable[int]) -> None:
        """Extend the output by ``tokens``."""
        self._recent.extend(tokens)
