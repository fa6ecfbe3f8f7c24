"""Policy of the autoscaler: the number of workers for the present load. Pure.

Work is counted in tokens, of prompts and of predicted outputs. Let ``r`` be the throughput of a
saturated worker and ``a`` the arrival rate, both in tokens per second, and ``q`` the queued tokens:

    need = max( (a / utilisation + q / drain_target) / r,
                running sequences / (utilisation * slots of a worker),
                used blocks / (kv_utilisation * blocks of a worker) )

For additions, only the first term counts until all workers have been up for ``ttft_target``
seconds. The other terms would ask for too many workers in that time, because workers that drain a
queue have all slots in use.

Workers are added, as many as needed, if requests are queued and their estimated wait exceeds half
of ``ttft_target``. While ``r`` is unknown, one worker is added at a time, when all others have been
up for ``ttft_target`` seconds. If there is no worker, any queued request suffices. Otherwise the
queued tokens, arrivals and waits of the class of batches do not count: its requests use the workers
that are there.

A rush is a recent arrival rate that is above the throughput of all workers, and higher than the
previous rate by more than chance explains. In a rush, workers are added as soon as the estimated
wait exceeds a tenth of ``ttft_target``, because a short wait soon becomes a long one. The need is
then the first term, or ``b / (utilisation * r)`` if that is larger, where ``b`` is a lower bound of
the recent arrival rate.

Workers are removed if no request is queued, no worker is starting, and fewer workers would have
been enough at all times in the last ``down_delay`` seconds.

A reversal is an addition after a removal, or a removal after an addition. Stricter rules apply in
the ten minutes after a reversal. Workers are then added only if the estimated wait exceeds
``ttft_target``, or if there is no worker and a request is queued. The rule above for removals does
not apply then. All workers are removed after ``idle_delay`` seconds without work if ``min_workers``
is 0, even in these ten minutes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, exp, inf, sqrt

from cluster.autoscale.config import AutoscaleConfig
from everlift.v1.session_pb2 import ClusterLoad

#: Time constants in seconds of the averages of the arrival rate. The short one detects a change,
#: the long one measures the rate.
_SHORT_WINDOW_S, _LONG_WINDOW_S = 2.0, 30.0
#: Share of the TTFT target above which an estimated wait adds workers, normally and in a rush.
_MAX_WAIT_SHARE, _MAX_WAIT_SHARE_IN_A_RUSH = 0.5, 0.1
#: The arrival rate counts as risen if the short average exceeds the long one by this many standard
#: deviations. By chance this happens in about one of several hundred decisions, and more often the
#: more the requests differ in size.
_SIGNIFICANT = 3.0
#: A report's arrivals enter the short average only up to this many standard deviations above the
#: expected number. Arrivals beyond that are a single burst, not a lasting rate.
_MAX_DEVIATIONS = 4.0
#: Seconds after a reversal during which further changes have stricter conditions.
_COOLDOWN_S = 600.0
#: Seconds after which a missing worker is assumed never to start. Until then no worker is removed,
#: even if fewer would be enough.
_START_TIMEOUT_S = 600.0
#: A need that exceeds a whole number of workers by at most this much adds no further worker.
_SLACK = 0.05


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of the autoscaler: the target number of ``workers``, and the reason for it.

    ``need`` is the number of workers that the present load needs by the policy's formula; it is not
    rounded. ``wait_s`` is the estimated queue wait in seconds of a request that arrives now.
    """

    workers: int
    reason: str
    need: float = 0.0
    wait_s: float = 0.0


