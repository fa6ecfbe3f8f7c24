"""Report of a load: one JSON object, from which all tables and pages are made. Pure.

The top level has the keys of `vllm bench serve`, so that programs for its reports can read these
reports too. Everlift's own figures are under ``everlift``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import accumulate, pairwise
from math import inf, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from cluster.errors import BenchFailed


class CountedBy(Enum):
    """Method by which the output tokens of an answer were counted."""

    #: usage that the endpoint reported in its stream
    USAGE = "usage"
    #: a tokenizer of the load generator
    TOKENIZER = "tokenizer"
    #: no count; each piece of output counts as one token
    PIECES = "pieces"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one request: its sizes, and its times in seconds since the load began.

    The times are in this order:

        due        the request should be sent; its latency counts from here
        admitted   the concurrency limit admitted the request; ``due`` if there was no wait
        sent       the request was sent; the time since ``admitted`` is the generator's lag
        pieces     arrival of each piece of output, one chunk of the stream
        ended      end of the answer, or failure

    ``error`` is a slug, an HTTP status or both, and empty if the answer is complete. ``text`` is
    kept only if its tokens have yet to be counted.
    """

    due: float
    admitted: float
    sent: float
    ended: float
    pieces: Sequence[float]
    prompt_tokens: int
    output_tokens: int
    counted_by: CountedBy = CountedBy.USAGE
    error: str = ""
    text: str = ""

    @property
    def is_complete(self) -> bool:
        return not self.error

    @property
    def lag_s(self) -> float:
        """Seconds from ``admitted`` to ``sent``, by which the generator was late."""
        return self.sent - self.admitted


#: Percentiles that make up the curve of a distribution.
_CURVE = range(101)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median and standard deviation of some values, and percentiles by percent (50, 99)."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]


def spread(values: Sequence[float], percents: Sequence[float]) -> Spread | None:
    """Return the statistics of ``values`` with the percentiles ``percents``; None without values.

    Percentiles are interpolated linearly, as in numpy and vLLM.
    """
    if not len(values):
        return None
    found = np.asarray(values, dtype=float)
    at = np.percentile(found, list(percents)) if percents else []
    return Spread(
        float(found.mean()),
        float(np.median(found)),
        float(found.std()),
        dict(zip(percents, map(float, at), strict=True)),
    )


def curve(values: Sequence[float]) -> list[float]:
    """Return the percentiles 0, 1, ..., 100 of ``values``; an empty list if ``values`` is empty."""
    return [float(each) for each in np.percentile(values, list(_CURVE))] if len(values) else []


StartTime = Callable[[Outcome], float]


def due_time(outcome: Outcome) -> float:
    return outcome.due


def sent_time(outcome: Outcome) -> float:
    return outcome.sent


def ttft(outcome: Outcome, start_time: StartTime) -> float:
    return outcome.pieces[0] - start_time(outcome)


def e2el(outcome: Outcome, start_time: StartTime) -> float:
    return outcome.pieces[-1] - start_time(outcome)


def tpot(outcome: Outcome) -> float:
    """Return the seconds per output token after the first one; 0 for fewer than two tokens.

    A value of 0 misses no target.
    """
    if outcome.output_tokens < 2:
        return 0.0
    return (outcome.pieces[-1] - outcome.pieces[0]) / (outcome.output_tokens - 1)


def itls(outcome: Outcome) -> list[float]:
    return [after - before for before, after in pairwise(outcome.pieces)]


def by_name(complete: Sequence[Outcome], start_time: StartTime) -> Mapping[str, list[float]]:
    """Return the latencies of complete answers in seconds, by the name of the latency.

    The names are ``ttft``, ``tpot``, ``itl`` (inter-token latency), ``e2el`` (end-to-end latency,
    until the last piece) and ``norm`` (end-to-end latency per output token). ``itl`` has a value
    for each gap between pieces, the others at most one per answer. ``start_time`` returns the time
    from which the latency of an answer counts.
    """
    return {
        "ttft": [ttft(each, start_time) for each in complete],
        "tpot": [tpot(each) for each in complete if each.output_tokens > 1],
        "itl": [gap for each in complete for gap in itls(each)],
        "e2el": [e2el(each, start_time) for each in complete],
        "norm": [e2el(each, start_time) / each.output_tokens for each in complete],
    }


#: Approximate maximum number of points of a curve over time.
_POINTS = 60
_WIDTHS = (1, 2, 5)


