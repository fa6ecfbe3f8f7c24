"""Throughput of workers, from their own reports. Pure.

A step takes longer the more tokens it computes, so only steps of about as many tokens are compared.
The mean time is kept for each size class (1, 2 to 3, 4 to 7, ... tokens per step). If a worker
takes ``t`` seconds for steps of ``m`` tokens, then a step of ``n`` tokens takes at most

    t              if m >= n     fewer tokens do not take longer
    t * n / m      if m < n      the time per token does not grow with the number of tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, inf
from statistics import median
from typing import NamedTuple, Protocol

from everlift.hashes import BLOCK_SIZE
from everlift.step_time import StepSize

#: Minimum duration of a measurement, in seconds.
_SAMPLE_S = 0.2
#: Time constants of the mean step times and of the flow of freed blocks, in seconds.
_STEP_MEMORY_S = 1.0
_FLOW_MEMORY_S = 5.0
#: Time constant of the throughput at saturation and of the mean row, in seconds. It is longer,
#: because both depend on the requests that happen to run at the worker.
_FULL_MEMORY_S = 10.0
#: A worker whose last step is older than this, in seconds, is not called slow any more, because it
#: has to be tried again.
_OUTDATED_S = 10.0
#: Steps shorter than this, in seconds, are never slow: their time depends on the machine's other
#: load.
_SHORTEST_SLOW_S = 0.02


class Counters(Protocol):
    """Counters of a worker's engine: a part of the fields of the message EngineCounters."""

    @property
    def prefix_hit_tokens(self) -> int: ...

    @property
    def recomputed_tokens(self) -> int: ...

    @property
    def draft_tokens(self) -> int: ...

    @property
    def accepted_tokens(self) -> int: ...


def spared_tokens(counters: Counters) -> int:
    """Return the tokens by which requests progressed, less the tokens that were computed.

    This is the number of prefix-cache hits, less the rejected draft tokens and the recomputed ones.
    """
    wrong_drafts = counters.draft_tokens - counters.accepted_tokens
    return counters.prefix_hit_tokens - wrong_drafts - counters.recomputed_tokens


@dataclass(frozen=True, slots=True)
class Work:
    """Work that a worker has done since its start, as sums that only grow.

    ``step`` is the number of steps, and ``busy_s`` their total duration in seconds.
    """

    step: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    released_blocks: int = 0
    busy_s: float = 0.0
    #: sums over all steps of the fields of StepSize; the sum of num_tokens is ``computed_tokens``
    num_rows: int = 0
    kv_tokens: int = 0
    num_pairs: int = 0
    #: result of the function ``spared_tokens``
    spared_tokens: int = 0

    @property
    def done_tokens(self) -> int:
        """Prompt and output tokens by which requests have progressed, with prefix-cache hits."""
        return self.computed_tokens + self.spared_tokens


class Sample(NamedTuple):
    """Mean size and mean duration in seconds of the steps between two reports of a worker."""

    size: StepSize
    seconds: float


@dataclass(slots=True)
class _Steps:
    tokens: float
    seconds: float

    def blend(self, tokens: float, seconds: float, weight: float) -> None:
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)


