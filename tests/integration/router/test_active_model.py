"""Routers of two models that clients reach at one address, while one replaces the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from everlift.client.client import AsyncClient
from everlift.errors import RouterStopping, UnknownModel
from router import active
from tests.support.in_process import Cluster, KeptLedger, cluster, until
from tests.support.router.http_client import get


@dataclass
class Turns:
    """Name of the active cluster, which both ledgers share."""

    active: str = "old"


class SharedLedger(KeptLedger):
    def __init__(self, name: str, turns: Turns) -> None:
        super().__init__(time.monotonic)
        self._name = name
        self._turns = turns

    async def is_active(self) -> bool:
        return self._turns.active == self._name

    async def activate(self) -> None:
        self._turns.active = self._name


@dataclass
class Upgrade:
    old: Cluster
    new: Cluster
    turns: Turns = field(default_factory=Turns)


@pytest.fixture
async def upgrade() -> AsyncIterator[Upgrade]:
    turns = Turns()
    async with AsyncExitStack() as stack:
        old, new = [
            await stack.enter_async_context(cluster(workers=1, ledger=SharedLedger(name, turns)))
            for name in ("old", "new")
        ]
        yield Upgrade(old, new, turns)


async def is_ready(parts: Cluster) -> bool:
    return (await get(parts.routers[0].http_address, "/ready")).status == 200


async def ask(parts: Cluster, model: str) -> list[int]:
    async with AsyncClient(parts.address, reconnect_s=0) as client:
        return await tokens(client, 3, model)


async def tokens(client: AsyncClient, number: int, model: str = "") -> list[int]:
    stream = client.generate([1, 2], max_tokens=number, model=model)
    return [token async for chunk in stream for token in chunk.token_ids]


async def test_activation_makes_only_new_model_ready(upgrade: Upgrade) -> None:
    old, new = upgrade.old, upgrade.new
    assert await is_ready(old)
    assert not await is_ready(new)
    with pytest.raises(UnknownModel):
        await ask(old, "other")
    with pytest.raises(RouterStopping):
        await ask(new, "other")

    await new.routers[0].activate()
    async with asyncio.timeout(30.0):
        while await is_ready(old) or not await is_ready(new):
            await asyncio.sleep(0.05)
    # A client that still reaches the old router is served.
    assert len(await ask(old, "fake")) == 3
    for parts in (old, new):
        with pytest.raises(RouterStopping):
            await ask(parts, "other")


async def test_deactivated_router_closes_connections_after_requests(
    upgrade: Upgrade,
) -> None:
    [held] = upgrade.old.hold()
    router = upgrade.old.routers[0]
    async with AsyncClient(router.address) as client:
        running = asyncio.create_task(tokens(client, 30))
        reader, writer = await asyncio.open_connection(*router.http_address.rsplit(":", 1))
        writer.write(b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        await until(lambda: held.num_requests == 1)
        await upgrade.new.routers[0].activate()
        # The idle connection closes, and the running request continues.
        async with asyncio.timeout(30.0):
            await reader.read()
        writer.close()
        await until(lambda: not router._models.is_active)
        held.release()
        assert len(await running) == 30


async def test_deactivated_router_answers_first_request_of_connection(upgrade: Upgrade) -> None:
    router = upgrade.old.routers[0]
    received = b"GET /health HTTP/1.1\r\n"
    opened = [await asyncio.open_connection(*router.http_address.rsplit(":", 1)) for _ in range(3)]
    (_, has_part), (_, idle), (_, answered) = opened
    has_part.write(received)
    answered.write(received + b"host: here\r\n\r\n")
    await opened[-1][0].readuntil(b"\r\n\r\n")
    answered.write(received)
    await until(lambda: len(router._http._state.connections) == 3)

    await upgrade.new.routers[0].activate()
    await until(lambda: not router._models.is_active)
    await asyncio.sleep(1.5)
    has_part.write(b"host: here\r\n\r\n")
    answered.write(b"host: here\r\n\r\n")
    idle.write(received + b"host: here\r\n\r\n")
    for reader, writer in opened:
        async with asyncio.timeout(30.0):
            answer = await reader.read()
        writer.close()
        assert b"HTTP/1.1 200" in answer
        assert b"\r\nconnection: close\r\n" in answer


async def test_client_retries_refusal_over_new_connection(
    upgrade: Upgrade, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise an inactive router closes all connections every second anyway.
    monkeypatch.setattr(active, "_POLL_INTERVAL_S", 3600.0)
    host, port = upgrade.new.address.rsplit(":", 1)
    connections: set[asyncio.Task[None]] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        back, forth = await asyncio.open_connection(host, port)
        async with asyncio.TaskGroup() as both:
            both.create_task(copy(reader, forth))
            both.create_task(copy(back, writer))

    balancer = await asyncio.start_server(forward, "127.0.0.1", 0)
    address = "{}:{}".format(*balancer.sockets[0].getsockname())
    async with balancer:
        async with AsyncClient(address, reconnect_s=60.0) as client:
            retrying = asyncio.create_task(tokens(client, 3, "other"))
            await until(lambda: len(connections) > 4)
            retrying.cancel()
            await asyncio.gather(retrying, return_exceptions=True)
        async with AsyncClient(address, reconnect_s=0.0) as client:
            with pytest.raises(RouterStopping):
                await tokens(client, 3, "other")
        await asyncio.gather(*connections)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # Closing while data arrives resets the connection, which ends it, as for a load balancer.
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


async def test_inactive_router_closes_refused_http_connection(upgrade: Upgrade) -> None:
    address = upgrade.new.routers[0].http_address
    reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
    body = b'{"model": "other", "prompt": [1, 2]}'
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    async with asyncio.timeout(30.0):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"\r\nconnection: close\r\n" in answer