@dataclass(frozen=True, slots=True)
class TimeSeries:
    """Rates and unfinished requests over time, in slices of ``width_s`` seconds.

    ``in_flight`` counts the requests that are due and unfinished at the end of each slice.
    """

    width_s: float
    due_per_s: Sequence[float]
    ended_per_s: Sequence[float]
    failed_per_s: Sequence[float]
    tokens_per_s: Sequence[float]
    in_flight: Sequence[int]
    #: median of the requests that were due in a slice; None if none was due, or none was answered
    ttft_ms: Sequence[float | None]


def time_series(outcomes: Sequence[Outcome]) -> TimeSeries:
    duration = max((each.ended for each in outcomes), default=0.0)
    width = _width(duration)
    slices = int(duration / width) + 1
    arrived = _counted(((each.due, 1) for each in outcomes), width, slices)
    ended = _counted(((each.ended, 1) for each in outcomes), width, slices)
    failed = _counted(((each.ended, 1) for each in outcomes if not each.is_complete), width, slices)
    tokens = _counted(_tokens(outcomes), width, slices)
    return TimeSeries(
        width,
        [number / width for number in arrived],
        [number / width for number in ended],
        [number / width for number in failed],
        [number / width for number in tokens],
        [round(a - b) for a, b in zip(accumulate(arrived), accumulate(ended), strict=True)],
        _first_pieces(outcomes, width, slices),
    )


def _first_pieces(outcomes: Iterable[Outcome], width: float, slices: int) -> list[float | None]:
    found: list[list[float]] = [[] for _ in range(slices)]
    for each in outcomes:
        if each.is_complete:
            found[_slice(each.due, width, slices)].append(1e3 * (each.pieces[0] - each.due))
    return [median(times) if times else None for times in found]


def most_tokens_in_a_second(outcomes: Sequence[Outcome]) -> float:
    duration = max((each.ended for each in outcomes), default=0.0)
    return max(_counted(_tokens(outcomes), 1.0, int(duration) + 1), default=0.0)


def peak_concurrency(outcomes: Iterable[Outcome]) -> int:
    """Return the largest number of requests that were in flight (sent, not ended) at one time."""
    moves = sorted(move for each in outcomes for move in ((each.sent, 1), (each.ended, -1)))
    return max(accumulate(step for _, step in moves), default=0)


def _tokens(outcomes: Iterable[Outcome]) -> Iterator[tuple[float, float]]:
    for each in outcomes:
        if each.is_complete:
            share = each.output_tokens / len(each.pieces)
            for at in each.pieces:
                yield at, share


def _counted(events: Iterable[tuple[float, float]], width: float, slices: int) -> list[float]:
    found = [0.0] * slices
    for at, number in events:
        found[_slice(at, width, slices)] += number
    return found


def _slice(at: float, width: float, slices: int) -> int:
    return min(slices - 1, int(at / width))


def _width(duration: float) -> float:
    """Return the width in seconds of the slices of time into which ``duration`` is divided.

    It is 1, 2 or 5 times a power of ten, and results in at most about ``_POINTS`` slices.
    """
    min_width = max(duration / _POINTS, 1e-3)
    power = 1e-3
    while power * 10 <= min_width:
        power *= 10
    return next((power * n for n in _WIDTHS if power * n >= min_width), power * 10)