class ThroughputEstimator:
    """Estimator of one worker's throughput and step times.

    ``full_rate`` is the number of prompt and output tokens per second at saturation, including
    prefix-cache hits; None if the worker was never saturated.
    """

    def __init__(self) -> None:
        self._mean_steps: dict[int, _Steps] = {}
        self._last: _Steps | None = None
        self._last_step_at = -inf
        self._sample: tuple[float, Work] | None = None
        self._observed_s = 0.0
        self._block_free_rate = 0.0
        self._was_full = False
        self.full_rate: float | None = None
        #: sum of the sizes of all steps, with exponentially decaying weights
        self._computed = StepSize(0, 0, 0, 0)

    @property
    def step_s(self) -> float:
        """Mean seconds of a recent step, with exponential weights; 0 before the first step."""
        return self._last.seconds if self._last else 0.0

    @property
    def size_class(self) -> int:
        """Size class of recent steps: the number of binary digits of their mean tokens.

        It is 0 before the first step.
        """
        return _size_class(self._last.tokens) if self._last else 0

    @property
    def row(self) -> StepSize | None:
        """Mean size of a row, one sequence's part of a recent step; None before any step."""
        num_rows = self._computed.num_rows
        return StepSize(*(sum_ / num_rows for sum_ in self._computed)) if num_rows else None

    @property
    def prefill_rate(self) -> float | None:
        """Tokens per second in steps of the fastest size class; None if no step was measured."""
        rates = [steps.tokens / steps.seconds for steps in self._mean_steps.values()]
        return max(rates, default=None)

    @property
    def free_rate(self) -> float | None:
        """KV blocks freed per second, less those that new output takes; None if unknown."""
        return self._block_free_rate if self._observed_s >= _STEP_MEMORY_S else None

    def max_step_s(self, tokens: float) -> float:
        """Return an upper bound on the seconds of a step of ``tokens`` tokens; inf if unknown."""
        return min(
            (it.seconds * max(1.0, tokens / it.tokens) for it in self._mean_steps.values()),
            default=inf,
        )

    def measure(self, work: Work, is_full: bool, now: float) -> Sample | None:
        """Update the estimates; return the mean size and duration of the steps since the last time.

        ``work`` is all work of the worker, and ``now`` is in seconds. ``is_full`` is True if the
        worker is saturated, so that more sequences would not increase its throughput. The result
        is None if there were no steps, if the last measurement was less than 0.2 s ago, or at the
        first call.
        """
        if self._sample is None:
            self._sample, self._was_full = (now, work), is_full
            return None
        since, before = self._sample
        self._was_full &= is_full
        if (duration := now - since) < _SAMPLE_S:
            return None
        if self._was_full:
            self._measure_full((work.done_tokens - before.done_tokens) / duration, duration)
        self._sample, self._was_full = (now, work), is_full
        self._measure_flow(before, work, duration)
        sample = _steps_between(before, work)
        if sample is not None:
            self._measure_steps(sample.size.num_tokens, sample.seconds, duration)
            self._sum_up(sample.size, work.step - before.step, duration)
            self._last_step_at = now
        return sample

    def _sum_up(self, size: StepSize, steps: int, duration: float) -> None:
        decay = exp(-duration / _FULL_MEMORY_S)
        sums = zip(self._computed, size, strict=True)
        self._computed = StepSize(*(decay * before + steps * each for before, each in sums))

    def _measure_full(self, rate: float, duration: float) -> None:
        known = rate if self.full_rate is None else self.full_rate
        self.full_rate = known + _weight(duration, _FULL_MEMORY_S) * (rate - known)

    def _measure_flow(self, before: Work, work: Work, duration: float) -> None:
        self._observed_s += duration
        grown = (work.output_tokens - before.output_tokens) / BLOCK_SIZE
        rate = (work.released_blocks - before.released_blocks - grown) / duration
        weight = max(_weight(duration, _FLOW_MEMORY_S), min(1.0, duration / self._observed_s))
        self._block_free_rate += weight * (rate - self._block_free_rate)

    def _measure_steps(self, tokens: float, seconds: float, duration: float) -> None:
        weight = _weight(duration, _STEP_MEMORY_S)
        usual = self._mean_steps.setdefault(_size_class(tokens), _Steps(tokens, seconds))
        usual.blend(tokens, seconds, weight)
        self._last = self._last or _Steps(tokens, seconds)
        self._last.blend(tokens, seconds, weight)

    def is_slower(self, others: list[ThroughputEstimator], factor: float, now: float) -> bool:
        """Return whether recent steps take over ``factor`` times as long as at other workers.

        The mean recent step is compared with the median of ``max_step_s`` over ``others``. Return
        False if nothing is known, if the last step is too old, or if steps are very short.
        """
        last = self._last
        if (
            last is None
            or last.seconds <= _SHORTEST_SLOW_S
            or now - self._last_step_at > _OUTDATED_S
        ):
            return False
        known = [most for it in others if (most := it.max_step_s(last.tokens)) < inf]
        return bool(known) and last.seconds > factor * median(known)


def _steps_between(before: Work, work: Work) -> Sample | None:
    steps, busy_s = work.step - before.step, work.busy_s - before.busy_s
    size = StepSize(
        work.num_rows - before.num_rows,
        work.computed_tokens - before.computed_tokens,
        work.kv_tokens - before.kv_tokens,
        work.num_pairs - before.num_pairs,
    )
    if steps <= 0 or busy_s <= 0 or size.num_tokens <= 0:
        return None
    return Sample(StepSize(*(sum_ / steps for sum_ in size)), busy_s / steps)


def slow_workers(
    estimators: Mapping[str, ThroughputEstimator], factor: float, now: float
) -> frozenset[str]:
    """Return the ids of the workers whose steps take over ``factor`` times as long as the others'.

    ``estimators`` is by worker id. A worker is slow if its mean step is longer than the median over
    all workers and ``is_slower`` returns True for it. The function takes O(workers) for each size
    class of steps, and again for each worker that a cheap bound does not exclude.
    """
    seconds = [estimator.step_s for estimator in estimators.values() if estimator.step_s]
    if len(seconds) < 2:
        return frozenset()
    usual, all_estimators = median(seconds), list(estimators.values())
    least: dict[int, float] = {}
    found = []
    for name, estimator in estimators.items():
        if estimator.step_s <= max(usual, _SHORTEST_SLOW_S):
            continue
        if (size := estimator.size_class) not in least:
            least[size] = _least_median_s(all_estimators, size)
        may_be = estimator.step_s > factor * least[size]
        if may_be and estimator.is_slower(
            [it for it in all_estimators if it is not estimator], factor, now
        ):
            found.append(name)
    return frozenset(found)


