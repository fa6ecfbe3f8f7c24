"""Ledgers under test: in memory, and on servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from router.ledger.base import Ledger
from router.ledger.config import LedgerConfig
from router.ledger.memory.memory import MemoryLedger
from tests.support.example_counts import long
from tests.support.ledger.ledger_servers import cluster, cluster_url, tls_ledger
from tests.support.ledger.ledgers import (
    RETENTION_S,
    Clock,
    Tick,
    connected,
    redis_server,
    valkey_server,
)

#: Limit of a ledger's calls in seconds, which is long enough for a busy machine.
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Backend:
    """Ledger server and its settings; ``url`` is empty for the ledger in memory."""

    url: str
    settings: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(
    scope="module",
    params=["memory", long("valkey"), long("redis"), "cluster-4-shards", long("tls")],
)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "memory":
        yield Backend("")
    elif request.param == "valkey":
        with valkey_server() as url:
            yield Backend(url)
    elif request.param == "redis":
        with redis_server() as url:
            yield Backend(url)
    elif request.param == "tls":
        with tls_ledger() as (url, settings):
            yield Backend(url, settings)
    else:
        with cluster() as nodes:
            yield Backend(cluster_url(nodes), {"shards": 4})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def ledger(backend: Backend, clock: Clock) -> AsyncIterator[Ledger]:
    if not backend.url:
        yield MemoryLedger(clock)
        return
    async with connected(backend.url, timeout=_TIMEOUT_S, **backend.settings) as ledger:
        yield ledger


@pytest.fixture
async def expiring(backend: Backend, clock: Clock) -> AsyncIterator[Ledger]:
    """Ledger with a short retention of ended requests."""
    if not backend.url:
        yield MemoryLedger(clock, LedgerConfig(retention=RETENTION_S))
        return
    settings = backend.settings | {"retention": RETENTION_S}
    async with connected(backend.url, timeout=_TIMEOUT_S, **settings) as ledger:
        yield ledger


@pytest.fixture
def tick(backend: Backend, clock: Clock) -> Tick:
    async def pass_time() -> None:
        clock.now += 0.01
        await asyncio.sleep(0.01 if backend.url else 0)

    return pass_time
