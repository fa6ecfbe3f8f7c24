"""Which requests a forecast is of, as it is said on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from cluster.errors import ForecastFailed
from cluster.forecast.arrival import Arrival
from cluster.forecast.saturation import saturation_rate
from cluster.forecast.scenario import WorkerSpec
from cluster.forecast.traces.trace import Trace
from cluster.forecast.workloads.known import WORKLOADS
from cluster.forecast.workloads.workload import Workload, merged

_PANEL = "The requests"
_DEFAULT = "azure-conversation"
_DURATION_S = 300.0
#: So many say what a mix is like.
SAMPLE = 2000

Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        metavar="NAME[=SHARE]",
        help=f"{', '.join(WORKLOADS)}. Repeatable, by shares. Default: {_DEFAULT}.",
        rich_help_panel=_PANEL,
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Recorded requests instead: Azure's, Mooncake's or BurstGPT's format.",
        rich_help_panel=_PANEL,
    ),
]
Begin = Annotated[
    float,
    typer.Option(
        "--from", min=0, metavar="S", help="Begin of the trace's part.", rich_help_panel=_PANEL
    ),
]
End = Annotated[
    float | None,
    typer.Option("--to", metavar="S", help="End of the trace's part.", rich_help_panel=_PANEL),
]
Speed = Annotated[
    float,
    typer.Option(
        metavar="FACTOR",
        help="The trace's requests come so many times as fast.",
        rich_help_panel=_PANEL,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        help="Requests a second, instead of the workload's own.",
        rich_help_panel=_PANEL,
    ),
]
Load = Annotated[
    float | None,
    typer.Option(
        "--load",
        metavar="PART",
        help="The rate as a part of what the workers can do at most, by estimate.",
        rich_help_panel=_PANEL,
    ),
]
Duration = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help=f"So long requests come. Default: {_DURATION_S:g}, or the whole trace.",
        rich_help_panel=_PANEL,
    ),
]
Steady = Annotated[
    bool,
    typer.Option("--steady", help="The workload's rate does not drift.", rich_help_panel=_PANEL),
]
Seed = Annotated[int, typer.Option(help="Of all that is drawn.", rich_help_panel=_PANEL)]


@dataclass(frozen=True, slots=True)
class Requests:
    """What the options above say. At most one of ``trace`` and the others about made-up requests
    is given."""

    workloads: Sequence[str] | None = None
    trace: Path | None = None
    begin_s: float = 0.0
    end_s: float | None = None
    speed: float = 1.0
    rate: float | None = None
    load: float | None = None
    duration_s: float | None = None
    is_steady: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ForecastFailed."""
        made_up = (self.workloads, self.rate, self.load, self.is_steady or None)
        if self.trace is not None and any(option is not None for option in made_up):
            raise ForecastFailed(
                "--workload, --rate, --load and --steady are not for a trace: see --speed"
            )
        if self.trace is None and (self.begin_s, self.end_s, self.speed) != (0.0, None, 1.0):
            raise ForecastFailed("--from, --to and --speed need --trace")
        if self.rate is not None and self.load is not None:
            raise ForecastFailed("--rate and --load say the same")
        for name in ("rate", "load", "duration_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ForecastFailed(f"--{name.removesuffix('_s')} must be above 0, not {value:g}")

    def arrivals(self, workers: Sequence[WorkerSpec]) -> Iterator[Arrival]:
        """One after the other, of which none is held. Raises ForecastFailed."""
        if self.trace is not None:
            end_s = inf if self.end_s is None else self.end_s
            arrivals = Trace(self.trace, self.begin_s, end_s, self.speed).arrivals()
            duration_s = self.duration_s or inf
        else:
            arrivals = merged(self._workloads(workers), self.seed)
            duration_s = self.duration_s or _DURATION_S
        return takewhile(lambda arrival: arrival.at < duration_s, arrivals)

    def average_rate(self) -> float:
        """Requests a second, counted. Raises ForecastFailed."""
        number, last = 0, 0.0
        for arrival in self.arrivals(()):
            number, last = number + 1, arrival.at
        return number / max(last, 1.0)

    def _workloads(self, workers: Sequence[WorkerSpec]) -> list[Workload]:
        """At their rates."""
        mix = self._mix()
        if self.load is not None:
            sample = list(islice(merged(_scaled(mix, 1.0), self.seed), SAMPLE))
            most = sum(saturation_rate(sample, worker) for worker in workers)
            return _scaled(mix, self.load * most)
        if self.rate is not None:
            return _scaled(mix, self.rate)
        if len(mix) > 1:
            raise ForecastFailed("several workloads need --rate or --load")
        return [workload for workload, _ in mix]

    def _mix(self) -> list[tuple[Workload, float]]:
        """With their shares."""
        mix = list(map(_share, self.workloads or (_DEFAULT,)))
        if self.is_steady:
            return [(workload.without_drift(), share) for workload, share in mix]
        return mix


def _scaled(mix: Sequence[tuple[Workload, float]], rate: float) -> list[Workload]:
    """To so many requests a second together."""
    total = sum(share for _, share in mix)
    return [workload.at_rate(rate * share / total) for workload, share in mix]


def _share(text: str) -> tuple[Workload, float]:
    name, equals, share = text.partition("=")
    if name not in WORKLOADS:
        raise ForecastFailed(f"--workload {name}: must be one of {', '.join(WORKLOADS)}")
    try:
        number = float(share) if equals else 1.0
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise ForecastFailed(f"--workload {text}: its share must be a number above 0")
    return WORKLOADS[name], number
