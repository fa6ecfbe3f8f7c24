"""Simulated workers: their starts, drains and losses, and the links to the router. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

from cluster.simulator.frame import Frame
from cluster.simulator.scenario import (
    Event,
    Scenario,
    WorkerDrain,
    WorkerLoss,
    WorkerSpec,
    WorkerStart,
)
from cluster.simulator.sequence import NamedSequence
from cluster.simulator.timeline import Timeline
from cluster.simulator.worker import SimulatedWorker


class Router(Protocol):
    """Interface of the simulated router, which receives the workers' reports and their losses."""

    def worker_up(self, worker: SimulatedWorker) -> None: ...

    def worker_lost(self, worker_id: str, occupants: Collection[str]) -> None:
        """Handle the loss or departure of a worker.

        ``occupants`` are the ids of the requests that had a slot at the worker.
        """
        ...

    def on_message(self, frame: Frame) -> None: ...


class Fleet:
    """Simulated workers, and their links to the router; at first there are no workers.

    A message to or from a worker takes ``scenario.link_s`` seconds. Workers are numbered from 0 in
    the order in which they become available. Each worker schedules every step separately if
    ``one_by_one``; otherwise several steps that only decode may be computed at once.
    """

    def __init__(
        self, scenario: Scenario, router: Router, timeline: Timeline, one_by_one: bool
    ) -> None:
        self._link_s = scenario.link_s
        self._router = router
        self._timeline = timeline
        self._one_by_one = one_by_one
        self._num_joined = 0
        #: workers that the router regards as connected, with the time at which they became
        #: available; for all earlier workers only sums are kept
        self._up: dict[str, tuple[SimulatedWorker, float]] = {}
        self._worker_s = 0.0
        self._num_steps = self._num_jumped = 0
        self.num_starting = 0

    def __len__(self) -> int:
        return len(self._up)

    @property
    def available(self) -> list[SimulatedWorker]:
        """Available workers that are neither draining nor lost, in the order of their numbers."""
        return [it for it, _ in self._up.values() if not it.is_draining and not it.is_lost]

    @property
    def max_model_lens(self) -> Iterator[int]:
        """Maximum sequence length in tokens of each worker that the router regards as connected.

        These include lost workers until the router has detected the loss.
        """
        return (worker.limits.max_model_len for worker, _ in self._up.values())

    @property
    def num_steps(self) -> int:
        return self._num_steps + sum(worker.num_steps for worker, _ in self._up.values())

    @property
    def num_jumped(self) -> int:
        return self._num_jumped + sum(worker.num_jumped for worker, _ in self._up.values())

    @property
    def worker_s(self) -> float:
        """Connected time in seconds, summed over all workers, including removed ones."""
        now = self._timeline.now
        return self._worker_s + sum(now - joined_at for _, joined_at in self._up.values())

    def occupants(self, worker_id: str) -> set[str]:
        """Return the ids of the requests that have a slot at this worker; empty if it is gone."""
        return self._up[worker_id][0].occupants() if worker_id in self._up else set()

    # links

    def start(self, worker_id: str, sequence: NamedSequence) -> None:
        self._timeline.after(self._link_s, self._up[worker_id][0].start, sequence)

    def abort(self, worker_id: str, epoch: int) -> None:
        if worker_id in self._up:
            self._timeline.after(self._link_s, self._up[worker_id][0].abort, epoch)

    def _send_frame(self, frame: Frame) -> None:
        self._timeline.after(self._link_s, self._router.on_message, frame)

    # starts, drains and losses

    def add_worker(self, spec: WorkerSpec) -> None:
        name = _name(self._num_joined)
        self._num_joined += 1
        worker = SimulatedWorker(name, spec, self._timeline, self._send_frame, self._one_by_one)
        self._up[name] = worker, self._timeline.now
        self._router.worker_up(worker)

    def start_worker(self, spec: WorkerSpec, start_s: float) -> None:
        self.num_starting += 1
        self._timeline.after(start_s, self._has_started, spec)

    def _has_started(self, spec: WorkerSpec) -> None:
        self.num_starting -= 1
        self.add_worker(spec)

    def remove_worker(self, worker: SimulatedWorker) -> None:
        """Remove a worker and report its loss to the router, unless this was done before."""
        if worker.worker_id in self._up:
            _, joined_at = self._up.pop(worker.worker_id)
            self._worker_s += self._timeline.now - joined_at
            self._num_steps += worker.num_steps
            self._num_jumped += worker.num_jumped
            self._router.worker_lost(worker.worker_id, worker.occupants())

    def on_drained(self, worker_id: str) -> None:
        """Remove a worker whose drain is complete, if it is still there."""
        if worker_id in self._up:
            self.remove_worker(self._up[worker_id][0])

    def apply_event(self, event: Event) -> None:
        if isinstance(event, WorkerStart):
            self.start_worker(event.spec, event.start_s)
        elif (name := _name(event.worker)) in self._up:
            self._end(event, self._up[name][0])

    def _end(self, event: WorkerLoss | WorkerDrain, worker: SimulatedWorker) -> None:
        if isinstance(event, WorkerLoss):
            worker.lose()
            self._timeline.after(event.detection_s, self.remove_worker, worker)
        else:
            worker.drain()


def _name(number: int) -> str:
    return f"worker-{number}"