NAMES = ("ttft", "tpot", "e2el")
_BETWEEN = re.compile(r"[\s,]+")


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objective: ``most_ms`` has limits in ms by latency name (see ``NAMES``)."""

    most_ms: Mapping[str, float] = field(default_factory=dict)

    def is_good(self, outcome: Outcome, start_time: StartTime) -> bool:
        """Return whether the answer is complete and its latencies are within all limits.

        ``start_time`` returns the time from which the latency of an answer counts.
        """
        if not outcome.is_complete:
            return False
        latencies = {
            "ttft": ttft(outcome, start_time),
            "tpot": tpot(outcome),
            "e2el": e2el(outcome, start_time),
        }
        return all(latencies[name] * 1e3 <= most for name, most in self.most_ms.items())


def slo(texts: Sequence[str]) -> Slo:
    """Parse limits such as ``ttft:500`` and ``tpot:50``, in milliseconds. Raises BenchFailed."""
    pairs = (pair for text in texts for pair in _BETWEEN.split(text.strip()) if pair)
    return Slo(dict(_pair(pair) for pair in pairs))


def _pair(text: str) -> tuple[str, float]:
    name, _, most = text.partition(":")
    try:
        number = float(most)
    except ValueError:
        number = -1.0
    if name not in NAMES or not 0 <= number < inf:
        raise BenchFailed(
            f"--goodput {text}: must be {', '.join(NAMES)} with milliseconds, as in ttft:500"
        )
    return name, number


#: The generator is behind if its p99 lag exceeds both this number of seconds and this share of the
#: median TTFT, or if it uses more than this share of a core.
_MIN_LAG_S = 0.010
_LAG_SHARE = 0.05
_BUSY = 0.9
_PERCENTS = (50.0, 90.0, 99.0, 100.0)


@dataclass(frozen=True, slots=True)
class Lag:
    """Percentiles and maximum of the generator's lag in seconds, and its use of the processor.

    ``cpu_share`` is the share of one core that this process used. ``is_behind`` is True if the lag
    or ``cpu_share`` is too large for the measured latencies to be valid.
    """

    p50: float
    p90: float
    p99: float
    most: float
    cpu_share: float
    is_behind: bool


def lag(outcomes: Sequence[Outcome], cpu_share: float) -> Lag:
    found = spread([each.lag_s for each in outcomes], _PERCENTS)
    p50, p90, p99, most = found.percentiles.values() if found else (0.0,) * len(_PERCENTS)
    complete = [each for each in outcomes if each.is_complete]
    spread_of_ttft = spread([ttft(each, due_time) for each in complete], ())
    allowed = max(_MIN_LAG_S, _LAG_SHARE * spread_of_ttft.median if spread_of_ttft else 0.0)
    return Lag(p50, p90, p99, most, cpu_share, p99 > allowed or cpu_share > _BUSY)


#: Ratio of successive rates until one is not sustained.
_FACTOR = 2.0
#: Ratio of the lowest unsustained to the highest sustained rate at which the search ends.
_PRECISION = 1.1
#: A rate is not sustained if a larger share of requests fails, or a smaller share is good (Slo).
_FAILED_SHARE = 0.01
_GOOD_SHARE = 0.9
#: Share of the arrivals in the second half of a load by which the ended requests may be fewer.
_BACKLOG_SHARE = 0.1


class Ramp:
    """Search for the highest sustained rate from ``first`` to ``most``, in requests per second.

    The caller tries each rate that ``next_rate`` returns, and passes the result to ``report``.
    Rates are doubled, up to ``most``, until one is not sustained. Each further rate is the
    geometric mean of the highest sustained and the lowest unsustained rate. The search ends when
    the lowest unsustained rate is at most ``_PRECISION`` times the highest sustained one. The
    search also ends if ``first`` is not sustained or ``most`` is sustained.

    The search assumes that a higher rate is never easier to sustain. ``highest_sustained`` and
    ``lowest_unsustained`` are rates that were tried; None if there is none.
    """

    def __init__(self, first: float, most: float) -> None:
        assert 0 < first <= most
        self._first = first
        self._most = most
        self.highest_sustained: float | None = None
        self.lowest_unsustained: float | None = None

    def next_rate(self) -> float | None:
        """Return the next rate to try; None when the search has ended."""
        if self.highest_sustained is None:
            return self._first if self.lowest_unsustained is None else None
        if self.lowest_unsustained is None:
            return (
                min(_FACTOR * self.highest_sustained, self._most)
                if self.highest_sustained < self._most
                else None
            )
        if self.lowest_unsustained <= _PRECISION * self.highest_sustained:
            return None
        return sqrt(self.highest_sustained * self.lowest_unsustained)

    def report(self, rate: float, is_sustained: bool) -> None:
        if is_sustained:
            self.highest_sustained = rate
        else:
            self.lowest_unsustained = rate


def is_load_sustained(outcomes: Sequence[Outcome], duration_s: float, slo: Slo) -> bool:
    """Return whether the endpoint sustained the load, so that requests did not pile up.

    At most 1 % of the requests may fail, and at least 90 % must be within the limits of ``slo``. If
    n requests are due in the second half of the load, at least n - (n / 10 + sqrt(n)) requests must
    end in that half; the square root allows for random fluctuation.

    ``duration_s``, the length of the load in seconds, must be much longer than a request takes,
    because otherwise too few requests end within the load at any rate.
    """
    if sum(not each.is_complete for each in outcomes) > _FAILED_SHARE * len(outcomes):
        return False
    good = sum(slo.is_good(each, due_time) for each in outcomes)
    if good < _GOOD_SHARE * len(outcomes):
        return False
    half = duration_s / 2
    arrived = sum(each.due >= half for each in outcomes)
    ended = sum(half <= each.ended < duration_s for each in outcomes)
    return arrived - ended <= _BACKLOG_SHARE * arrived + sqrt(arrived)


Json = dict[str, Any]


def figures(outcomes: Sequence[Outcome], slo: Slo, percents: Sequence[float]) -> Json:
    """Return the figures that vLLM reports, by vLLM's keys, and the latency per token (``norm``).

    A latency is None if there is no complete answer to compute it from.
    """
    complete = [each for each in outcomes if each.is_complete]
    duration = max((each.ended for each in outcomes), default=0.0)
    input_tokens = sum(each.prompt_tokens for each in complete)
    output_tokens = sum(each.output_tokens for each in complete)
    return {
        "duration": duration,
        "completed": len(complete),
        "failed": len(outcomes) - len(complete),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _per(len(complete), duration),
        "request_goodput": _per(_good(outcomes, slo), duration) if slo.most_ms else None,
        "output_throughput": _per(output_tokens, duration),
        "total_token_throughput": _per(input_tokens + output_tokens, duration),
        "max_output_tokens_per_s": most_tokens_in_a_second(outcomes),
        "max_concurrent_requests": peak_concurrency(outcomes),
        # vLLM uses this key only for speech, but programs that read its reports expect it.
        "rtfx": 0.0,
        **_latencies(complete, due_time, percents),
    }


def more_figures(
    outcomes: Sequence[Outcome], slo: Slo, percents: Sequence[float], cpu_share: float
) -> Json:
    """Return the figures that vLLM does not report, for the ``everlift`` section of the report."""
    complete = [each for each in outcomes if each.is_complete]
    pieces = sum(len(each.pieces) for each in complete)
    found = lag(outcomes, cpu_share)
    counted = Counter(each.counted_by.value for each in complete)
    return {
        "latency_from": "due",
        "from_sent": _latencies(complete, sent_time, percents),
        "lag": asdict(found),
        "held_s": max((each.admitted - each.due for each in outcomes), default=0.0),
        "good_share": _per(_good(outcomes, slo), len(outcomes)) if slo.most_ms else None,
        "errors": dict(Counter(each.error for each in outcomes if each.error).most_common()),
        "tokens_counted_by": dict(counted),
        "tokens_per_piece": _per(sum(each.output_tokens for each in complete), pieces),
        "marks": marks(found.is_behind, counted),
        "curves_ms": {
            name: [1e3 * value for value in curve(values)]
            for name, values in by_name(complete, due_time).items()
        },
        "over_time": asdict(time_series(outcomes)),
    }


def marks(is_behind: bool, counted_by: Mapping[str, int]) -> list[str]:
    """Return warnings to show with the figures of a load; empty if there are none.

    ``is_behind`` tells whether the generator was too slow. ``counted_by`` maps the value of each
    CountedBy to the number of answers whose tokens were counted by it.
    """
    found = {
        "the generator fell behind: latencies include its own delays": is_behind,
        "the endpoint did not report all output tokens: streamed pieces were counted": bool(
            counted_by.get(CountedBy.PIECES.value)
        ),
    }
    return [text for text, applies in found.items() if applies]


def each_request(outcomes: Sequence[Outcome]) -> Json:
    """Return lists with one value per request, by the keys of vLLM's report.

    The values are in the order of ``outcomes``. The output lengths and latencies of failed requests
    are 0 or empty. Latencies count from the due time. Prompts and outputs are left out.
    """
    return {
        "input_lens": [each.prompt_tokens for each in outcomes],
        "output_lens": [each.output_tokens if each.is_complete else 0 for each in outcomes],
        "start_times": [each.due for each in outcomes],
        "ttfts": [_latency_or_zero(each, ttft) for each in outcomes],
        "itls": [itls(each) if each.is_complete else [] for each in outcomes],
        "latencies": [_latency_or_zero(each, e2el) for each in outcomes],
        "queue_times": [each.sent - each.due for each in outcomes],
        "errors": [each.error for each in outcomes],
    }


def percent_name(percent: float) -> str:
    """Return the name of a percentile, such as ``p99`` or ``p99.9``."""
    return f"p{percent:g}"


def _latencies(
    complete: Sequence[Outcome], start_time: StartTime, percents: Sequence[float]
) -> Json:
    found: Json = {}
    for name, values in by_name(complete, start_time).items():
        of_all = spread(values, percents)
        for word in ("mean", "median", "std"):
            found[f"{word}_{name}_ms"] = 1e3 * getattr(of_all, word) if of_all else None
        for percent in percents:
            at = 1e3 * of_all.percentiles[percent] if of_all else None
            found[f"{percent_name(percent)}_{name}_ms"] = at
    return found


def _good(outcomes: Sequence[Outcome], slo: Slo) -> int:
    return sum(slo.is_good(each, due_time) for each in outcomes)


def _per(number: float, unit: float) -> float:
    return number / unit if unit else 0.0


def _latency_or_zero(outcome: Outcome, latency: Any) -> float:
    return float(latency(outcome, due_time)) if outcome.is_complete else 0.0


OURS = "everlift"


@dataclass(frozen=True, slots=True)
class Setting:
    """Circumstances of a load: endpoint, options and date.

    ``backend`` is everlift, openai or openai-chat. ``endpoint_address`` is the endpoint's address.
    ``load`` has the other options by name. ``date`` is the local time, such as 20261123-101500.
    """

    date: str
    label: str
    backend: str
    endpoint_address: str
    model: str
    tokenizer: str | None
    rate: float | None
    burstiness: float
    concurrency: int | None
    load: Mapping[str, object]
    slo: Slo
    percents: Sequence[float]


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of one run of a load, during which the generator used ``cpu_share`` of a core."""

    outcomes: Sequence[Outcome]
    cpu_share: float


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of a ramp, which searches for the highest sustained rate in requests per second.

    ``is_sustained`` tells whether the endpoint sustained ``rate``.
    """

    rate: float
    result: RunResult
    is_sustained: bool


def report(setting: Setting, result: RunResult, *, is_detailed: bool = False) -> Json:
    """Return the report of a load.

    With ``is_detailed`` it has all figures of each request, otherwise only the end-to-end latencies
    (``latencies``) and the delays before sending (``queue_times``).
    """
    outcomes, slo, percents = result.outcomes, setting.slo, setting.percents
    return {
        **_head(setting, len(outcomes)),
        **figures(outcomes, slo, percents),
        **_lists(outcomes, is_detailed),
        OURS: {
            "where": setting.endpoint_address,
            "load": dict(setting.load),
            "goodput_ms": dict(slo.most_ms),
            "percents": list(percents),
            **more_figures(outcomes, slo, percents, result.cpu_share),
        },
    }


def ramp_report(setting: Setting, stages: Sequence[Stage], *, is_detailed: bool = False) -> Json:
    """Return the report of a ramp, the search for the highest sustained rate.

    It has the figures of the highest sustained rate, or of the first stage if no rate was
    sustained.
    """
    sustained = [stage for stage in stages if stage.is_sustained]
    unsustained = [stage.rate for stage in stages if not stage.is_sustained]
    shown = max(sustained, key=lambda stage: stage.rate) if sustained else stages[0]
    found = report(setting, shown.result, is_detailed=is_detailed)
    found["request_rate"] = shown.rate
    found[OURS]["saturation"] = {
        "kept": shown.rate if sustained else None,
        "too_much": min(unsustained, default=None),
    }
    found[OURS]["stages"] = [
        _stage(stage, setting) for stage in sorted(stages, key=lambda stage: stage.rate)
    ]
    return found


def write(found: Json, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")


def read(path: Path) -> Json:
    """Read a report of Everlift or of vLLM from a JSON file.

    Raises BenchFailed if the file is not such a report, and OSError.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise BenchFailed(f"{path}: is not JSON") from None
    if not isinstance(found, dict) or "request_throughput" not in found:
        raise BenchFailed(f"{path}: is not a report of `bench serve`")
    return found


