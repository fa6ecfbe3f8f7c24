"""Command line options of a forecast's requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from cluster.errors import ForecastFailed
from cluster.simulator.command.ledger_requests import LedgerRequests
from cluster.simulator.plan import saturation_rate
from cluster.simulator.scenario import WorkerSpec
from cluster.simulator.workloads import options
from cluster.simulator.workloads.arrivals import Arrival
from cluster.simulator.workloads.traces.trace import Trace
from cluster.simulator.workloads.workload import Workload, merged

_DEFAULT = "azure-conversation"
_DURATION_S = 300.0
#: Number of requests from which the mean size of a mix is estimated.
SAMPLE = 2000

Rate = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        help="Requests per second, instead of the workload's rate.",
        rich_help_panel=options.PANEL,
    ),
]
Load = Annotated[
    float | None,
    typer.Option(
        "--load",
        metavar="SHARE",
        help="Rate as a share of the estimated capacity of the workers.",
        rich_help_panel=options.PANEL,
    ),
]
Duration = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help=f"Seconds of arrivals. Default: {_DURATION_S:g}, or all recorded requests.",
        rich_help_panel=options.PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class Requests:
    """Options of the requests to simulate; the default workload is azure-conversation.

    Only one of ``trace``, ``ledger`` and the options of synthetic workloads may be set.
    """

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
    ledger: LedgerRequests | None = None

    def __post_init__(self) -> None:
        """Check the options. Raises ForecastFailed for invalid or contradictory ones."""
        synthetic = (self.workloads, self.rate, self.load, self.is_steady or None)
        if self.trace is not None and self.ledger is not None:
            raise ForecastFailed("--from-ledger and --trace exclude each other")
        if self._is_recorded and any(option is not None for option in synthetic):
            raise ForecastFailed(
                "--workload, --rate, --load and --steady do not apply to recorded requests; use "
                "--speed to change the rate of a trace"
            )
        if self.trace is None and (self.begin_s, self.end_s, self.speed) != (0.0, None, 1.0):
            raise ForecastFailed("--from, --to and --speed need --trace")
        if self.rate is not None and self.load is not None:
            raise ForecastFailed("--rate and --load exclude each other")
        for name in ("rate", "load", "duration_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ForecastFailed(f"--{name.removesuffix('_s')} must be above 0, not {value:g}")

    @property
    def weights(self) -> Mapping[str, float]:
        """Fair-share weights of the requests' tenants; a tenant that is missing has weight 1.

        Without ``ledger`` the mapping is empty. Otherwise the first use reads the ledger, and may
        raise the errors that LedgerRequests states.
        """
        return {} if self.ledger is None else self.ledger.weights

    def arrivals(self, workers: Sequence[WorkerSpec]) -> Iterator[Arrival]:
        """Yield the requests in order of arrival; only those of the ledger are held in memory.

        If ``load`` is set, the rate is that share of the estimated capacity of ``workers``, which
        are not used otherwise. Raises WorkloadFailed for an unknown workload or an invalid trace,
        ForecastFailed for several workloads without a rate or load, and the errors of
        LedgerRequests if ``ledger`` is set.
        """
        duration_s = self.duration_s or (inf if self._is_recorded else _DURATION_S)
        return takewhile(lambda arrival: arrival.at < duration_s, self._all(workers))

    def average_rate(self) -> float:
        """Return the mean number of requests per second, after reading all of them.

        ``load`` must not be set, because the rate would depend on the workers. Raises the errors of
        ``arrivals``, such as WorkloadFailed.
        """
        number, last = 0, 0.0
        for arrival in self.arrivals(()):
            number, last = number + 1, arrival.at
        return number / max(last, 1.0)

    @property
    def _is_recorded(self) -> bool:
        return self.trace is not None or self.ledger is not None

    def _all(self, workers: Sequence[WorkerSpec]) -> Iterable[Arrival]:
        if self.ledger is not None:
            return (record.arrival for record in self.ledger.records)
        if self.trace is not None:
            end_s = inf if self.end_s is None else self.end_s
            return Trace(self.trace, self.begin_s, end_s, self.speed).arrivals()
        return merged(self._workloads(workers), self.seed)

    def _workloads(self, workers: Sequence[WorkerSpec]) -> list[Workload]:
        mix = options.mix(self.workloads or (_DEFAULT,), self.is_steady)
        if self.load is not None:
            at_one = list(options.at_rate(mix, 1.0))
            sample = list(islice(merged(at_one, self.seed), SAMPLE))
            most = sum(saturation_rate(sample, worker) for worker in workers)
            return list(options.at_rate(mix, self.load * most))
        if self.rate is not None:
            return list(options.at_rate(mix, self.rate))
        if len(mix) > 1:
            raise ForecastFailed("several workloads need --rate or --load")
        return [workload for workload, _ in mix]
