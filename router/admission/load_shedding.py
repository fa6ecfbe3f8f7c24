"""Who may wait, and for how long: what an overloaded queue refuses. Pure.

    comes   its first token or its end would be late   DeadlineUnmeetable  (refuse_late)
            the queue is full of its class and higher  QueueFull
    waits   the queue is full, and a higher class came Shed
            it has waited for as long as it may        QueueTimeout        (queue_ttl, refuse_late)

What a worker has had is not refused any more, and what was told once is not found to be too late.
How long a request may wait is settled when it comes, by the rules of that moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from everlift.errors import DeadlineUnmeetable, QueueFull, QueueTimeout, Shed
from router.admission.policy import Rules
from router.admission.queue import AdmissionQueue
from router.admission.request import Late, Waiting
from router.admission.wait_estimate import WaitEstimator

#: So many times its predicted prefill before its first token is wanted a request must leave: others
#: come to its worker, too. With 1 a part of those that left last came a little late, and goodput at
#: 1.3 times the load was 0.95 of that at 1.0; with 2 it was 1.02 (benchmarks/overload.py).
_PREFILL_MARGIN = 2
#: Beside that, for a request on its way to its worker and its first token on the way back.
_ON_THE_WAY_S = 0.03


@dataclass(frozen=True, slots=True)
class Refusal:
    """``slug`` is an error's. It may come again when the queue has room, and not before
    ``retry_after_s``. ``least_tokens``: its first token would come in time, and the end of so long
    an output would not; 0: it is not that."""

    waiting: Waiting
    slug: str
    retry_after_s: float | None = None
    least_tokens: int = 0


class Bounds:
    """Times are ledger time in seconds. Every operation is O(log n), or O(classes)."""

    def __init__(self, rules: Rules, queue: AdmissionQueue, waits: WaitEstimator) -> None:
        self.rules = rules
        self._queue = queue
        self._waits = waits

    def foresee(self, waiting: Waiting) -> Waiting:
        """With what is predicted of it, and when it has waited for too long."""
        if waiting.has_run:
            return waiting
        wait_s = self._waits.wait_s(self._queue.work_before(waiting))
        prefill_s = self._waits.prefill_s(waiting)
        ttft_s = None if wait_s is None or not prefill_s else wait_s + prefill_s
        return waiting._replace(
            expires=self._expires(waiting, wait_s or 0.0, prefill_s),
            predicted_wait_s=wait_s,
            predicted_ttft_s=ttft_s,
            predicted_tpot_s=self._waits.tpot_s,
        )

    def _expires(self, waiting: Waiting, wait_s: float, prefill_s: float) -> float:
        expires = waiting.arrived + (self.rules.queue_ttl or inf)
        if not self.rules.refuse_late:
            return expires
        by_first = waiting.ttft_deadline - _PREFILL_MARGIN * prefill_s
        by_end = waiting.deadline - self._output_s(waiting) - (prefill_s if wait_s else 0.0)
        return min(expires, min(by_first, by_end) - _ON_THE_WAY_S)

    def _output_s(self, waiting: Waiting) -> float:
        """From its first token to its end, at the least."""
        return (waiting.least_tokens - 1) * self._waits.least_tpot_s

    def refuse(self, waiting: Waiting) -> Refusal | None:
        """Who comes, foreseen; or who makes room for it, which does not wait any more then."""
        if (late := self._late(waiting)) is not None:
            least_tokens = waiting.least_tokens if late.is_by_output else 0
            return Refusal(waiting, DeadlineUnmeetable.slug, late.shorter_s, least_tokens)
        if len(self._queue) < self.rules.max_queued:
            return None
        shed = self._queue.shed(waiting.priority)
        return Refusal(waiting, QueueFull.slug) if shed is None else Refusal(shed, Shed.slug)

    def _late(self, waiting: Waiting) -> Late | None:
        """Even if it waits no longer than nearly all others that were told as much, and its tokens
        come as fast as those of nearly none."""
        if not self.rules.refuse_late:
            return None
        return waiting.wanted.late(
            self._waits.least_wait_s(waiting.predicted_wait_s or 0.0),
            self._waits.prefill_s(waiting),
            self._output_s(waiting),
        )

    def expire(self, ledger_now: float) -> list[Refusal]:
        """Takes out those that have waited for too long, and refuses them."""
        expired = []
        while (waiting := self._queue.expire(ledger_now)) is not None:
            expired.append(Refusal(waiting, QueueTimeout.slug))
        return expired
