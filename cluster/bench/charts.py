"""What of a report is drawn. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cluster.bench.chart import Chart, Line
from cluster.bench.figures import Json
from cluster.bench.report import ours
from cluster.bench.wording import LATENCIES


def charts(found: Json) -> Iterator[Chart]:
    """Of one report; nothing of vLLM's, which has no curves."""
    more = ours(found)
    if not more:
        return
    if stages := more.get("stages"):
        yield from _ramp(stages)
    yield from distributions({"": more})
    yield from _over_time(more["over_time"])


def distributions(reports: Mapping[str, Json]) -> Iterator[Chart]:
    """What part of the requests had at most this latency, of one report or of several by their
    names; a report is what stands under our name."""
    for name, title in LATENCIES.items():
        lines = [
            Line(who or title, _cumulative(more["curves_ms"][name]), style)
            for style, (who, more) in enumerate(reports.items())
            if more
        ]
        yield Chart(title[0].upper() + title[1:], "ms", "% of all", lines, is_log=True, top=100.0)


def _cumulative(curve: Sequence[float]) -> list[tuple[float, float]]:
    return [(value, float(percent)) for percent, value in enumerate(curve)]


def _over_time(found: Json) -> Iterator[Chart]:
    def line(name: str, key: str, style: int = 0) -> Line:
        width = found["width_s"]
        return Line(
            name,
            [
                ((slot + 0.5) * width, value)
                for slot, value in enumerate(found[key])
                if value is not None
            ],
            style,
        )

    requests = [line("due", "due_per_s"), line("ended", "ended_per_s", 1)]
    if any(found["failed_per_s"]):
        requests.append(line("of these failed", "failed_per_s", 2))
    yield Chart("Requests", "seconds", "requests a second", requests)
    yield Chart("Not ended", "seconds", "requests", [line("due and not ended", "in_flight")])
    yield Chart("Output", "seconds", "tokens a second", [line("output tokens", "tokens_per_s")])
    yield Chart(
        "Time to first token, by when a request was due",
        "seconds",
        "ms, median",
        [line("time to first token", "ttft_ms")],
    )


def _ramp(stages: Sequence[Json]) -> Iterator[Chart]:
    def line(name: str, key: str, style: int) -> Line:
        points = [(stage["rate"], stage[key]) for stage in stages if stage.get(key) is not None]
        return Line(name, points, style)

    last = stages[-1]["rate"]
    yield Chart(
        "Requests answered, by how many came",
        "requests a second that came",
        "requests a second",
        [
            line("answered", "request_throughput", 0),
            Line("as many as came", [(0.0, 0.0), (last, last)], 3),
        ],
    )
    yield Chart(
        "Time to first token, by how many came",
        "requests a second that came",
        "ms",
        [line("median", "median_ttft_ms", 0), line("p99", "p99_ttft_ms", 1)],
    )
