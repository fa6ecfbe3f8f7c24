"""Figures of a report as texts, for both the terminal and HTML pages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cluster.bench.report import Json, ours, percent_name

STAGE_COLUMNS = (
    "stage",
    "arrivals/s",
    "answered/s",
    "tokens/s",
    "TTFT p50, ms",
    "p99, ms",
)
COMPARED_COLUMNS = ("figure", "A", "B", "B / A", "B is")
#: Text for a missing value.
NOTHING = "-"

LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency (ITL)",
    "tpot": "per output token (TPOT)",
    "e2el": "end to end (E2E)",
    "norm": "E2E per output token",
}


def shown(value: object) -> str:
    """Return a value as text: numbers with about four digits, a dash for a missing value."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def statistics(found: Json) -> list[str]:
    """Return the names of the statistics of each latency, such as mean, median and p99."""
    names = [percent_name(percent) for percent in ours(found).get("percents", [99.0])]
    return ["mean", "median", *(name for name in names if name != "p50")]


def latency_rows(found: Json, source: Json) -> Iterator[tuple[str, list[str]]]:
    """Yield the title of each latency, with the texts of its statistics in milliseconds.

    ``found`` is the whole report. The latencies are read from ``source``: the same report, or its
    section with the latencies that count from the time of sending. Latencies without any value are
    left out.
    """
    for name, title in LATENCIES.items():
        values = [source.get(f"{word}_{name}_ms") for word in statistics(found)]
        if any(value is not None for value in values):
            yield title, [shown(value) for value in values]


def summary_rows(found: Json) -> Iterator[tuple[str, str]]:
    more = ours(found)
    yield "requests", f"{found['completed']} of {found['num_prompts']} complete"
    yield "duration", f"{shown(found['duration'])} s"
    yield "requests a second", shown(found["request_throughput"])
    if found.get("request_goodput") is not None:
        limits = goodput(more.get("goodput_ms", {}))
        part = f", {more['good_share']:.1%} of all" if more else ""
        yield (
            f"good requests a second {limits}".rstrip(),
            f"{shown(found['request_goodput'])}{part}",
        )
    yield "output tokens a second", shown(found["output_throughput"])
    yield "input and output tokens a second", shown(found["total_token_throughput"])
    yield "peak concurrency", shown(found.get("max_concurrent_requests"))
    if more:
        yield from _generator_rows(more)
        yield from _saturation_rows(more)


def setting_rows(found: Json) -> Iterator[tuple[str, str]]:
    more = ours(found)
    address = more.get("where", "an unknown address")
    yield "endpoint", f"{shown(found.get('backend'))} at {address}"
    yield "model", shown(found.get("model_id"))
    yield "rate, requests a second", shown(found.get("request_rate"))
    yield "burstiness", shown(found.get("burstiness"))
    yield "maximum concurrency", shown(found.get("max_concurrency"))
    for name, value in more.get("load", {}).items():
        yield name, shown(value)
    if more:
        counted = more["tokens_counted_by"].items()
        yield (
            "tokens counted by",
            ", ".join(f"{by} ({number})" for by, number in counted) or NOTHING,
        )
        yield "tokens per streamed piece", shown(more["tokens_per_piece"])


def error_rows(found: Json) -> Iterator[tuple[str, str]]:
    for cause, number in ours(found).get("errors", {}).items():
        yield cause, shown(number)


def stage_row(stage: Json) -> tuple[str, ...]:
    """Return the cells of a row for a stage of a ramp, in the columns STAGE_COLUMNS."""
    keys = ("rate", "request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms")
    label = "sustained" if stage["is_kept"] else "not sustained"
    return (label, *(shown(stage.get(key)) for key in keys))


def goodput(limits: Mapping[str, float]) -> str:
    """Return the limits as the option --goodput states them: ``ttft:500 tpot:50``."""
    return " ".join(f"{name}:{most:g}" for name, most in limits.items())


def _generator_rows(more: Json) -> Iterator[tuple[str, str]]:
    late = more["lag"]
    yield (
        "generator's lag p50, p99, max",
        ", ".join(f"{1e3 * late[name]:.1f}" for name in ("p50", "p99", "most")) + " ms",
    )
    yield "generator's CPU use, of one core", f"{late['cpu_share']:.0%}"
    if more["held_s"] > 0:
        yield "longest delay due to --concurrency", f"{shown(more['held_s'])} s"


def _saturation_rows(more: Json) -> Iterator[tuple[str, str]]:
    if (found := more.get("saturation")) is None:
        return
    kept, too_much = found["kept"], found["too_much"]
    if kept is None:
        yield "saturation", f"below {shown(too_much)} requests a second"
    elif too_much is None:
        yield "saturation", f"above {shown(kept)} requests a second"
    else:
        yield "saturation", f"between {shown(kept)} and {shown(too_much)} requests a second"
