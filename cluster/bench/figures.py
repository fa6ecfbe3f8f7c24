"""A load in figures, by the names that `vllm bench serve` gives them. Pure.

Latencies count from when a request was due; the same from when it was sent stand beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cluster.bench import latencies, over_time
from cluster.bench.goodput import Slo
from cluster.bench.lag import lag
from cluster.bench.latencies import Begin
from cluster.bench.outcome import CountedBy, Outcome
from cluster.bench.spread import curve, spread

Json = dict[str, Any]


def figures(outcomes: Sequence[Outcome], slo: Slo, percents: Sequence[float]) -> Json:
    """Those that vLLM has, with normalised latency (``norm``) as one more. A latency that no
    request has is null."""
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
        "max_output_tokens_per_s": over_time.most_tokens_in_a_second(outcomes),
        "max_concurrent_requests": over_time.most_at_once(outcomes),
        # Of speech alone, where vLLM has it; its readers look for it.
        "rtfx": 0.0,
        **_latencies(complete, latencies.due, percents),
    }


def more_figures(
    outcomes: Sequence[Outcome], slo: Slo, percents: Sequence[float], cpu_share: float
) -> Json:
    """What vLLM does not have."""
    complete = [each for each in outcomes if each.is_complete]
    pieces = sum(len(each.pieces) for each in complete)
    found = lag(outcomes, cpu_share)
    counted = Counter(each.counted_by.value for each in complete)
    return {
        "latency_from": "due",
        "from_sent": _latencies(complete, latencies.sent, percents),
        "lag": asdict(found),
        "held_s": max((each.admitted - each.due for each in outcomes), default=0.0),
        "good_share": _per(_good(outcomes, slo), len(outcomes)) if slo.most_ms else None,
        "errors": dict(Counter(each.error for each in outcomes if each.error).most_common()),
        "tokens_counted_by": dict(counted),
        "tokens_per_piece": _per(sum(each.output_tokens for each in complete), pieces),
        "marks": marks(found.is_behind, counted),
        "curves_ms": {
            name: [1e3 * value for value in curve(values)]
            for name, values in latencies.by_name(complete, latencies.due).items()
        },
        "over_time": asdict(over_time.over_time(outcomes)),
    }


def marks(is_behind: bool, counted_by: Mapping[str, int]) -> list[str]:
    """What keeps the figures from being what they seem."""
    found = {
        "the generator fell behind: latencies are partly its own": is_behind,
        "output tokens are not known everywhere: pieces were counted for them": bool(
            counted_by.get(CountedBy.PIECES.value)
        ),
    }
    return [text for text, is_so in found.items() if is_so]


def each_request(outcomes: Sequence[Outcome]) -> Json:
    """Lists in the order of the requests, 0 or empty where one failed, as vLLM has them. A request
    begins when it was due. vLLM's texts are not there: prompts and outputs stay out of files."""
    return {
        "input_lens": [each.prompt_tokens for each in outcomes],
        "output_lens": [each.output_tokens if each.is_complete else 0 for each in outcomes],
        "start_times": [each.due for each in outcomes],
        "ttfts": [_of(each, latencies.ttft) for each in outcomes],
        "itls": [latencies.itls(each) if each.is_complete else [] for each in outcomes],
        "latencies": [_of(each, latencies.e2el) for each in outcomes],
        "queue_times": [each.sent - each.due for each in outcomes],
        "errors": [each.error for each in outcomes],
    }


def percent_name(percent: float) -> str:
    """``p99``, ``p99.9``."""
    return f"p{percent:g}"


def _latencies(complete: Sequence[Outcome], begin: Begin, percents: Sequence[float]) -> Json:
    found: Json = {}
    for name, values in latencies.by_name(complete, begin).items():
        of_all = spread(values, percents)
        for word in ("mean", "median", "std"):
            found[f"{word}_{name}_ms"] = 1e3 * getattr(of_all, word) if of_all else None
        for percent in percents:
            at = 1e3 * of_all.percentiles[percent] if of_all else None
            found[f"{percent_name(percent)}_{name}_ms"] = at
    return found


def _good(outcomes: Sequence[Outcome], slo: Slo) -> int:
    return sum(slo.is_good(each, latencies.due) for each in outcomes)


def _per(number: float, of: float) -> float:
    return number / of if of else 0.0


def _of(outcome: Outcome, value: Any) -> float:
    return float(value(outcome, latencies.due)) if outcome.is_complete else 0.0
