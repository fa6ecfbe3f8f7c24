"""Static batching. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from worker.engine.policies.policy import Policy
from worker.engine.sequence import Sequence
from worker.engine.waiting import WaitingQueue


class ClosedBatch:
    """Queue of the sequences without a slot: those of the closed batch, and later arrivals.

    The closed batch is the batch that runs; its sequences are the members. It gets no further
    sequences. When all of them have ended, the next batch is formed from the later arrivals.
    """

    def __init__(self) -> None:
        self._members = WaitingQueue()
        self._later = WaitingQueue()

    def __len__(self) -> int:
        return len(self._members) + len(self._later)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._members, self._later)

    @property
    def num_tokens(self) -> int:
        return self._members.num_tokens + self._later.num_tokens

    @property
    def num_uncached(self) -> int:
        return self._members.num_uncached + self._later.num_uncached

    def push(self, sequence: Sequence) -> None:
        """Add a preempted sequence to the closed batch, and any other to the later arrivals."""
        queue = self._members if sequence.is_preempted else self._later
        queue.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        queue = self._members if sequence in self._members else self._later
        queue.remove(sequence)

    def member(self) -> Sequence | None:
        """Return the first member that has no slot; None if all members have one."""
        return self._members.head()

    def close(self, size: int) -> None:
        """Move later arrivals to the closed batch until ``size`` members are without a slot.

        All later arrivals are moved if there are too few.
        """
        while len(self._members) < size and (head := self._later.head()) is not None:
            self._later.remove(head)
            self._members.push(head)


class Static(Policy):
    """Policy of static batching, a baseline: no sequence joins a batch that runs.

    When all sequences of a batch have ended, the first ``size`` waiting sequences become the next
    batch, or all waiting sequences if there are fewer. If too few KV blocks are free for some of
    them, these are admitted when others of the batch have ended. Nothing is padded, and prompts are
    prefilled in chunks.
    """

    def __init__(self, size: int) -> None:
        self._waiting = ClosedBatch()
        self._size = size

    @property
    def waiting(self) -> ClosedBatch:
        return self._waiting

    def head(self, num_running: int) -> Sequence | None:
        if not num_running and self._waiting.member() is None:
            self._waiting.close(self._size)
        return self._waiting.member()
