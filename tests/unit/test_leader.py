"""The leader over a memory ledger, with recorded gateways."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from everlift.errors import LedgerUnavailable
from everlift.messages import OnDisconnect, Request
from everlift.sampling import SamplingParams
from everlift.v1 import session_pb2
from router.config import RouterConfig
from router.leader import Leader
from router.ledger.memory import MemoryLedger
from tests.in_process import until

CONFIG = RouterConfig(model="fake", max_queued=2, lease=0.5, beat=0.05)
INFO = session_pb2.WorkerInfo(worker_id="w", max_num_seqs=8, num_blocks=100)


class FlakyLedger(MemoryLedger):
    is_away = False

    async def orphans(self, limit: int) -> list[str]:
        if self.is_away:
            raise LedgerUnavailable("away")
        return await super().orphans(limit)


@pytest.fixture
def ledger() -> FlakyLedger:
    return FlakyLedger(time.monotonic)


@pytest.fixture
async def leader(ledger: FlakyLedger) -> AsyncIterator[Leader]:
    leader = Leader(CONFIG, "router", "here:1", ledger)
    run = asyncio.create_task(leader.run())
    await until(lambda: leader.is_leading)
    yield leader
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


class Gateway:
    def __init__(self, leader: Leader, name: str) -> None:
        self.leader = leader
        self.name = name
        self.heard: list[session_pb2.LeaderMessage] = []
        leader.connect(name, self.heard.append)

    def enqueue(self, request_id: str, *, accepted: bool = False) -> None:
        waiting = session_pb2.Waiting(
            request_id=request_id, prompt_tokens=3, accepted=accepted, choices=1
        )
        self.leader.receive(self.name, session_pb2.GatewayMessage(enqueue=[waiting]))

    def withdraw(self, request_id: str) -> None:
        self.leader.receive(self.name, session_pb2.GatewayMessage(withdraw=[request_id]))

    def told(self, field: str) -> list[str]:
        names = [name for message in self.heard for name in getattr(message, field)]
        return [getattr(name, "request_id", name) for name in names]


def give_it_a_worker(leader: Leader) -> None:
    leader.worker_up(INFO)
    state = session_pb2.WorkerState(sequence_number=1)
    leader.worker_frame("w", session_pb2.WorkerFrame(state=state))


async def opened(ledger: MemoryLedger, request_id: str, gateway: str) -> None:
    request = Request(
        request_id=request_id,
        model="fake",
        fingerprint="",
        prompt_ids=(1,),
        max_tokens=3,
        sampling=SamplingParams(),
        stop=(),
        stop_token_ids=(),
        on_disconnect=OnDisconnect.CONTINUE,
        deadline=None,
        body_hash=b"",
    )
    await ledger.open(request, gateway)


async def test_a_full_queue_refuses_what_is_new_and_nothing_else(leader: Leader) -> None:
    gateway = Gateway(leader, "g")
    for request_id in ("a", "b", "c"):
        gateway.enqueue(request_id)
    gateway.enqueue("b")
    gateway.enqueue("adopted", accepted=True)
    assert gateway.told("refused") == ["c"]
    assert leader.queued == 3


async def test_who_lost_a_request_hears_of_it_and_cannot_withdraw_it(leader: Leader) -> None:
    old, new = Gateway(leader, "old"), Gateway(leader, "new")
    old.enqueue("r")
    new.enqueue("r")
    assert old.told("stale") == ["r"]
    old.withdraw("r")
    assert leader.queued == 1


async def test_a_dispatch_is_told_to_whom_the_ledger_names(
    leader: Leader, ledger: FlakyLedger
) -> None:
    mistaken, owner = Gateway(leader, "mistaken"), Gateway(leader, "owner")
    await opened(ledger, "r", "owner")
    mistaken.enqueue("r")
    give_it_a_worker(leader)
    await until(lambda: owner.told("dispatched") == ["r"])
    assert mistaken.told("stale") == ["r"]
    assert not mistaken.told("dispatched")


async def test_a_gateway_that_hung_up_is_told_nothing_more(leader: Leader) -> None:
    gateway = Gateway(leader, "g")
    send = leader._gateways["g"]
    gateway.enqueue("r")
    leader.disconnect("g", send)
    assert leader.queued == 0
    assert not leader._gateways


async def test_after_an_outage_the_living_may_renew_before_orphans_are_given_away(
    leader: Leader, ledger: FlakyLedger
) -> None:
    gateway = Gateway(leader, "g")
    await opened(ledger, "r", "dead")
    await until(lambda: gateway.told("adopt") == ["r"])
    leader._adopting.clear()
    gateway.heard.clear()
    ledger.is_away = True
    await until(lambda: leader._sweep_after > time.monotonic())
    ledger.is_away = False
    held_until = leader._sweep_after
    await until(lambda: gateway.told("adopt"))
    assert time.monotonic() > held_until


async def test_orphans_without_a_gateway_wait_for_one(leader: Leader, ledger: FlakyLedger) -> None:
    await opened(ledger, "r", "dead")
    await until(lambda: time.monotonic() > leader._sweep_after)
    await asyncio.sleep(3 * CONFIG.beat)
    gateway = Gateway(leader, "g")
    await until(lambda: gateway.told("adopt") == ["r"])
