"""Which worker has room for a request. Pure.

The leader's view of a worker is its last pushed state plus the dispatches that this state does not
count yet: those whose epoch the worker has not acknowledged. A request is dispatched only against
such a credit (late binding), so a worker holds little that another one could have begun sooner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everlift.blockhash import BLOCK_SIZE
from router.admission.policy import Waiting


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a worker can hold at most, from its WorkerInfo."""

    max_num_seqs: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker said of itself last. A state with an older sequence number is ignored."""

    sequence_number: int = -1
    num_running: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    pending_prefill_tokens: int = 0
    committed_tokens: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class _Unacknowledged:
    prefill_tokens: int
    choices: int
    dispatched: float


@dataclass(slots=True)
class _Worker:
    capacity: Capacity
    load: Load = field(default_factory=Load)
    unacknowledged: dict[int, _Unacknowledged] = field(default_factory=dict)
    unacknowledged_tokens: int = 0
    unacknowledged_choices: int = 0

    @property
    def ahead(self) -> int:
        """Sequences that wait for a slot there."""
        return self.load.num_waiting + self.unacknowledged_choices

    @property
    def free_slots(self) -> int:
        return max(0, self.capacity.max_num_seqs - self.load.num_running - self.ahead)

    @property
    def is_idle(self) -> bool:
        return self.load.num_running + self.ahead == 0

    @property
    def committed_tokens(self) -> int:
        return self.load.committed_tokens + self.unacknowledged_tokens

    @property
    def pending_prefill(self) -> int:
        return self.load.pending_prefill_tokens + self.unacknowledged_tokens


class Placement:
    """``local_depth`` and ``max_pending_prefill`` as in RouterConfig; ``ack`` in seconds."""

    def __init__(self, local_depth: int, max_pending_prefill: int, ack: float) -> None:
        self._local_depth = local_depth
        self._max_pending_prefill = max_pending_prefill
        self._ack = ack
        self._workers: dict[str, _Worker] = {}

    @property
    def workers(self) -> frozenset[str]:
        return frozenset(self._workers)

    def join(self, worker_id: str, capacity: Capacity) -> None:
        self._workers.setdefault(worker_id, _Worker(capacity))

    def leave(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    def report(self, worker_id: str, load: Load) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None and load.sequence_number > worker.load.sequence_number:
            worker.load = load

    def acknowledge(self, worker_id: str, epoch: int) -> None:
        """The worker counts this dispatch in its state from now on, or will never have it."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        gone = worker.unacknowledged.pop(epoch, None)
        if gone is not None:
            worker.unacknowledged_tokens -= gone.prefill_tokens
            worker.unacknowledged_choices -= gone.choices

    def reserve(self, worker_id: str, epoch: int, waiting: Waiting, now: float) -> None:
        """Counts a dispatch against the worker until it is acknowledged."""
        worker = self._workers[worker_id]
        worker.unacknowledged[epoch] = _Unacknowledged(waiting.prefill_tokens, waiting.choices, now)
        worker.unacknowledged_tokens += waiting.prefill_tokens
        worker.unacknowledged_choices += waiting.choices

    def expire(self, now: float) -> None:
        """Releases the dispatches that nobody acknowledged in time."""
        for worker_id, worker in self._workers.items():
            late = [e for e, u in worker.unacknowledged.items() if now - u.dispatched > self._ack]
            for epoch in late:
                self.acknowledge(worker_id, epoch)

    def choose(self, waiting: Waiting) -> str | None:
        """The worker with a credit for it that has the fewest committed tokens, then the least
        prefill pending; None when no worker has one now."""
        ready = [
            (worker.committed_tokens, worker.pending_prefill, worker_id)
            for worker_id, worker in self._workers.items()
            if self._has_credit(worker, waiting) and not self._avoids(waiting, worker_id)
        ]
        return min(ready)[2] if ready else None

    def _avoids(self, waiting: Waiting, worker_id: str) -> bool:
        """Its gateway could not reach this worker, and there is another one."""
        return worker_id == waiting.avoid and len(self._workers) > 1

    def _has_credit(self, worker: _Worker, waiting: Waiting) -> bool:
        if worker.load.draining or worker.load.sequence_number < 0:
            return False
        if worker.is_idle:
            return True
        if not self._has_slots(worker, waiting.choices):
            return False
        pending = worker.pending_prefill
        if pending and pending + waiting.prefill_tokens > self._max_pending_prefill:
            return False
        return self._free_blocks(worker) > _blocks(waiting)

    def _has_slots(self, worker: _Worker, choices: int) -> bool:
        """Few enough of them have to wait for one there."""
        without = choices - worker.free_slots
        return without <= 0 or worker.ahead + without <= self._local_depth

    def _free_blocks(self, worker: _Worker) -> int:
        # What has been dispatched or waits there has a claim on blocks that its state does not
        # count yet.
        claimed = -(-worker.pending_prefill // BLOCK_SIZE)
        return worker.capacity.num_blocks - worker.load.blocks_used - claimed


def _blocks(waiting: Waiting) -> int:
    """What is known of it takes so many, but for the last one; its choices share the prompt's, and
    each other one needs one of its own."""
    return waiting.prefill_tokens // BLOCK_SIZE + waiting.choices - 1
