"""Data that a forecast reads from a ledger besides the requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.config import Config, load
from cluster.simulator.command import ledger_requests
from cluster.simulator.command.load import Requests
from cluster.simulator.summary import Record
from cluster.simulator.workloads.arrivals import Arrival
from router.auth.document import Document
from router.ledger.memory.memory import MemoryLedger


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> MemoryLedger:
    """Return a ledger with finished requests of three tenants, one of which has a weight."""
    ledger = MemoryLedger(clock=lambda: 0.0)
    document = Document().with_tenant("acme", {"weight": 3}).with_tenant("gone", {"weight": 9})
    asyncio.run(ledger.put_access(document.to_records()))

    @asynccontextmanager
    async def connected_ledger(config: Config) -> AsyncIterator[MemoryLedger]:
        yield ledger

    async def finished_requests(ledger: MemoryLedger, limit: int) -> list[Record]:
        tenants = ("acme", "other", "")
        return [Record(i, Arrival(i, 9, 9, 9, tenant=it)) for i, it in enumerate(tenants)]

    monkeypatch.setattr(ledger_requests, "connected_ledger", connected_ledger)
    monkeypatch.setattr("cluster.simulator.history.finished_requests", finished_requests)
    return ledger


def requests_of(tmp_path: Path, *settings: str) -> Requests:
    config = load(None, {}, [f"state_dir={tmp_path}", "model=fake", *settings])
    return Requests(ledger=ledger_requests.requests_or_none(True, config, limit=10))


@pytest.mark.usefixtures("ledger")
def test_ledger_requests_keep_tenant_weights(tmp_path: Path) -> None:
    asked = requests_of(tmp_path, "router.access=ledger")
    assert asked.weights == {"acme": 3}
    assert [arrival.tenant for arrival in asked.arrivals(())] == ["acme", "other", ""]


@pytest.mark.usefixtures("ledger")
def test_ledger_requests_have_no_weights_with_open_access(tmp_path: Path) -> None:
    assert requests_of(tmp_path).weights == {}


def test_synthetic_requests_have_no_weights() -> None:
    assert Requests().weights == {}
