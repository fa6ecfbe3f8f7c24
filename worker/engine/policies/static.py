"""Continuous and static batching. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from worker.engine.policies.policy import Policy
from worker.engine.sequence import Sequence
from worker.engine.waiting import WaitingLine


class Continuous(Policy):
    """All that can decode do; then those in the batch are prefilled, then newcomers, by class and
    arrival."""

    def __init__(self) -> None:
        self._waiting = WaitingLine()

    @property
    def waiting(self) -> WaitingLine:
        return self._waiting

    def head(self, num_running: int) -> Sequence | None:
        return self._waiting.head()


class ClosedBatch:
    """Those of the closed batch that are not in a slot, yet or again, and all that came after it
    was closed."""

    def __init__(self) -> None:
        self._members = WaitingLine()
        self._later = WaitingLine()

    def __len__(self) -> int:
        return len(self._members) + len(self._later)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._members, self._later)

    @property
    def num_tokens(self) -> int:
        return self._members.num_tokens + self._later.num_tokens

    def push(self, sequence: Sequence) -> None:
        """Who was preempted is of the batch."""
        line = self._members if sequence.is_preempted else self._later
        line.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        line = self._members if sequence in self._members else self._later
        line.remove(sequence)

    def member(self) -> Sequence | None:
        return self._members.head()

    def close(self, size: int) -> None:
        """The first ``size`` of those who came later are the batch, or as many as there are."""
        while len(self._members) < size and (head := self._later.head()) is not None:
            self._later.remove(head)
            self._members.push(head)


class Static(Policy):
    """What serving was before continuous batching, and the baseline for it: a batch is who waits
    when the one before it is done, at most ``size``. It is kinder than most: a sequence that is
    done computes nothing, nothing is padded, and prompts are prefilled in chunks.

    A member for whom there is no room comes in when others are done; nobody else does.
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
