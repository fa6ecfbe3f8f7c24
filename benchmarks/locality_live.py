"""Prefix-cache hits and TTFT of sessions on a live cluster; a part of locality.py.

The cases are one worker, three workers, three with ``router.locality: false``, and three of which
one is killed in the middle. Router, embedded ledger and workers are plain processes on this
machine; the model is SmolLM2-135M. The prompt of a turn consists of the previous prompt, its answer
and ADDED new tokens. A session pauses for up to a second before each turn. All cases have the same
sessions. After the kill, a session's first turn may have to compute its whole prompt again;
``after_kill`` has only the later turns.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.online.online_servers import everlift, serving
from everlift.client.client import AsyncClient
from tests.support.free_port import free_port

#: A first prompt has four chunks of 256 tokens, the unit of routers' prefix comparison. Its
#: recomputation takes longer than a turn with cached tokens.
FIRST, ADDED, OUTPUT = 1024, 40, 16
SEED = 11
#: Each worker's cache holds all sessions, so that only dispatch causes misses.
KV_CACHE_MIB = 1536


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    workers: int = 3
    settings: Mapping[str, Any] = field(default_factory=dict)
    kills: bool = False


CASES = (
    Case("one", workers=1),
    Case("three"),
    Case("off", settings={"router.locality": "false"}),
    Case("kill", kills=True),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of a session.

    ``reusable`` is the number of tokens of the previous prompt and its answer. ``since_kill``
    numbers the session's turns that began after the kill, from 1; it is 0 for earlier ones.
    """

    number: int
    reusable: int
    cached: int
    ttft_s: float
    since_kill: int


class Sessions:
    """All sessions of one case."""

    def __init__(self, address: str, sessions: int, turns: int, kills: bool) -> None:
        self._address = address
        self._sessions, self._turns = sessions, turns
        self._kills, self._is_killing, self._killed = kills, False, False
        self._done: list[Turn] = []

    async def run(self) -> list[Turn]:
        async with AsyncClient(self._address) as client:
            await asyncio.gather(*(self._session(client, it) for it in range(self._sessions)))
        return self._done

    async def _session(self, client: AsyncClient, session: int) -> None:
        chance = random.Random(f"{SEED} {session}")
        prompt = [chance.randrange(1000, 40_000) for _ in range(FIRST)]
        reusable = since_kill = 0
        for number in range(1, self._turns + 1):
            await asyncio.sleep(chance.random())
            since_kill += self._killed
            stream = client.generate(
                prompt, max_tokens=OUTPUT, temperature=0, ignore_eos=True, session_id=f"s{session}"
            )
            output = [token async for chunk in stream for token in chunk.token_ids]
            usage, timing = stream.usage, stream.timing
            assert usage is not None and timing is not None
            self._done.append(
                Turn(
                    number, reusable, usage.cached_tokens, timing.time_to_first_token_s, since_kill
                )
            )
            if self._kills and not self._is_killing and self._is_halfway:
                self._is_killing = True
                await asyncio.to_thread(self._kill)
                self._killed = True
            reusable = len(prompt) + len(output) - 1
            added = [chance.randrange(1000, 40_000) for _ in range(ADDED)]
            prompt = [*prompt, *output, *added]

    @property
    def _is_halfway(self) -> bool:
        return len(self._done) >= self._sessions * self._turns // 2

    def _kill(self) -> None:
        subprocess.run(
            [sys.executable, "-m", "cluster.cli", "chaos", "kill", "any-worker"],
            env=os.environ | {"EVERLIFT_ADDRESS": self._address},
            check=True,
            stdout=subprocess.DEVNULL,
        )


async def measure(case: Case, sessions: int, turns: int, logs: Path) -> list[Turn]:
    port = free_port()
    server = everlift(
        case.name,
        with_ray=False,
        more={
            "router.port": port,
            "num_workers": case.workers,
            "chaos": "true",
            "worker.kv_cache_mib": KV_CACHE_MIB,
            "worker.max_model_len": 2048,
            "worker.max_num_seqs": 48 // case.workers,
            **case.settings,
        },
    )
    async with serving(server, Path("smollm2"), logs):
        return await Sessions(f"127.0.0.1:{port}", sessions, turns, case.kills).run()


def hit_share(turns: Sequence[Turn]) -> float:
    return sum(it.cached for it in turns) / sum(it.reusable for it in turns)


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    later = [it for it in turns if it.number > 1]
    found: dict[str, Any] = {
        "turns": len(turns),
        "hit_share": hit_share(later),
        "ttft_p50_s": statistics.median(it.ttft_s for it in later),
        "ttft_p99_s": statistics.quantiles((it.ttft_s for it in later), n=100)[-1],
        "by_turn": {
            number: {
                "hit_share": hit_share([it for it in later if it.number == number]),
                "ttft_p50_s": statistics.median(it.ttft_s for it in later if it.number == number),
            }
            for number in sorted({it.number for it in later})
        },
    }
    if any(it.since_kill for it in later):
        found["before_kill"] = hit_share([it for it in later if not it.since_kill])
        found["first_after_kill"] = hit_share([it for it in later if it.since_kill == 1])
        found["after_kill"] = hit_share([it for it in later if it.since_kill > 1])
    return found


def ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    each = {f"live_hit_share_{name}": it["hit_share"] for name, it in found.items()}
    if {"off", "three"} <= found.keys():
        each["live_ttft_p50_vs_off"] = found["three"]["ttft_p50_s"] / found["off"]["ttft_p50_s"]
    if {"one", "three"} <= found.keys():
        each["live_ttft_p50_vs_one"] = found["three"]["ttft_p50_s"] / found["one"]["ttft_p50_s"]
    if "kill" in found:
        for part in ("before_kill", "after_kill"):
            each[f"live_hit_share_{part}"] = found["kill"][part]
    return each


def live(sessions: int, turns: int, logs: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Measure all cases; return their raw figures and ratios."""
    raw, found = {}, {}
    for case in CASES:
        its = asyncio.run(measure(case, sessions, turns, logs))
        found[case.name] = figures(its)
        raw[case.name] = {"figures": found[case.name], "turns": [asdict(it) for it in its]}
    return raw, ratios(found)
