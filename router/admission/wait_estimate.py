"""Estimates of a request's wait, first token and end. Pure.

    wait     (queued work of its class and higher ones) / (work that leaves the queue per second)
    prefill  (half of a step) + (time to compute its worker's pending prompt tokens and its own)
    output   (its tokens after the first one) * (predicted step time of its worker's batch)

The work that leaves the queue per second is the measured drain rate (``DrainRate``). The workers'
saturated throughput is used as long as the drain rate is unknown. Each worker's saturated
throughput is measured (``ThroughputEstimator``). A worker that was never saturated counts with the
predicted throughput of a full batch (``FittedStepTime``).

The order within a class is ignored, so shorter or more urgent requests may wait less than is
predicted. ``LeastRatio`` therefore learns a ratio of actual to predicted wait that nearly all
requests exceed. The same is done for the time per output token.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from everlift.hashes import BLOCK_SIZE
from everlift.v1 import session_pb2
from router.admission.request import Waiting
from router.admission.throughput import DrainRate, LeastRatio
from router.admission.workers import WorkerView, batch_of

#: Predicted waits below this, in seconds, are not compared with the actual ones, because the
#: intervals of the leader's ticks dominate them.
_SHORTEST_S = 0.1


class WaitEstimator:
    """Estimator of the waits of requests at the leader, from the state of all ``workers``.

    ``update`` goes through all workers, so that a prediction is O(1).
    """

    def __init__(self, workers: Mapping[str, WorkerView]) -> None:
        self._workers = workers
        self.drain = DrainRate()
        self.least_wait_ratio = LeastRatio()
        self.least_tpot_ratio = LeastRatio()
        #: tokens of work that leave the queue per second while requests are queued; 0: unknown
        self.tokens_per_s = 0.0
        self._next: WorkerView | None = None

    def update(self, num_queued: int, now: float) -> None:
        """Update the rates from the workers and from the requests that left. O(workers)."""
        open_ = [worker for worker in self._workers.values() if worker.is_open]
        self.drain.measure(num_queued, len(open_), now)
        self._next = _next_of(open_)
        if self.drain.is_known:
            self.tokens_per_s = self.drain.tokens_per_s(len(open_))
        else:
            rates = [rate for worker in open_ if (rate := _full_rate(worker)) is not None]
            self.tokens_per_s = fmean(rates) * len(open_) if rates else 0.0

    def wait_s(self, work_tokens: int) -> float | None:
        """Return the seconds until ``work_tokens`` tokens have left the queue; None if unknown."""
        if not work_tokens:
            return 0.0
        return work_tokens / self.tokens_per_s if self.tokens_per_s else None

    def note_departure(self, waiting: Waiting, ledger_now: float) -> None:
        """Record that a request left the queue for a worker, to learn from its wait."""
        self.drain.note_departure(waiting.work_tokens)
        predicted_s = waiting.predicted_wait_s
        if predicted_s is not None and predicted_s >= _SHORTEST_S:
            self.least_wait_ratio.note((ledger_now - waiting.arrived) / predicted_s)

    def prefill_s(self, waiting: Waiting) -> float:
        """Return the predicted seconds to the first token if dispatched now; 0 if unknown.

        Tokens that some worker had cached when the request arrived are not computed. If only the
        time of the prefill is unknown, the result is the rest of the current step.
        """
        worker = self._next
        if worker is None:
            return 0.0
        # On average half of the current step remains.
        rest_s = worker.throughput.step_s / 2
        tokens = worker.prefill_before(waiting.uncached_tokens) + waiting.uncached_tokens
        return rest_s + (worker.prefill_s(tokens, waiting.cached_tokens) or 0.0)

    def least_wait_s(self, wait_s: float) -> float:
        """Return the wait in seconds that 95 % of requests exceed if ``wait_s`` was predicted."""
        return self.least_wait_ratio.value * wait_s

    @property
    def tpot_s(self) -> float | None:
        """Predicted seconds per output token of a new request; None if unknown."""
        return None if self._next is None else self._next.tpot_s

    @property
    def least_tpot_s(self) -> float:
        """Seconds per output token that 95 % of new requests exceed; 0 if unknown."""
        if self._next is None or self._next.tpot_s is None:
            return 0.0
        return self.least_tpot_ratio.value * min(self._next.tpot_s, self._next.decode_s)


def _next_of(workers: list[WorkerView]) -> WorkerView | None:
    """Return the worker that would probably receive a new request; None without workers."""
    return min(workers, key=lambda it: it.load_rank, default=None)


def _full_rate(worker: WorkerView) -> float | None:
    if worker.throughput.full_rate is not None:
        return worker.throughput.full_rate
    row = worker.throughput.row
    if row is None or not worker.step_time.is_known:
        return None
    max_rows = worker.capacity.num_blocks * BLOCK_SIZE / max(1.0, row.kv_tokens)
    batch = batch_of(max(1, min(worker.slots, int(max_rows))), row)
    return batch.num_tokens / worker.step_time.seconds(batch)


#: Assumed throughput of a cluster in tokens per second until it is known. It is low, so that orders
#: that depend on an estimated wait have one from the first request on.
_UNKNOWN_RATE = 1000.0


class EstimatedWait:
    """Estimated wait of new requests in a router, from the leader's last queue estimate.

    Work is a predicted number of tokens to compute.
    """

    def __init__(self) -> None:
        self._queue_estimate = session_pb2.QueueEstimate()
        #: tokens per second; the last known rate is kept while it is unknown
        self._rate = _UNKNOWN_RATE
        #: by class: predicted tokens of requests that arrived since the leader's last estimate
        self._arrived_tokens: dict[int, int] = {}

    def on_estimate(self, queue_estimate: session_pb2.QueueEstimate) -> None:
        """Replace the queue estimate by the leader's newest one."""
        self._queue_estimate = queue_estimate
        self._rate = queue_estimate.tokens_per_s or self._rate
        self._arrived_tokens.clear()

    def estimate(self, priority: int, work_tokens: int) -> float:
        """Return the seconds until the work ahead of a request of this class has left the queue.

        The request's own ``work_tokens`` are then added to the work ahead of later requests.
        """
        waits = [it.work_tokens for it in self._queue_estimate.waits if it.priority >= priority]
        arrived = sum(tokens for its, tokens in self._arrived_tokens.items() if its >= priority)
        self._arrived_tokens[priority] = self._arrived_tokens.get(priority, 0) + work_tokens
        return (arrived + max(waits, default=0)) / self._rate
