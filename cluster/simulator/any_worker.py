"""What all simulated workers have in common: what a router tells them at any time, and when they
say something. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from cluster.simulator.frame import Frame
from cluster.simulator.scenario import WorkerSpec
from cluster.simulator.sequence import NamedSequence
from cluster.simulator.timeline import Timeline
from router.admission.workers import Capacity, Load
from worker.engine.outcome import Outcome


class AnyWorker(ABC):
    """``tell`` gets its frames: what came of a step, and whatever else there is to say, or every
    ``beat`` that nothing was."""

    def __init__(
        self, worker_id: str, spec: WorkerSpec, timeline: Timeline, tell: Callable[[Frame], None]
    ) -> None:
        self.worker_id = worker_id
        self.limits = spec.limits
        #: steps, and those of them that were not planned one by one
        self.num_steps = self.num_jumped = 0
        self.is_draining = self.is_gone = False
        self._spec = spec
        self._timeline = timeline
        self._tell_router = tell
        self._aborts: list[int] = []
        #: epochs that the next frame acknowledges
        self._accepted: list[int] = []
        self._frames = 0
        self._told_at = timeline.now
        self._busy_s = 0.0

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.limits.max_num_seqs, self.limits.num_blocks)

    @abstractmethod
    def occupants(self) -> set[str]:
        """Ids of the requests that have a slot."""

    # the router speaks

    @abstractmethod
    def start(self, sequence: NamedSequence) -> None: ...

    def abort(self, epoch: int) -> None:
        if not self.is_gone:
            self._aborts.append(epoch)
            self._wake()

    def drain(self) -> None:
        """It takes nothing more, and hands back what it has after its step."""
        if not self.is_gone:
            self.is_draining = True
            self._wake()

    def lose(self) -> None:
        """It is gone, with all it has."""
        self.is_gone = True

    @abstractmethod
    def _wake(self) -> None:
        """Something came."""

    # what it says

    def _begin_to_beat(self) -> None:
        self._tell()
        self._timeline.after(self._spec.config.beat, self._beat)

    def _tell(self, outcomes: Sequence[Outcome] = ()) -> None:
        self._told_at = self._timeline.now
        accepted, self._accepted = tuple(self._accepted), []
        self._frames += 1
        self._tell_router(Frame(self.worker_id, self._state(), accepted, outcomes))

    @abstractmethod
    def _state(self) -> Load: ...

    @property
    @abstractmethod
    def _is_stepping(self) -> bool: ...

    def _beat(self) -> None:
        """Whoever has nothing to say says so now and then."""
        beat_s = self._spec.config.beat
        if self.is_gone or (self.is_draining and not self._is_stepping):
            return
        if self._timeline.now >= self._told_at + beat_s:
            self._tell()
        self._timeline.at(self._told_at + beat_s, self._beat)
