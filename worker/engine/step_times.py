"""Time that steps spend in each of their parts. Pure: the clock is passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from everlift.v1 import session_pb2


class Part(IntEnum):
    """Part of an engine step, as an index of a Stopwatch's sums."""

    #: deciding which tokens the step computes
    SCHEDULE = 0
    #: copying blocks, and computing the model's hidden states
    MODEL = 1
    #: computing logits and log probabilities, and sampling tokens until all ranks have them
    SAMPLE = 2
    #: updating the scheduler's state after a launch, and with the results of a step
    COMMIT = 3


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that steps have spent in each part since the engine started, by the host's clock.

    If the device computes asynchronously, its time is included in the part in which the host waits
    for the device.
    """

    schedule_s: float = 0.0
    model_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0

    def to_proto(self) -> session_pb2.StepTimes:
        return session_pb2.StepTimes(
            schedule_s=self.schedule_s,
            model_s=self.model_s,
            sample_s=self.sample_s,
            commit_s=self.commit_s,
        )


NO_TIME = StepTimes()


class Stopwatch:
    """Stopwatch that sums the time of each part of the steps.

    ``clock`` returns seconds, and is read once when a step begins and once after each part.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sums = [0.0] * len(Part)
        self._since = 0.0

    def start(self) -> None:
        self._since = self._clock()

    def lap(self, part: Part) -> None:
        """Add the time since the last call of ``lap`` or ``start`` to the sum of ``part``."""
        now = self._clock()
        self._sums[part] += now - self._since
        self._since = now

    @property
    def times(self) -> StepTimes:
        return StepTimes(*self._sums)


#: Stopwatch of an engine whose steps are not timed: its times stay 0.
STOPPED = Stopwatch(lambda: 0.0)
