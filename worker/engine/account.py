"""Where a sequence's time at this worker went. Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Self

from everlift.v1 import session_pb2


class Part(IntEnum):
    """Of an account, in the order of its fields."""

    WAITING = 0
    PREFILL = 1
    STALLED = 2
    DECODE = 3
    CO_TENANCY = 4
    PREEMPTED = 5
    RECOMPUTE = 6
    PASSED_OVER = 7
    BETWEEN_STEPS = 8
    # what follows is counted, not timed
    STEPS = 9
    MOST_NEIGHBOURS = 10


class Account(NamedTuple):
    """The fields are those of the message Account, where they are explained. Its seconds sum up to
    the time from the sequence's start to ``until``."""

    until: float
    waiting_s: float = 0.0
    prefill_s: float = 0.0
    stalled_s: float = 0.0
    decode_s: float = 0.0
    co_tenancy_s: float = 0.0
    preempted_s: float = 0.0
    recompute_s: float = 0.0
    passed_over_s: float = 0.0
    between_steps_s: float = 0.0
    steps: float = 0
    most_neighbours: float = 0

    @classmethod
    def waiting(cls, since: float, until: float) -> Self:
        """Of a sequence that was not in the batch yet."""
        return cls(until, waiting_s=max(0.0, until - since))

    def preempted(self, until: float) -> Self:
        """It was without blocks since."""
        return self._replace(until=until, preempted_s=self.preempted_s + until - self.until)

    @property
    def parts(self) -> tuple[float, ...]:
        """By ``Part``."""
        return self[1:]

    @property
    def seconds(self) -> float:
        return sum(self.parts[: Part.STEPS])

    def to_proto(self, epoch: int = 0, choice: int = 0) -> session_pb2.Account:
        """Of the sequence of this name."""
        return session_pb2.Account(
            epoch=epoch,
            choice=choice,
            waiting_s=self.waiting_s,
            prefill_s=self.prefill_s,
            stalled_s=self.stalled_s,
            decode_s=self.decode_s,
            co_tenancy_s=self.co_tenancy_s,
            preempted_s=self.preempted_s,
            recompute_s=self.recompute_s,
            passed_over_s=self.passed_over_s,
            between_steps_s=self.between_steps_s,
            steps=int(self.steps),
            most_neighbours=int(self.most_neighbours),
        )


#: Of a worker that has done nothing yet.
NO_ACCOUNT = Account(0.0)