class Autoscaler:
    """Policy that decides the number of workers; ``decide`` is to be called periodically."""

    def __init__(self, config: AutoscaleConfig) -> None:
        if config.max_workers is None:
            raise ValueError("max_workers must be set for an autoscaler")
        self._config = config
        self._arrivals = Arrivals()
        self._capacity = Capacity()
        #: largest need of the last ``down_delay`` seconds
        self._needs = SlidingMaximum(config.down_delay)
        self._busy_at: float | None = None
        #: workers of this cluster that are up, according to the last report
        self._num_up = 0
        #: 1 if the last change added workers, -1 if it removed some, 0 before the first change
        self._direction = 0
        self._cooldown_until = -inf
        #: time since which all workers of this cluster are up; inf while some are not
        self._complete_at = inf
        #: time since which some workers are not up; inf if all are, and after each change
        self._missing_at = inf

    @property
    def _max_workers(self) -> int:
        assert self._config.max_workers is not None, "checked where the configuration came in"
        return self._config.max_workers

    def configure(self, config: AutoscaleConfig) -> None:
        """Replace the settings. Raises ValueError if ``max_workers`` is not set."""
        if config.max_workers is None:
            raise ValueError("max_workers must be set for an autoscaler")
        if config.down_delay != self._config.down_delay:
            self._needs = SlidingMaximum(config.down_delay)
        self._config = config

    def decide(
        self,
        load: ClusterLoad | None,
        age_s: float,
        workers: int,
        now: float,
        others: int = 0,
        replaced: int = 0,
    ) -> Decision:
        """Return the target number of workers of this cluster, with the reason.

        Args:
            load: Last load report of the leader, the router that places all requests; None if there
                is none.
            age_s: Age of the report in seconds.
            workers: Present target number of workers of this cluster, including starting ones.
            now: Monotonic time in seconds; never less than in the previous call.
            others: Number of workers in the report that belong to another cluster on the same
                ledger. There are two clusters during an upgrade.
            replaced: Number of workers that this cluster's workers are to replace, in a cluster
                with other models and its own ledger.
        """
        if load is None or age_s > self._config.stale:
            # The need at this time, and whether the cluster is idle, are unknown.
            self._needs.clear()
            self._busy_at = None
            return self._unchanged(workers, "the load is not known")
        self._arrivals.note(load, now - age_s)
        self._capacity.note(load)
        if load.queued or load.running or self._busy_at is None:
            self._busy_at = now
        self._num_up = load.workers - others
        is_complete = self._num_up >= workers
        self._complete_at = min(self._complete_at, now) if is_complete else inf
        self._missing_at = inf if is_complete else min(self._missing_at, now)
        throughput, occupancy = (
            self._throughput_need(load, self._arrivals.long_rate),
            self._occupancy_need(load),
        )
        need, wait_s = max(throughput, occupancy), self._wait_s(load)
        if others or replaced:
            # Either cluster may be removed. Until then each has at least as many workers as the
            # other, so that it can take over all of the load.
            self._needs.clear()
            target = self._clamped(max(workers, others, replaced))
            reason = "another cluster serves as well"
        else:
            self._needs.note(need, now)
            target, reason = self._target(load, need, wait_s, workers, now)
        self._record_change(target - workers, now)
        return Decision(target, reason, need, wait_s)

    def _unchanged(self, workers: int, reason: str) -> Decision:
        return Decision(self._clamped(workers), reason)

    def _clamped(self, workers: int) -> int:
        return min(max(workers, self._config.min_workers), self._max_workers)

    def _throughput_need(self, load: ClusterLoad, arrival_rate: float) -> float:
        config, rate = self._config, self._capacity.rate
        if not rate:
            return 0.0
        drained = _queued_tokens(load) / config.drain_target
        return (arrival_rate / config.utilisation + drained) / rate

    def _rush_need(self) -> float:
        return self._arrivals.short_rate_lower_bound / (
            self._config.utilisation * self._capacity.rate
        )

    def _occupancy_need(self, load: ClusterLoad) -> float:
        config, worker = self._config, self._capacity
        slots = load.running / (config.utilisation * worker.slots) if worker.slots else 0.0
        blocks = (
            load.blocks_used / (config.kv_utilisation * worker.blocks) if worker.blocks else 0.0
        )
        return max(slots, blocks)

    def _wait_s(self, load: ClusterLoad) -> float:
        queued_tokens, rate = _queued_tokens(load), load.workers * self._capacity.rate
        if load.queued_tokens and not queued_tokens:
            return 0.0
        return max(load.waited_s, queued_tokens / rate if rate else 0.0)

    def _target(
        self, load: ClusterLoad, need: float, wait_s: float, workers: int, now: float
    ) -> tuple[int, str]:
        is_rush, has_settled = self._is_rush(workers), self._has_settled(now)
        if is_rush:
            need = max(self._throughput_need(load, self._arrivals.long_rate), self._rush_need())
        elif self._capacity.rate and not has_settled:
            need = self._throughput_need(load, self._arrivals.long_rate)
        enough = max(1, ceil(need - _SLACK))
        if workers < self._config.min_workers or workers > self._max_workers:
            return self._clamped(workers), "limits"
        if workers == 0:
            return (self._clamped(enough), "requests wait") if load.queued else (0, "nothing to do")
        if load.queued and self._is_wait_too_long(wait_s, is_rush, now):
            more = enough if self._capacity.rate else workers + has_settled
            if more > workers:
                return self._clamped(more), f"requests would wait {wait_s:.1f} s"
            return workers, "enough workers are starting" if self._num_up < workers else "enough"
        return self._scale_down(load, workers, now)

    def _is_rush(self, workers: int) -> bool:
        arrivals = self._arrivals
        return 0 < workers * self._capacity.rate < arrivals.short_rate and arrivals.have_risen

    def _is_wait_too_long(self, wait_s: float, is_rush: bool, now: float) -> bool:
        if now < self._cooldown_until:
            return wait_s > self._config.ttft_target
        share = _MAX_WAIT_SHARE_IN_A_RUSH if is_rush else _MAX_WAIT_SHARE
        return wait_s > share * self._config.ttft_target

    def _has_settled(self, now: float) -> bool:
        return now - self._complete_at >= self._config.ttft_target

    def _awaits_workers(self, workers: int, now: float) -> bool:
        return self._num_up < workers and now - self._missing_at < _START_TIMEOUT_S

    def _scale_down(self, load: ClusterLoad, workers: int, now: float) -> tuple[int, str]:
        config = self._config
        busy_at = now if self._busy_at is None else self._busy_at
        if config.min_workers == 0 and now - busy_at >= config.idle_delay:
            return 0, "nothing to do"
        if load.queued or self._awaits_workers(workers, now) or now < self._cooldown_until:
            return workers, "enough"
        enough = max(1, ceil(self._needs.largest))
        if self._needs.covers(now) and enough < workers:
            return self._clamped(enough), "fewer are enough"
        return workers, "enough"

    def _record_change(self, change: int, now: float) -> None:
        if change == 0:
            return
        direction = 1 if change > 0 else -1
        if self._direction == -direction:
            self._cooldown_until = now + _COOLDOWN_S
        self._direction = direction
        self._missing_at = inf
        # Needs measured with the previous number of workers do not apply to the new number.
        self._needs.clear()


