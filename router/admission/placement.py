"""Which worker has room for a request. Pure.

A request is dispatched only against a credit, room that the worker's view shows (late binding), so
a worker holds little that another one could have begun sooner.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from router.admission.pace import slow
from router.admission.waiting import Waiting
from router.admission.worker_view import Capacity, Claim, Load, WorkerView, blocks_of
from router.config import RouterConfig

#: Room that is kept for a request which comes back from another worker is kept for so long.
_HOLD_S = 2.0


class Placement:
    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._workers: dict[str, WorkerView] = {}
        #: the worker that keeps room for a request
        self._holds: dict[str, str] = {}

    @property
    def workers(self) -> Mapping[str, WorkerView]:
        return self._workers

    # workers

    def join(self, worker_id: str, capacity: Capacity) -> None:
        self._workers.setdefault(worker_id, WorkerView(capacity))

    def leave(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id, None)
        for request_id in worker.held.expire(inf) if worker else ():
            self._holds.pop(str(request_id), None)

    def report(self, worker_id: str, load: Load, now: float) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None and load.sequence_number > worker.load.sequence_number:
            worker.load = load
            worker.end_trial()
            worker.pace.measure(load.work, worker.is_full, now)

    def acknowledge(self, worker_id: str, epoch: int) -> None:
        """The worker counts this dispatch in its state from now on, or will never have it."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.unacknowledged.drop(epoch)

    def expire(self, now: float) -> None:
        """Releases what nobody acknowledged or used in time, and compares the workers' paces."""
        for worker in self._workers.values():
            worker.unacknowledged.expire(now - self._config.dispatch_ack)
            for request_id in worker.held.expire(now - _HOLD_S):
                self._holds.pop(str(request_id), None)
        paces = {worker_id: worker.pace for worker_id, worker in self._workers.items()}
        outliers = slow(paces, self._config.slow_factor, now)
        for worker_id, worker in self._workers.items():
            worker.is_slow = worker_id in outliers

    # requests

    def reserve(self, worker_id: str, epoch: int, waiting: Waiting, now: float) -> None:
        """Counts a dispatch against the worker until it is acknowledged."""
        self._release(waiting.request_id)
        claim = Claim(waiting.prefill_tokens, waiting.choices, now)
        worker = self._workers[worker_id]
        worker.unacknowledged.add(epoch, claim)
        if waiting.is_suspect:
            worker.trial = epoch

    def hold(self, worker_id: str, request_id: str, tokens: int, choices: int, now: float) -> None:
        """Keeps room for a request that will come back to the queue in a moment."""
        self._release(request_id)
        self._keep(worker_id, request_id, Claim(tokens, choices, now))

    def _keep(self, worker_id: str, request_id: str, claim: Claim) -> None:
        self._holds[request_id] = worker_id
        self._workers[worker_id].held.add(request_id, claim)

    def _release(self, request_id: str) -> tuple[str, Claim] | None:
        """Where room was kept for it, and how much."""
        worker_id = self._holds.pop(request_id, "")
        worker = self._workers.get(worker_id)
        claim = worker.held.drop(request_id) if worker else None
        return (worker_id, claim) if claim else None

    def choose(self, waiting: Waiting) -> str | None:
        """The worker with a credit for it; None when no worker has one now. Of several it is the
        one that keeps room for it, or who is not slow and has the fewest committed tokens, then the
        least prefill pending. A suspect goes where everybody else makes tokens, if it can."""
        kept = self._release(waiting.request_id)
        ready = [
            (
                waiting.is_suspect and not worker.is_calm,
                kept is None or worker_id != kept[0],
                worker.is_slow,
                *_burden(worker),
                worker_id,
            )
            for worker_id, worker in self._workers.items()
            if self._has_credit(worker, waiting) and not self._avoids(waiting, worker_id)
        ]
        if kept is not None:
            self._keep(kept[0], waiting.request_id, kept[1])
        return min(ready)[-1] if ready else None

    def _avoids(self, waiting: Waiting, worker_id: str) -> bool:
        """Its gateway could not reach this worker, and there is another one."""
        return worker_id == waiting.avoid and len(self._workers) > 1

    def _has_credit(self, worker: WorkerView, waiting: Waiting) -> bool:
        # Whoever is lost beside a suspect might be taken for one, and a suspect for another.
        if not worker.is_open or worker.trial:
            return False
        if worker.is_idle:
            return True
        if not worker.has_slots(waiting.choices, self._config.local_depth):
            return False
        pending = worker.pending_prefill
        if pending and pending + waiting.prefill_tokens > self._config.max_pending_prefill:
            return False
        return worker.free_blocks > blocks_of(waiting)


def _burden(worker: WorkerView) -> tuple[int, int]:
    return (worker.committed_tokens, worker.pending_prefill)