def ours(found: Json) -> Json:
    """Return the section of a report with Everlift's own figures; an empty dict if it has none."""
    return dict(found.get(OURS) or {})


def _head(setting: Setting, number: int) -> Json:
    return {
        "date": setting.date,
        "endpoint_type": setting.backend,
        "backend": setting.backend,
        "label": setting.label,
        "model_id": setting.model,
        "tokenizer_id": setting.tokenizer,
        "num_prompts": number,
        "request_rate": _json_number(setting.rate),
        "burstiness": _json_number(setting.burstiness),
        "max_concurrency": setting.concurrency,
    }


def _json_number(value: float | None) -> float | str | None:
    # JSON has no infinity; vLLM writes an infinite rate in this way too.
    return "inf" if value == inf else value


def _lists(outcomes: Sequence[Outcome], is_detailed: bool) -> Json:
    return {
        name: values
        for name, values in each_request(outcomes).items()
        if is_detailed or name in ("latencies", "queue_times")
    }


def _stage(stage: Stage, setting: Setting) -> Json:
    outcomes, percents = stage.result.outcomes, setting.percents
    more = more_figures(outcomes, setting.slo, percents, stage.result.cpu_share)
    return {
        "rate": stage.rate,
        "is_kept": stage.is_sustained,
        "good_share": more["good_share"],
        "errors": more["errors"],
        "marks": more["marks"],
        **figures(outcomes, setting.slo, percents),
    }
