"""Calls of the ledger's scripts: their time limit and their connections."""

from __future__ import annotations

import asyncio
from typing import Self

import pytest
from redis.exceptions import ConnectionError

from everlift.errors import LedgerUnavailable
from router.ledger.config import LedgerConfig
from router.ledger.redis import scripts
from router.ledger.redis.shards import Shards


async def test_call_timeout_holds_if_cancellation_is_swallowed() -> None:
    tries = 0

    async def fail_when_cancelled() -> None:
        nonlocal tries
        tries += 1
        assert tries == 1, "tried again when the time was up"
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionError("gone") from None

    shards = Shards(LedgerConfig(url="redis://127.0.0.1:1", timeout=0.05))
    with pytest.raises(LedgerUnavailable, match="get: ConnectionError within"):
        await shards.attempt("get", fail_when_cancelled)


class WithoutReplica:
    """Client, and its pipeline, of a server that answers all commands but WAIT."""

    def __init__(self) -> None:
        self.commands: list[str | bytes] = []

    async def initialize(self) -> Self:
        return self

    def get_node_from_key(self, key: str) -> str:
        return key

    def pipeline(self, transaction: bool = False) -> WithoutReplica:
        return WithoutReplica()

    def execute_command(self, name: str, *arguments: object, target_nodes: str = "") -> None:
        self.commands.append(name)

    async def execute(self, **_: bool) -> list[bytes]:
        if "WAIT" in self.commands:
            await asyncio.Event().wait()
        return [b"OK"] * len(self.commands)


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_calls_do_not_await_those_that_settle(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{scheme}://127.0.0.1:1"
    shards = Shards(LedgerConfig(url=url, durability_class="replicated", max_connections=2))
    monkeypatch.setattr(shards._connections, "_client", WithoutReplica())
    ends = [asyncio.create_task(shards.run(scripts.END, 0, settles=True)) for _ in range(3)]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(1):
        assert await shards.run(scripts.BEAT, 0, is_hedged=True) == b"OK"
    assert not any(end.done() for end in ends)
    for end in ends:
        end.cancel()
