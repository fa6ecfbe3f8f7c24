"""Queue of waiting sequences. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from worker.engine.sequence import NO_SLOT, Sequence

#: Sort key of a waiting sequence: the smallest is served first. The last number is the sequence's
#: ``order``.
Place = tuple[int, ...]


def by_arrival(sequence: Sequence) -> Place:
    """Return a sort key that puts larger ``priority`` first, then earlier arrival.

    A preempted sequence keeps its place in the order of arrival.
    """
    return -sequence.priority, sequence.order


def by_length(sequence: Sequence, ageing_tokens: int) -> Place:
    """Return a sort key that puts larger ``priority`` first, then fewer tokens left to compute.

    A sequence counts as ``ageing_tokens`` shorter for each later arrival. A sequence with n tokens
    to compute is therefore bypassed by fewer than n / ageing_tokens later ones of the same
    priority. A sequence that has output already counts as having no tokens to compute, because its
    client waits for the next token.
    """
    order = sequence.order
    left = sequence.num_uncached if sequence.slot == NO_SLOT else sequence.remaining
    length = 0 if sequence.num_output else left
    return -sequence.priority, order * ageing_tokens + length, order


class WaitingQueue:
    """Queue of waiting sequences, sorted by the key that ``place`` returns for a sequence.

    The smallest key is first. The key of a sequence must not change while it waits. Every operation
    takes O(log n), amortised.
    """

    def __init__(self, place: Callable[[Sequence], Place] = by_arrival) -> None:
        self._place = place
        self._members: dict[int, Sequence] = {}
        #: sort keys of the members, and of some sequences that were removed
        self._heap: list[Place] = []
        self._num_tokens = self._num_uncached = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.order in self._members

    @property
    def num_tokens(self) -> int:
        """Total number of tokens, of prompts and outputs so far, of all waiting sequences."""
        return self._num_tokens

    @property
    def num_uncached(self) -> int:
        """Number of tokens in ``num_tokens`` that are not expected to be prefix-cache hits."""
        return self._num_uncached

    def push(self, sequence: Sequence) -> None:
        self._members[sequence.order] = sequence
        heapq.heappush(self._heap, self._place(sequence))
        self._num_tokens += sequence.num_known
        self._num_uncached += sequence.num_uncached

    def head(self) -> Sequence | None:
        """Return the first sequence without removing it; None if the queue is empty."""
        while self._heap:
            if (sequence := self._members.get(self._heap[0][-1])) is not None:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        del self._members[sequence.order]
        self._num_tokens -= sequence.num_known
        self._num_uncached -= sequence.num_uncached
        # A sequence that is removed from the middle stays in the heap until it reaches the front,
        # or until most of the heap consists of removed sequences.
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = sorted(map(self._place, self._members.values()))