def _least_median_s(estimators: Iterable[ThroughputEstimator], size: int) -> float:
    """Return a lower bound on the median of ``max_step_s`` over all workers but one, in seconds.

    The bound is valid for steps of size class ``size``, whichever worker is left out. The result is
    infinite if the step times of fewer than two workers are known.
    """
    fewest = 1 << size >> 1
    known = sorted(most for it in estimators if (most := it.max_step_s(fewest)) < inf)
    return known[(len(known) - 2) // 2] if len(known) > 1 else inf


def _weight(duration: float, memory_s: float) -> float:
    return 1.0 - exp(-duration / memory_s)


def _size_class(tokens: float) -> int:
    return int(tokens).bit_length()


#: Time constant of the drain rates, in seconds.
_MEMORY_S = 10.0
#: The time constant is at least the time in which this many requests leave. Otherwise the rate of a
#: slow queue would fall to nothing between two departures.
_MEMORY_REQUESTS = 8
#: Seconds of observation from which the rates are known.
_ENOUGH_S = 1.0


class DrainRate:
    """Rate at which work leaves the queue, per worker.

    A rate per worker stays valid when the number of workers changes.
    """

    def __init__(self) -> None:
        self._tokens = self._requests = 0
        self._since: float | None = None
        self._observed_s = 0.0
        self._token_rate = self._request_rate = 0.0

    def note_departure(self, work_tokens: int) -> None:
        """Record that a request left the queue for a worker."""
        self._tokens += work_tokens
        self._requests += 1

    def pause(self) -> None:
        """Pause the measurement until ``measure`` is called with queued requests.

        The caller must pause it if no request is queued, or if all queued ones are parked. Workers
        then do not limit the rate at which work leaves the queue.
        """
        self._since = None

    def measure(self, num_queued: int, num_workers: int, now: float) -> None:
        """Update the rates from the requests that left since the last call; ``now`` in seconds."""
        if self._since is not None and num_workers and (duration := now - self._since) > 0:
            self._blend(duration, num_workers)
        self._tokens = self._requests = 0
        self._since = now if num_queued else None

    def _blend(self, duration: float, num_workers: int) -> None:
        self._observed_s += duration
        decay = min(1 / _MEMORY_S, self.requests_per_s(num_workers) / _MEMORY_REQUESTS)
        weight = max(1 - exp(-duration * decay), min(1.0, duration / self._observed_s))
        tokens = self._tokens / duration / num_workers
        requests = self._requests / duration / num_workers
        self._token_rate += weight * (tokens - self._token_rate)
        self._request_rate += weight * (requests - self._request_rate)

    @property
    def is_known(self) -> bool:
        return self._observed_s >= _ENOUGH_S and self._token_rate > 0

    def tokens_per_s(self, num_workers: int) -> float:
        """Return the tokens of work that ``num_workers`` workers take from the queue per second."""
        return self._token_rate * num_workers

    def requests_per_s(self, num_workers: int) -> float:
        return self._request_rate * num_workers


#: Share of requests that take less than the estimated least.
_QUANTILE = 0.05
#: Step of the approximation: a request that takes less lowers the logarithm by nearly this much.
_STEP = 0.1


class LeastRatio:
    """Estimator of the shortest plausible time of a request, relative to the predicted time.

    ``value`` is the ratio of actual to predicted time that 95 % of requests exceed, at most 1. This
    0.05 quantile is learned by stochastic approximation (Robbins and Monro, 1951) of its logarithm.
    """

    def __init__(self) -> None:
        self.value = 0.8

    def note(self, ratio: float) -> None:
        """Record a request that took ``ratio`` times as long as predicted."""
        is_below = ratio < self.value
        self.value = min(1.0, self.value * exp(_STEP * (_QUANTILE - is_below)))


#: Minimum length in tokens of an output whose time per token is used. In a shorter output, the
#: delays of frames and of the ledger dominate.
_FEWEST = 16


def measured_tpot_ratio(
    predicted_s: float | None, decode_s: float, num_tokens: int
) -> float | None:
    """Return the measured time per output token divided by the predicted one, ``predicted_s``.

    ``decode_s`` is the time from the first to the last of ``num_tokens`` output tokens, in seconds.
    Return None if there was no prediction or if the output has fewer than 16 tokens.
    """
    if not predicted_s or num_tokens < _FEWEST:
        return None
    return decode_s / (num_tokens - 1) / predicted_s