class Arrivals:
    """Arrival rate in tokens per second: ``short_rate`` and ``long_rate`` are two averages of it.

    The averages are exponential, with the time constants _SHORT_WINDOW_S and _LONG_WINDOW_S.
    """

    def __init__(self) -> None:
        self.short_rate = self.long_rate = 0.0
        #: variance of the tokens that arrive in one second
        self._variance = 0.0
        self._term = 0
        self._offered = 0
        self._reported_at = -inf
        self._observed_s = 0.0

    def note(self, load: ClusterLoad, reported_at: float) -> None:
        """Update the averages with a load report that was made at ``reported_at``, in seconds.

        The report has the predicted number of tokens of all requests, except batches, that have
        arrived since its router became the leader, which places all requests. The first report of a
        new leader therefore does not change the averages.
        """
        since, arrived = reported_at - self._reported_at, load.offered_tokens - self._offered
        if since <= 0:
            return
        is_same_term = load.term == self._term
        self._reported_at, self._term, self._offered = reported_at, load.term, load.offered_tokens
        if is_same_term:
            self._observed_s += since
            sustained = min(
                arrived, self.long_rate * since + _MAX_DEVIATIONS * sqrt(self._variance * since)
            )
            self.short_rate += self._weight(since, _SHORT_WINDOW_S) * (
                sustained / since - self.short_rate
            )
            squared_error = (arrived - self.long_rate * since) ** 2 / since
            self._variance += self._weight(since, _LONG_WINDOW_S) * (squared_error - self._variance)
            self.long_rate += self._weight(since, _LONG_WINDOW_S) * (
                arrived / since - self.long_rate
            )

    @property
    def have_risen(self) -> bool:
        """Return whether the arrival rate has risen by more than chance explains."""
        return self.short_rate - self.long_rate > _SIGNIFICANT * self._deviation

    @property
    def short_rate_lower_bound(self) -> float:
        return self.short_rate - self._deviation

    @property
    def _deviation(self) -> float:
        return sqrt(self._variance / (2 * _SHORT_WINDOW_S))

    def _weight(self, since: float, memory_s: float) -> float:
        return max(1.0 - exp(-since / memory_s), since / self._observed_s)


class Capacity:
    """Last known capacity of one worker: throughput in tokens per second, slots and KV blocks.

    The values are kept while the cluster has no worker.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self.slots = self.blocks = 0.0

    def note(self, load: ClusterLoad) -> None:
        self.rate = load.worker_rate or self.rate
        if load.workers:
            self.slots = load.slots / load.workers
            self.blocks = load.blocks_total / load.workers


class SlidingMaximum:
    """Largest number recorded in the last ``seconds``; ``note`` takes amortised constant time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        #: (time, number) pairs, the oldest first; each number is less than the one before
        self._falling: deque[tuple[float, float]] = deque()

    def note(self, number: float, now: float) -> None:
        self._since = now if self._since is None else self._since
        while self._falling and self._falling[-1][1] <= number:
            self._falling.pop()
        self._falling.append((now, number))
        while self._falling[0][0] < now - self._seconds:
            self._falling.popleft()

    @property
    def largest(self) -> float:
        return self._falling[0][1] if self._falling else 0.0

    def covers(self, now: float) -> bool:
        """Return whether recording began at least ``seconds`` before ``now``.

        Recording begins with the first ``note`` after the creation or a ``clear``. The result is
        False before that.
        """
        return self._since is not None and now - self._since >= self._seconds

    def clear(self) -> None:
        self._falling.clear()
        self._since = None


def _queued_tokens(load: ClusterLoad) -> int:
    """Return the number of queued tokens, except those of the lowest class (batches).

    Tokens of that class are never counted. ``_target`` adds workers for queued requests of that
    class only while there is no worker.
    """
    return load.queued_tokens - load.batch_tokens
