"""Heartbeat of a replica: leadership, and generations of a ledger that may have lost data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace

import pytest

from everlift.errors import InvalidRequest, LedgerUnavailable
from everlift.v1 import session_pb2
from router.config import RouterConfig
from router.event_loop import first_answer, now
from router.heartbeat import Heartbeat, _check_same
from router.leader.policy_store import RuntimePolicy
from router.ledger.base import Membership
from router.ledger.memory.memory import MemoryLedger
from tests.support.in_process import until

CONFIG = RouterConfig(model="fake", heartbeat=0.03, lease=1.0)


class ScriptedLedger(MemoryLedger):
    generation = "one"
    is_away = False
    #: number of the next heartbeats that get no answer
    unanswered = 0
    beats = 0

    async def heartbeat(self, gateway: str, address: str, lease_s: float) -> Membership:
        self.beats += 1
        if self.is_away:
            raise LedgerUnavailable("away")
        if self.unanswered:
            self.unanswered -= 1
            await asyncio.Event().wait()
        membership = await super().heartbeat(gateway, address, lease_s)
        return replace(membership, generation=self.generation)


class Gateway:
    def __init__(self) -> None:
        self.asserted: list[str] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.failures = 0
        self.memory_used: list[float] = []

    def ledger_answered(self, membership: Membership) -> None:
        self.memory_used.append(membership.memory_used)

    def ledger_failed(self) -> None:
        self.failures += 1

    async def generation_changed(self, generation: str) -> None:
        await self.may_go_on.wait()
        self.asserted.append(generation)


class Leader:
    def __init__(self) -> None:
        self.is_leading = False
        self.changed = asyncio.Event()
        self.memberships: list[Membership] = []

    def on_heartbeat(self, membership: Membership) -> None:
        self.memberships.append(membership)


class Line:
    def __init__(self) -> None:
        self.is_quiet = False
        self.followed: list[tuple[str, str]] = []

    async def follow(self, leader: str, address: str) -> None:
        self.followed.append((leader, address))

    def flush_served(self) -> None: ...


class NoWorkers:
    links: tuple[()] = ()

    async def reconcile(self, workers: list[session_pb2.WorkerInfo]) -> None: ...


class Replica:
    def __init__(self) -> None:
        self.ledger = ScriptedLedger(now)
        self.gateway, self.leader, self.line = Gateway(), Leader(), Line()
        self.heartbeat = Heartbeat(
            CONFIG,
            "router",
            "here:1",
            self.ledger,
            NoWorkers(),  # type: ignore[arg-type]
            self.leader,  # type: ignore[arg-type]
            self.line,  # type: ignore[arg-type]
            self.gateway,
            RuntimePolicy(CONFIG, self.ledger, ()),
        )


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    replica = Replica()
    run = asyncio.create_task(replica.heartbeat.run())
    yield replica
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_generations_are_reported_once_and_in_order(replica: Replica) -> None:
    gateway, ledger = replica.gateway, replica.ledger
    await until(lambda: gateway.asserted == ["one"])
    gateway.may_go_on.clear()
    for generation in ("two", "three"):
        ledger.generation = generation
        beats = ledger.beats
        await until(lambda beats=beats: ledger.beats > beats + 1)
    assert gateway.asserted == ["one"]
    gateway.may_go_on.set()
    await until(lambda: gateway.asserted == ["one", "two", "three"])


async def test_heartbeat_passes_memberships_to_the_leader(replica: Replica) -> None:
    await replica.ledger.lead("other", "there:1", 7, lease_s=100.0)
    await until(lambda: replica.line.followed and replica.line.followed[-1] == ("other", "there:1"))
    assert replica.leader.memberships[-1].term == 7
    assert replica.gateway.memory_used


async def test_failed_heartbeat_is_reported_and_retried(replica: Replica) -> None:
    replica.ledger.is_away = True
    await until(lambda: replica.gateway.failures >= 2)
    replica.ledger.is_away = False
    before = len(replica.leader.memberships)
    await until(lambda: len(replica.leader.memberships) > before)


async def test_heartbeat_is_repeated_before_the_lease_ends(
    replica: Replica,
) -> None:
    """Dead connections are closed much later."""
    await until(lambda: replica.ledger.beats > 1)
    replica.ledger.unanswered = 3
    await until(lambda: not replica.ledger.unanswered)
    before, since = len(replica.leader.memberships), now()
    await until(lambda: len(replica.leader.memberships) > before)
    assert now() - since < CONFIG.lease
    assert await replica.ledger.gateways() == {"router": "here:1"}
    assert not replica.gateway.failures


async def test_repeated_call_leaves_no_pending_task() -> None:
    asked: list[int] = []

    async def ask() -> int:
        asked.append(len(asked))
        await asyncio.sleep(0 if len(asked) > 2 else 3600)
        return asked[-1]

    before = asyncio.all_tasks()
    assert await first_answer(ask, 0.01) == 2
    assert asyncio.all_tasks() == before


async def test_heartbeat_looks_often_for_a_silent_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, rests = Replica(), []
    timeout = asyncio.timeout

    def recorded(delay: float) -> asyncio.Timeout:
        rests.append(delay)
        return timeout(0.0)

    monkeypatch.setattr(asyncio, "timeout", recorded)
    for is_quiet in (False, True):
        replica.line.is_quiet = is_quiet
        await replica.heartbeat._wait_interval()
    assert rests == pytest.approx([CONFIG.heartbeat, CONFIG.heartbeat / 3])


@pytest.mark.parametrize(
    ("adapters", "cause"),
    [
        ({"b": "one"}, ""),
        ({"a": "one", "b": "other"}, ""),
        ({"a": "two"}, "other files of the adapter 'a' .digest two. than the cluster's .* .one."),
    ],
)
def test_worker_with_other_files_of_an_adapter_is_refused(
    adapters: dict[str, str], cause: str
) -> None:
    connected = session_pb2.WorkerInfo(worker_id="w", adapters={"a": "one"})
    info = session_pb2.WorkerInfo(worker_id="new", adapters=adapters)
    with pytest.raises(InvalidRequest, match=cause) if cause else nullcontext():
        _check_same(connected, info)
