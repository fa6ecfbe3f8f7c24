"""Finished requests in the ledger of a cluster, as the workload of a forecast."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated

import typer

from cluster.config import Config
from cluster.connection import connected_ledger
from cluster.errors import ForecastFailed
from cluster.simulator.summary import Record
from cluster.simulator.workloads import options

DEFAULT_LIMIT = 10_000

FromLedger = Annotated[
    bool,
    typer.Option(
        "--from-ledger",
        help="Use the requests in the ledger of the cluster.",
        rich_help_panel=options.PANEL,
    ),
]
Limit = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Number of requests to read from the ledger, newest first.",
        rich_help_panel=options.PANEL,
    ),
]


class LedgerRequests:
    """Workload of the ``limit`` newest finished requests in the configured ledger.

    ``records`` has one record per choice of these requests, sorted by arrival. The first use of
    ``records`` or ``weights`` reads the ledger. The reading raises ForecastFailed if there are no
    such requests, and SettingsError if the stored API keys or tenants are unreadable or invalid.
    ClusterFailed, LedgerSetupError or LedgerUnavailable is raised if the ledger cannot be used.
    """

    def __init__(self, config: Config, limit: int) -> None:
        self._config = config
        self._limit = limit

    @property
    def records(self) -> list[Record]:
        return self._all[0]

    @property
    def weights(self) -> Mapping[str, float]:
        """Fair-share weights of the requests' tenants; a tenant that is missing has weight 1."""
        return self._all[1]

    @cached_property
    def _all(self) -> tuple[list[Record], Mapping[str, float]]:
        return asyncio.run(self._read())

    async def _read(self) -> tuple[list[Record], Mapping[str, float]]:
        # This import is slow, and most forecasts do not need it.
        from cluster.simulator.history import finished_requests, weights

        async with connected_ledger(self._config) as ledger:
            records = await finished_requests(ledger, self._limit)
            if not records:
                raise ForecastFailed("the ledger has no finished request")
            tenants = {record.arrival.tenant for record in records}
            return records, await weights(ledger, self._config.router, tenants)


def requests_or_none(from_ledger: bool, config: Config, limit: int) -> LedgerRequests | None:
    return LedgerRequests(config, limit) if from_ledger else None
