"""Time of the parts of steps. Pure: the clock is passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from everlift.v1 import session_pb2


class Part(IntEnum):
    #: who computes what
    SCHEDULE = 0
    #: copies of blocks, and the model's hidden states
    MODEL = 1
    #: logits, log probabilities and tokens; that of several ranks all know them
    SAMPLE = 2
    #: what came of it, in the books
    COMMIT = 3


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds since the engine started, by the host's clock.

    Where a device works by itself, the part that waits for it has its time.
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
    """Stopwatch with one look at ``clock`` (seconds) at each boundary."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sums = [0.0] * len(Part)
        self._since = 0.0

    def start(self) -> None:
        self._since = self._clock()

    def lap(self, part: Part) -> None:
        """Add the time since the last boundary to ``part``."""
        now = self._clock()
        self._sums[part] += now - self._since
        self._since = now

    @property
    def times(self) -> StepTimes:
        return StepTimes(*self._sums)


#: For an engine whose time is nobody's concern.
STOPPED = Stopwatch(lambda: 0.0)
