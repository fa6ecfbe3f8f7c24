"""Forecasts as tables."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cluster.simulator.forecast import Forecast
from cluster.simulator.summary import Slo, Summary

#: Titles of the columns, short enough for a table of 80 characters.
_COLUMNS = (
    "\nasked",
    "\nended",
    "TTFT\np50 s",
    "\np99 s",
    "TPOT\np50 ms",
    "\np99 ms",
    "latency\np50 s",
    "\np99 s",
    "\ngood",
)


def groups(forecast: Forecast, slo: Slo | None = None) -> Iterator[tuple[str, Summary]]:
    """Yield a name and a summary of all requests, then of each group of requests.

    There is a group for each priority class, tenant and application. Classes, tenants or
    applications are left out if there is only one of them.
    """
    yield "all", forecast.summary(slo)
    for word, parts in (
        ("class", forecast.by_class(slo)),
        ("tenant", forecast.by_tenant(slo)),
        ("application", forecast.by_application(slo)),
    ):
        if len(parts) > 1:
            yield from ((f"{word} {name}", part) for name, part in parts.items())


def requests_table(forecast: Forecast, slo: Slo, *, by_group: bool = False) -> Table:
    """Return a table with a row for all requests.

    With ``by_group`` it also has a row for each priority class, tenant and application. Classes,
    tenants or applications are left out if there is only one of them.
    """
    table = Table("", *_COLUMNS, box=SIMPLE_HEAD, padding=0)
    # If the table is too wide, only the names wrap, so that no number is cut off.
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    shown = groups(forecast, slo) if by_group else [("all", forecast.summary(slo))]
    for name, summary in shown:
        table.add_row(name, *cells(summary))
    return table


def cells(summary: Summary) -> tuple[str, ...]:
    return (
        f"{summary.requests}",
        share(summary.finished, summary.requests),
        f"{summary.ttft_s.p50:.3f}",
        f"{summary.ttft_s.p99:.3f}",
        f"{summary.tpot_s.p50 * 1e3:.1f}",
        f"{summary.tpot_s.p99 * 1e3:.1f}",
        f"{summary.latency_s.p50:.2f}",
        f"{summary.latency_s.p99:.2f}",
        f"{summary.good_share:.1%}",
    )


def cluster_table(forecast: Forecast, slo: Slo) -> Table:
    table = Table("", "", show_header=False, box=SIMPLE_HEAD)
    for name, value in _cluster(forecast, forecast.summary(slo), slo):
        table.add_row(name, value)
    return table


def _goodput(summary: Summary, slo: Slo) -> str:
    limits = [
        f"{name} at most {seconds(limit)}"
        for name, limit in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s))
        if limit < inf
    ]
    kept = " and ".join(limits) if limits else "no limits: see --slo"
    return f"{summary.goodput_per_s:.2f} / s of good requests: finished, {kept}"


def _cluster(forecast: Forecast, summary: Summary, slo: Slo) -> Iterator[tuple[str, str]]:
    samples = forecast.samples
    yield "duration", f"{summary.duration_s:.1f} s"
    yield "requests finished", f"{summary.requests_per_s:.2f} / s"
    yield "goodput", _goodput(summary, slo)
    yield "output tokens", f"{summary.output_tokens_per_s:.0f} / s"
    if samples:
        workers = {sample.workers for sample in samples}
        slots = sum(sample.slot_occupancy for sample in samples) / len(samples)
        blocks = sum(sample.block_occupancy for sample in samples) / len(samples)
        yield "workers", _range(min(workers), max(workers))
        yield "batch slots in use", f"{slots:.1%}"
        yield "KV blocks in use", f"{blocks:.1%}"
        yield "longest queue", f"{max(sample.queued for sample in samples)} requests"
    yield "worker time", f"{forecast.worker_s:.0f} s"
    yield "latency per output token, mean", f"{summary.normalised_latency_s.mean * 1e3:.1f} ms"
    yield "preemptions, migrations", f"{summary.preemptions}, {summary.migrations}"
    yield "bypassed by, p99", f"{summary.bypassed.p99:.0f} requests"
    for cause, number in sorted(summary.refused.items()):
        yield f"ended with {cause}", f"{number} requests"


def _range(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least} to {most}"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
