"""Time breakdown of a sequence at this worker: how long it waited, prefilled, decoded. Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Self

from everlift.v1 import session_pb2


class Part(IntEnum):
    """Index of a part in ``TimeBreakdown.parts``, in the order of the fields of TimeBreakdown."""

    WAITING = 0
    PREFILL = 1
    PREFILL_INTERFERENCE = 2
    DECODE = 3
    DECODE_INTERFERENCE = 4
    PREEMPTED = 5
    RECOMPUTE = 6
    NOT_SCHEDULED = 7
    BETWEEN_STEPS = 8
    # The following parts are counts, not seconds.
    STEPS = 9
    MOST_NEIGHBOURS = 10


class TimeBreakdown(NamedTuple):
    """Time breakdown of a sequence; session.proto documents the fields.

    The seconds add up to the time from the sequence's arrival at this worker to ``until``, a time
    on the engine's clock.
    """

    until: float
    waiting_s: float = 0.0
    prefill_s: float = 0.0
    prefill_interference_s: float = 0.0
    decode_s: float = 0.0
    decode_interference_s: float = 0.0
    preempted_s: float = 0.0
    recompute_s: float = 0.0
    not_scheduled_s: float = 0.0
    between_steps_s: float = 0.0
    steps: float = 0
    most_neighbours: float = 0

    @classmethod
    def waiting(cls, since: float, until: float) -> Self:
        """Return the breakdown of a sequence that has waited since ``since`` for its first step."""
        return cls(until, waiting_s=max(0.0, until - since))

    def preempted(self, until: float) -> Self:
        """Return the breakdown extended to ``until``; the added time counts as preempted."""
        return self._replace(until=until, preempted_s=self.preempted_s + until - self.until)

    @property
    def parts(self) -> tuple[float, ...]:
        """Values indexed by ``Part``: seconds before ``Part.STEPS``, counts from that index on."""
        return self[1:]

    @property
    def seconds(self) -> float:
        return sum(self.parts[: Part.STEPS])

    def to_proto(self, epoch: int = 0, choice: int = 0) -> session_pb2.TimeBreakdown:
        """Return the breakdown as a message about one sequence, without ``until``.

        ``epoch``, the id of the attempt, and ``choice``, the index in the request, identify the
        sequence. The message is about no particular sequence if both are omitted.
        """
        return session_pb2.TimeBreakdown(
            epoch=epoch,
            choice=choice,
            waiting_s=self.waiting_s,
            prefill_s=self.prefill_s,
            prefill_interference_s=self.prefill_interference_s,
            decode_s=self.decode_s,
            decode_interference_s=self.decode_interference_s,
            preempted_s=self.preempted_s,
            recompute_s=self.recompute_s,
            not_scheduled_s=self.not_scheduled_s,
            between_steps_s=self.between_steps_s,
            steps=int(self.steps),
            most_neighbours=int(self.most_neighbours),
        )


#: Breakdown of a worker that has done nothing yet.
NO_BREAKDOWN = TimeBreakdown(0.0)
