"""Clusters whose ledger loses acknowledged writes in a restart, over real gRPC."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from everlift.client.client import AsyncClient
from everlift.errors import DataLoss, UnknownRequest
from everlift.messages import OnDisconnect
from router.ledger.base import Membership
from router.ledger.entry import State
from tests.support.in_process import (
    Cluster,
    KeptLedger,
    paced_cluster,
    receive,
    right_tokens,
    until,
)
from tests.support.router.gateway_support import roll_back, saved

COUNT = 150
PROMPTS = [[n, n + 1, n + 2] for n in range(1, 13)]


class LossyLedger(KeptLedger):
    """KeptLedger whose server can restart, with a new generation if ``changes_generation``."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.generation = 1
        self.changes_generation = True

    async def heartbeat(self, gateway: str, address: str, lease_s: float) -> Membership:
        membership = await super().heartbeat(gateway, address, lease_s)
        return replace(membership, generation=str(self.generation))

    def restart(self, known: dict[str, object]) -> None:
        roll_back(self, known)
        self.generation += self.changes_generation


@pytest.fixture
def ledger() -> LossyLedger:
    return LossyLedger()


async def tokens_of_all(parts: Cluster, at_least: int) -> None:
    """Wait until ``at_least`` tokens of each request are readable."""
    gateways = [router._requests._registry for router in parts.routers]
    await until(lambda: sum(map(len, gateways)) == len(PROMPTS))
    live = [each for gateway in gateways for each in gateway]
    await until(lambda: all(each.choices[0].readable >= at_least for each in live))


@pytest.mark.parametrize("changes_generation", [True, False])
@pytest.mark.parametrize("kept", ["nothing", "some"])
async def test_streams_are_unaffected_by_ledger_rollback(
    ledger: LossyLedger, kept: str, changes_generation: bool
) -> None:
    ledger.changes_generation = changes_generation
    async with paced_cluster(routers=2, workers=2, ledger=ledger) as parts:
        known = saved(ledger)
        clients = [AsyncClient(router.address) for router in parts.routers]
        work = [
            asyncio.create_task(receive(clients[n % 2], prompt, COUNT))
            for n, prompt in enumerate(PROMPTS)
        ]
        for tokens in (10, 60):
            await tokens_of_all(parts, tokens)
            if kept == "some" and tokens == 10:
                known = saved(ledger)
        ledger.restart(known)
        received = await asyncio.gather(*work)
        for one, prompt in zip(received, PROMPTS, strict=True):
            assert one.tokens == right_tokens(prompt, COUNT)
            assert one.is_contiguous
            stored = await ledger.read(one.request_id)
            assert stored.entry.state is State.FINISHED
            assert list(stored.choices[0].tokens) == one.tokens
        statuses = [await client.status() for client in clients]
        assert sum(status.completed for status in statuses) == len(PROMPTS)
        assert [status.ledger.rollbacks for status in statuses] == [1, 1]
        for client in clients:
            await client.close()


async def test_tokens_are_regenerated_after_rollback_and_router_loss(
    ledger: LossyLedger,
) -> None:
    """The clients alone know which tokens they have received."""
    async with paced_cluster(routers=2, workers=2, ledger=ledger) as parts:
        first, second = parts.routers
        async with AsyncClient([first.address, second.address]) as client:
            work = [asyncio.create_task(receive(client, prompt, COUNT)) for prompt in PROMPTS]
            await tokens_of_all(parts, 10)
            known = saved(ledger)
            await tokens_of_all(parts, 60)
            await parts.kill_router(first)
            ledger.restart(known)
            received = await asyncio.gather(*work)
        for one, prompt in zip(received, PROMPTS, strict=True):
            assert one.tokens == right_tokens(prompt, COUNT)
            assert one.is_contiguous


async def test_regeneration_mismatch_raises_data_loss(
    ledger: LossyLedger,
) -> None:
    async with paced_cluster(routers=2, workers=2, ledger=ledger) as parts:
        first, second = parts.routers
        async with AsyncClient([first.address, second.address]) as client:
            stream = client.generate(PROMPTS[0], max_tokens=COUNT, temperature=0)
            while (chunk := await anext(stream)).offset < 20:
                pass
            known = saved(ledger)
            await parts.kill_router(first)
            [record] = known["_records"].values()  # type: ignore[attr-defined]
            # A changed third token makes the regenerated tokens differ from the delivered ones.
            del record.choices[0].tokens[3:]
            record.choices[0].tokens[2] += 1
            record.update()
            ledger.restart(known)
            with pytest.raises(DataLoss, match="choice 0 cannot be continued at offset"):
                while True:
                    chunk = await anext(stream)
                    assert chunk.token_ids[0] == right_tokens(PROMPTS[0], COUNT)[chunk.offset]


async def test_forget_is_forwarded_to_owning_router(ledger: LossyLedger) -> None:
    async with paced_cluster(routers=2, workers=2, ledger=ledger) as parts:
        first, second = (AsyncClient(router.address) for router in parts.routers)
        done = await receive(first, PROMPTS[0], 5)
        runs = first.generate(PROMPTS[1], max_tokens=2000, on_disconnect=OnDisconnect.CONTINUE)
        await anext(runs)
        known = saved(ledger)
        for request_id in (done.request_id, runs.request_id):
            await second.forget(request_id)
            for client in (first, second):
                with pytest.raises(UnknownRequest):
                    await client.get_request(request_id)
        with pytest.raises(UnknownRequest):
            await second.forget("never")
        ledger.restart(known)
        await until(lambda: not ledger._records)
        for client in (first, second):
            await client.close()


async def test_relaying_router_death_does_not_cancel_request(
    ledger: LossyLedger,
) -> None:
    """A lost relay starts the grace period, although the request is cancelled on disconnect."""
    async with paced_cluster(routers=2, workers=2, ledger=ledger) as parts:
        first, second = parts.routers
        async with AsyncClient(first.address) as client, AsyncClient(second.address) as other:
            stream = client.generate([7], max_tokens=3000, on_disconnect=OnDisconnect.CANCEL)
            await anext(stream)
            relayed = other.attach(stream.request_id)
            await anext(relayed)
            live = first._requests._registry.get(stream.request_id)
            assert live is not None
            await until(lambda: live._num_readers == 2)
            stream._reader._cancel_call()
            await until(lambda: live._num_readers == 1)
            await parts.kill_router(second)
            await until(lambda: not live.has_readers)
            assert live.grace is not None
            await client.cancel(stream.request_id)
