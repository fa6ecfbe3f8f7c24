"""Command line options of workloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from cluster.errors import WorkloadFailed
from cluster.simulator.workloads.known import WORKLOADS
from cluster.simulator.workloads.workload import Workload

PANEL = "The requests"

Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        metavar="NAME[=SHARE]",
        help=f"Synthetic workload and its relative share: {', '.join(WORKLOADS)}. Repeatable.",
        rich_help_panel=PANEL,
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="File of recorded requests in Azure's, Mooncake's or BurstGPT's format.",
        rich_help_panel=PANEL,
    ),
]
Begin = Annotated[
    float,
    typer.Option(
        "--from",
        min=0,
        metavar="S",
        help="Skip requests before this time, in seconds after the trace's first request.",
        rich_help_panel=PANEL,
    ),
]
End = Annotated[
    float | None,
    typer.Option(
        "--to",
        metavar="S",
        help="Skip requests from this time on, in seconds after the trace's first request.",
        rich_help_panel=PANEL,
    ),
]
Speed = Annotated[
    float,
    typer.Option(
        metavar="FACTOR",
        help="Replay speed of the trace; 2 halves the times between arrivals.",
        rich_help_panel=PANEL,
    ),
]
Steady = Annotated[
    bool,
    typer.Option("--steady", help="Keep the rate of the workload constant.", rich_help_panel=PANEL),
]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.", rich_help_panel=PANEL)]

#: Workloads with their relative shares of the requests.
Mix = Sequence[tuple[Workload, float]]


def mix(names: Sequence[str], is_steady: bool) -> Mix:
    """Return the workloads that ``names`` select, with their relative shares of the requests.

    A name such as ``chat=3`` has the share 3; ``chat`` alone has the share 1. With ``is_steady``
    the workloads' rates do not drift. Raises WorkloadFailed for an unknown workload or a share that
    is not above 0.
    """
    found = map(_share, names)
    return [(each.without_drift() if is_steady else each, share) for each, share in found]


def at_rate(mix: Mix, rate: float) -> Iterator[Workload]:
    """Yield the workloads of ``mix``, each at its share of ``rate`` requests per second."""
    total = sum(share for _, share in mix)
    return (workload.at_rate(rate * share / total) for workload, share in mix)


def _share(text: str) -> tuple[Workload, float]:
    name, equals, share = text.partition("=")
    if name not in WORKLOADS:
        raise WorkloadFailed(f"--workload {name}: must be one of {', '.join(WORKLOADS)}")
    try:
        number = float(share) if equals else 1.0
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise WorkloadFailed(f"--workload {text}: the share must be a number above 0")
    return WORKLOADS[name], number
