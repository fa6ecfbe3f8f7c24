"""Waiting batches, each of sequences with similar predicted output lengths. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from itertools import chain
from math import inf

from worker.engine.limits import Limits, blocks_for
from worker.engine.policies.serving_time import BatchSize
from worker.engine.sequence import Sequence
from worker.engine.waiting import WaitingQueue


class WaitingBatch:
    """Batch of waiting sequences with equal ``priority`` and similar predicted output lengths."""

    def __init__(self) -> None:
        #: start of the first step after the batch was opened; inf before that step
        self.since = inf
        self._sequences: dict[int, Sequence] = {}
        self._num_blocks = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def order(self) -> int:
        """``Sequence.order`` (number in the order of arrival) of the batch's first sequence."""
        return next(iter(self._sequences))

    @property
    def size(self) -> BatchSize:
        prompt = max(sequence.num_known for sequence in self)
        return BatchSize(len(self), prompt, max(sequence.expected_output for sequence in self))

    def can_add(self, sequence: Sequence, limits: Limits) -> bool:
        """Return whether ``sequence`` may be added to the batch.

        With the sequence, the batch must not exceed the number of batch slots, and its predicted
        number of KV blocks must not exceed the KV cache. To an empty batch any sequence may be
        added.
        """
        num_blocks = self._num_blocks + _expected_blocks(sequence)
        has_blocks = num_blocks + limits.watermark_blocks <= limits.num_blocks
        return len(self) < limits.max_num_seqs and (has_blocks or not self._sequences)

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.order] = sequence
        self._num_blocks += _expected_blocks(sequence)

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.order]
        self._num_blocks -= _expected_blocks(sequence)


class SimilarBatches:
    """Waiting batches, grouped by priority and by band: a range of predicted output lengths.

        band      |     16..21         |   22..29   | ...
        batches   |  full, full, open  |    open    |

    New sequences join the last batch of their band if it is open, which means not full. A batch is
    full if it has ``max_num_seqs`` sequences, or if it is predicted to fill the KV cache.

    When a sequence ends, its slot stays empty until the longest sequence of its batch ends. The
    shortest length of a band is at least the fraction 1 - ``batch_waste`` of its longest length. If
    the predictions are right, a slot is therefore empty for at most the fraction ``batch_waste`` of
    the batch's decode steps. (Magnus compares a request with every waiting batch; here the band is
    found in O(log n).)

    Members of the running batch that have no slot, because they are not admitted yet or were
    preempted, are kept here as well.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._begins = band_begins(limits.scheduling.batch_waste, limits.max_model_len)
        self._bands: dict[tuple[int, int], deque[WaitingBatch]] = {}
        self._batch_of: dict[int, WaitingBatch] = {}
        self._num_tokens = self._num_uncached = 0
        self._members = WaitingQueue()
        #: batches that were opened since the last step began
        self._opened: list[WaitingBatch] = []

    def __len__(self) -> int:
        return len(self._batch_of) + len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        batches = chain.from_iterable(self._bands.values())
        return chain(self._members, chain.from_iterable(batches))

    @property
    def num_tokens(self) -> int:
        return self._num_tokens + self._members.num_tokens

    @property
    def num_uncached(self) -> int:
        return self._num_uncached + self._members.num_uncached

    def push(self, sequence: Sequence) -> None:
        """Add a sequence: to the running batch if it was preempted, else to a waiting batch."""
        if sequence.is_preempted:
            self._members.push(sequence)
            return
        batch = self._batch_of[sequence.order] = self._open_batch(sequence)
        batch.add(sequence)
        self._num_tokens += sequence.num_known
        self._num_uncached += sequence.num_uncached

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._members:
            self._members.remove(sequence)
            return
        self._batch_of.pop(sequence.order).remove(sequence)
        self._num_tokens -= sequence.num_known
        self._num_uncached -= sequence.num_uncached

    def member(self) -> Sequence | None:
        """Return the first sequence of the running batch that has no slot; None if all have one."""
        return self._members.head()

    def begin_step(self, now: float) -> None:
        """Record that a step begins at ``now``.

        Batches that were opened since the last step count as waiting from ``now`` on.
        """
        for batch in self._opened:
            batch.since = now
        self._opened.clear()

    def admit(self, batch: WaitingBatch) -> None:
        """Make ``batch``, one of the waiting batches, the running batch."""
        for sequence in list(batch):
            self.remove(sequence)
            self._members.push(sequence)

    def heads(self) -> list[WaitingBatch]:
        """Return the longest-waiting batch of each band, among batches of the highest priority.

        Bands without a waiting batch of that priority are left out.
        """
        for key, batches in [*self._bands.items()]:
            while batches and not batches[0]:
                batches.popleft()
            if not batches:
                del self._bands[key]
        highest = max((priority for priority, _ in self._bands), default=0)
        return [batches[0] for (priority, _), batches in self._bands.items() if priority == highest]

    def _open_batch(self, sequence: Sequence) -> WaitingBatch:
        band = bisect_right(self._begins, sequence.expected_output)
        batches = self._bands.setdefault((sequence.priority, band), deque())
        if batches and not batches[-1]:
            # A batch whose sequences were all removed is not reused: it would count as waiting
            # since before the new sequence arrived.
            batches.pop()
        if not batches or not batches[-1].can_add(sequence, self._limits):
            batches.append(WaitingBatch())
            self._opened.append(batches[-1])
        return batches[-1]


def band_begins(waste: float, longest: int) -> list[int]:
    """Return the shortest length of each band, in ascending order.

    The bands cover the lengths 1 to ``longest``. No length of a band is less than the fraction
    1 - ``waste`` of the band's longest length.
    """
    begins = [1]
    while begins[-1] <= longest:
        begins.append(int(begins[-1] / (1 - waste)) + 1)
    return begins


def _expected_blocks(sequence: Sequence) -> int:
    return blocks_for(sequence.num_prompt + sequence.expected_output)
