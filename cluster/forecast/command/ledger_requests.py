"""Requests that a cluster has served, as its ledger still knows them, for a forecast."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Annotated

import typer

from cluster.config import Config
from cluster.errors import ForecastFailed
from cluster.forecast.record import Record
from cluster.ledger_connection import connected_ledger
from cluster.workloads import options

DEFAULT_LIMIT = 10_000

FromLedger = Annotated[
    bool,
    typer.Option(
        "--from-ledger",
        help="The requests that the cluster's ledger still knows.",
        rich_help_panel=options.PANEL,
    ),
]
Limit = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="So many of the ledger, the newest.",
        rich_help_panel=options.PANEL,
    ),
]


class LedgerRequests:
    """Of the ledger that is configured the ``limit`` newest ones that finished."""

    def __init__(self, config: Config, limit: int) -> None:
        self._config = config
        self._limit = limit

    @cached_property
    def records(self) -> list[Record]:
        """Read when they are first asked for. Raises ForecastFailed where there is none, and what
        connecting raises."""
        return asyncio.run(self._read())

    async def _read(self) -> list[Record]:
        # What it imports takes a while, and most forecasts are of other requests.
        from cluster.forecast.history import finished_requests

        async with connected_ledger(self._config) as ledger:
            records = await finished_requests(ledger, self._limit)
        if not records:
            raise ForecastFailed("the ledger knows no request that finished")
        return records


def asked_for(from_ledger: bool, config: Config, limit: int) -> LedgerRequests | None:
    return LedgerRequests(config, limit) if from_ledger else None
