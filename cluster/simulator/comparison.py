"""Comparison of recorded requests with forecasts under other policies."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cluster.simulator.as_json import summary_as_json
from cluster.simulator.forecast import Forecast
from cluster.simulator.summary import Record, Summary
from cluster.simulator.tables import groups, share

_COLUMNS = (
    "\nended",
    "queued\np50 s",
    "\np99 s",
    "TTFT\np50 s",
    "\np99 s",
    "latency\np50 s",
    "\np99 s",
    "\nms/token",
)


def recorded_forecast(records: list[Record]) -> Forecast:
    """Return a Forecast of recorded requests, so that it can be compared with simulated ones.

    ``records`` are sorted by arrival. The forecast has no samples over time, and its numbers of
    steps and worker seconds are 0.
    """
    return Forecast(tuple(records), (), 0, 0, 0.0)


def table(answers: Mapping[str, Forecast]) -> Table:
    """Return a table that compares forecasts under several policies.

    ``answers`` maps the name of a policy to its forecast; all forecasts must be of the same
    requests. There is a section for all requests, and one for each priority class, tenant and
    application. Classes, tenants or applications have no sections if there is only one of them. A
    section has a row per policy.
    """
    shown = Table("", *_COLUMNS, box=SIMPLE_HEAD, padding=0)
    for column in shown.columns[1:]:
        column.justify, column.no_wrap = "right", True
    parts = {policy: dict(groups(answer)) for policy, answer in answers.items()}
    for group, summary in next(iter(parts.values()), {}).items():
        shown.add_row(f"{group}, {summary.requests}", style="bold")
        for policy, summaries in parts.items():
            shown.add_row(f"  {policy}", *_cells(summaries[group]))
        shown.add_section()
    return shown


def as_json(answers: Mapping[str, Forecast]) -> dict[str, object]:
    """Return the summaries of forecasts as JSON, by policy and then by group of requests.

    The groups are all requests, and each priority class, tenant and application. Classes, tenants
    or applications are left out if there is only one of them.
    """
    return {
        policy: {group: summary_as_json(summary) for group, summary in groups(answer)}
        for policy, answer in answers.items()
    }


def _cells(summary: Summary) -> tuple[str, ...]:
    return (
        share(summary.finished, summary.requests),
        _seconds(summary.queued_s.p50),
        _seconds(summary.queued_s.p99),
        _seconds(summary.ttft_s.p50),
        _seconds(summary.ttft_s.p99),
        _seconds(summary.latency_s.p50),
        _seconds(summary.latency_s.p99),
        f"{summary.normalised_latency_s.mean * 1e3:.1f}",
    )


def _seconds(value: float) -> str:
    return f"{value:.3f}" if isfinite(value) else "-"
