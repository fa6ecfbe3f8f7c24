"""Closed batches of similar outputs, by response ratio: Magnus (arXiv 2406.04785). Pure."""

from __future__ import annotations

from math import inf

from worker.engine.limits import Limits
from worker.engine.policies.policy import Policy
from worker.engine.policies.serving_time import BatchSize, ServingTime
from worker.engine.policies.similar_batches import SimilarBatches, WaitingBatch
from worker.engine.sequence import Sequence
from worker.engine.slot_table import SlotTable


class Magnus(Policy):
    """Policy of closed batches of sequences with similar predicted output lengths.

    Once a batch runs, it gets no further sequences. When all its sequences have ended, one of the
    waiting batches of the highest priority is next: the one with the highest response ratio,

        (seconds waited + estimated serving seconds) / estimated serving seconds

    Only the longest-waiting batch of each band (a range of predicted output lengths, see
    ``SimilarBatches``) is considered, so the cost does not depend on the number of waiting
    sequences.
    """

    follows_time = True

    def __init__(self, limits: Limits) -> None:
        self._waiting = SimilarBatches(limits)
        self._serving_time = ServingTime()
        self._now = 0.0
        #: size of the running batch, and the time at which it began
        self._running: BatchSize | None = None
        self._started_at = 0.0
        #: whether sequences were running or waiting before this step; if not, the engine may have
        #: been idle
        self._is_busy = False

    @property
    def waiting(self) -> SimilarBatches:
        return self._waiting

    def begin_step(self, slot_table: SlotTable, now: float) -> None:
        self._now = now
        self._is_busy = bool(slot_table.known_by_slot.any()) or self._has_waited()
        self._waiting.begin_step(now)

    def head(self, num_running: int) -> Sequence | None:
        if not num_running and self._waiting.member() is None:
            self._end()
            self._take_next()
        return self._waiting.member()

    def _end(self) -> None:
        if self._running is not None and self._is_busy and self._now > self._started_at:
            self._serving_time.learn(self._running, self._now - self._started_at)
        self._running = None

    def _take_next(self) -> None:
        if heads := self._waiting.heads():
            batch = max(heads, key=self._rank)
            self._running, self._started_at = batch.size, self._now
            self._waiting.admit(batch)

    def _rank(self, batch: WaitingBatch) -> tuple[float, float, int]:
        serving_s = self._serving_time.estimate(batch.size)
        return (self._now - batch.since + serving_s) / serving_s, -serving_s, -batch.order

    def _has_waited(self) -> bool:
        return any(batch.since < inf for batch in self._waiting.heads())
