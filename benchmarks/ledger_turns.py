"""Cost of a turn of a long conversation in the ledger: bytes beyond its new tokens, and time.

This is a part of locality.py, with an embedded ledger and one client. A session's prompt grows to
``context`` tokens; each turn has 250 output tokens and 250 new ones from the user or a tool. A turn
is an open, a dispatch and an append that ends it. Its bytes are the growth of MEMORY USAGE of all
keys, less 4 bytes for each new token.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import redis.asyncio

from everlift.hashes import chunk_hashes
from everlift.messages import FinishReason, Request
from everlift.request_id import in_session
from router.ledger.config import LedgerConfig
from router.ledger.entry import Append, Appended
from router.ledger.redis.redis_ledger import RedisLedger, connect
from tests.support.ledger.ledgers import make_request, valkey_server

OUTPUT = 250
ADDED = 250
TERM = 1


def request(number: int, prompt_ids: tuple[int, ...]) -> Request:
    its = make_request(
        in_session(f"turn-{number}", "session"),
        prompt_ids=prompt_ids,
        max_tokens=OUTPUT,
        session_id="session",
        turn=bytes(24),
    )
    # Routers compute the hashes once, for dispatch and for the ledger.
    object.__setattr__(its, "chunk_hashes", tuple(chunk_hashes(prompt_ids, its.salt)))
    return its


async def turn(ledger: RedisLedger, its: Request, number: int) -> float:
    """Run a turn in the ledger, and return the seconds of the open."""
    start = time.perf_counter()
    await ledger.open(its, "gateway")
    seconds = time.perf_counter() - start
    epoch = number + 1
    await ledger.dispatch(its.request_id, "worker", epoch, TERM)
    end = Append(its.request_id, epoch, 0, tuple(range(OUTPUT)), finish_reason=FinishReason.STOP)
    assert await ledger.append([end]) == [Appended.FINISHED]
    return seconds


async def used_bytes(client: redis.asyncio.Redis) -> int:
    keys = [key async for key in client.scan_iter(count=10_000)]
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.memory_usage(key, samples=0)
    return sum(await pipeline.execute())


async def measure(context: int, turns: int) -> dict[str, Any]:
    """Measure ``turns`` turns up to a prompt of ``context`` tokens, and return the raw figures.

    ``bytes_per_turn`` is a mean, because only full chunks are stored, so that turns differ.
    """
    with valkey_server(LedgerConfig(maxmemory_mib=1024), also="+memory|usage") as url:
        ledger = await connect(LedgerConfig(url=url))
        client = redis.asyncio.Redis.from_url(url)
        await ledger.lead("router", "address", TERM, 3600.0)
        first = context - turns * (OUTPUT + ADDED)
        prompt_ids = tuple(range(first))
        opened_s = [await turn(ledger, request(0, prompt_ids), 0)]
        grown = []
        for number in range(1, turns + 1):
            prompt_ids = tuple(range(first + number * (OUTPUT + ADDED)))
            its = request(number, prompt_ids)
            before = await used_bytes(client)
            opened_s.append(await turn(ledger, its, number))
            new_tokens = OUTPUT + ADDED + OUTPUT
            grown.append(await used_bytes(client) - before - 4 * new_tokens)
        read_s = []
        for _ in range(5):
            start = time.perf_counter()
            await ledger.read(its.request_id)
            read_s.append(time.perf_counter() - start)
        await client.aclose()
        await ledger.close()
    return {
        "context": context,
        "turn_bytes": grown,
        "bytes_per_turn": statistics.mean(grown),
        "first_open_ms": opened_s[0] * 1e3,
        "open_ms": statistics.median(opened_s[1:]) * 1e3,
        "read_ms": statistics.median(read_s) * 1e3,
    }
