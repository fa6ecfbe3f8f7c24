"""The sequences that are not in the batch, by arrival. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from worker.sequence import Sequence


class WaitingLine:
    """Sequences by ``order``: one that was preempted comes back in front of all that arrived later.

    Every operation is O(log n) at most.
    """

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}
        #: orders of members, and of some that have left
        self._heap: list[int] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    @property
    def num_tokens(self) -> int:
        """Known tokens of all members."""
        return self._num_tokens

    def push(self, sequence: Sequence) -> None:
        self._members[sequence.order] = sequence
        heapq.heappush(self._heap, sequence.order)
        self._num_tokens += sequence.num_known

    def head(self) -> Sequence | None:
        """The first in line, which stays there."""
        while self._heap:
            if (sequence := self._members.get(self._heap[0])) is not None:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        del self._members[sequence.order]
        self._num_tokens -= sequence.num_known
        # One that leaves from the middle stays in the heap until it comes to its front, or until
        # such ones are the greater part.
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = sorted(self._members)
