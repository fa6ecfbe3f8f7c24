"""Calls of the ledger's scripts, when their time is up."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError

from everlift.errors import LedgerUnavailable
from router.ledger.config import LedgerConfig
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
