"""Cluster under load and random faults for SOAK_MINUTES (default 30).

No request is lost, no token is repeated, and every answer equals that of the undisturbed cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.report import machine
from cluster.chaos.check import Result, check
from cluster.chaos.fault_generator import NAMES
from cluster.chaos.run import Injection
from cluster.chaos.view import injections_table, result_table
from cluster.config import Config, load
from cluster.local.processes import ProcessCluster
from cluster.ray.ray_cluster import RayCluster
from everlift import AsyncClient
from everlift.errors import UnknownRequest
from router.ledger.embedded.embedded import running_url
from router.ledger.entry import Event
from router.ledger.redis.redis_ledger import RedisLedger, connect
from tests.soak.clients import Crowd, Seen
from tests.soak.duration import minutes
from tests.soak.faults import Faults
from tests.soak.pool import Answer, Pool, Task, make_pool
from tests.soak.times import (
    LEADERS,
    SILENCING,
    detections,
    next_tokens,
    of_workers_alone,
    p,
    struck,
    written,
)
from tests.support.free_port import free_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

_MINUTES = 30.0
#: Share of the duration for the soaks under Ray and with kills only, which take at least a minute.
_PART = 1 / 6
#: Seconds between two kills in the soak with kills of workers only.
_KILL_EVERY_S = 2.0
_POOL = 240
_LOAD = 0.7
_CALIBRATION_S = 15.0
_AT_ONCE = 32
_SEED = 4
_SUMMED = ("requests", "faults", "tokens", "lost", "repeated", "wrong")
_TIMES = ("detection_s_p99", "next_token_s_p99")
_SETTINGS = [
    "chaos=true",
    "worker.dtype=float32",
    "worker.kv_cache_mib=64",
    "worker.num_threads=1",
]


Figures = dict[str, Any]
#: Tokens by choice, and events, of a request in the ledger.
Stored = tuple[tuple[tuple[int, ...], ...], tuple[Event, ...]]


@dataclass(frozen=True)
class Outcome:
    """Result of a soak."""

    rate: float
    seconds: float
    seen: Sequence[Seen]
    log: Sequence[Injection]
    result: Result
    stored: dict[str, Stored]

    @property
    def lost(self) -> list[Seen]:
        return [each for each in self.seen if each.is_lost]

    @property
    def wrong(self) -> list[Seen]:
        return [each for each in self.seen if each.is_wrong]

    @property
    def unlike_ledger(self) -> list[Seen]:
        """Requests of which the client has other tokens than the ledger."""
        return [
            each
            for each in self.seen
            if each.answer is not None and self.stored[each.request_id][0] != each.answer.tokens
        ]


async def test_process_cluster_survives_random_faults(tmp_path: Path) -> None:
    places = [
        "router.port=0",
        "router.http_port=0",
        "num_routers=2",
        "num_workers=3",
        f"state_dir={tmp_path}",
    ]
    config = load(None, {}, [*_SETTINGS, *places])
    async with ProcessCluster(config, revive=True) as cluster:
        outcome = await _soak(cluster.addresses, config, minutes(_MINUTES) * 60, (2.0, 5.0))
    _report("processes", config, outcome)
    _check(outcome)


async def test_process_cluster_survives_worker_kills(tmp_path: Path) -> None:
    """A worker is killed every two seconds; the ledger is never disturbed."""
    places = [
        "router.port=0",
        "router.http_port=0",
        "num_routers=1",
        "num_workers=4",
        f"state_dir={tmp_path}",
    ]
    config = load(None, {}, [*_SETTINGS, *places])
    seconds = max(1.0, minutes(_MINUTES) * _PART) * 60
    every_s = _KILL_EVERY_S, _KILL_EVERY_S
    async with ProcessCluster(config, revive=True) as cluster:
        outcome = await _soak(cluster.addresses, config, seconds, every_s, ["kill worker"])
    _report("worker kills", config, outcome)
    _check(outcome)
    assert sum(each.unledgered for each in outcome.seen) == 0


@pytest.mark.filterwarnings("ignore")  # Ray and Serve emit warnings of their own.
async def test_ray_cluster_survives_random_faults(tmp_path: Path) -> None:
    # A replacement of a router must listen at the same port.
    places = [
        f"router.port={free_port()}",
        "router.http_port=0",
        "num_workers=3",
        f"state_dir={tmp_path}",
    ]
    config = load(None, {}, [*_SETTINGS, *places])
    seconds = max(1.0, minutes(_MINUTES) * _PART) * 60
    async with RayCluster(config) as cluster:
        outcome = await _soak(cluster.addresses, config, seconds, (4.0, 8.0))
    _report("ray", config, outcome)
    _check(outcome)


async def _soak(
    routers: list[str],
    config: Config,
    seconds: float,
    every_s: tuple[float, float],
    names: Sequence[str] = NAMES,
) -> Outcome:
    pool = await _recorded(routers, make_pool(_POOL, _SEED))
    rate = _LOAD * await _capacity(routers, pool)
    crowd, faults = Crowd(routers, pool, _SEED), Faults(routers, _SEED, names, every_s)
    began = time.monotonic()
    await asyncio.gather(crowd.run(rate, seconds), faults.run(seconds))
    took = time.monotonic() - began
    url = running_url(config.state_dir)
    assert url is not None
    ledger = await connect(replace(config.ledger, url=url))
    try:
        result = await check(ledger)
        stored = {each.request_id: await _stored(ledger, each.request_id) for each in crowd.seen}
    finally:
        await ledger.close()
    return Outcome(rate, took, crowd.seen, faults.log, result, stored)


async def _recorded(routers: list[str], tasks: Sequence[Task]) -> Pool:
    """Return the tasks with the answers of the undisturbed cluster."""
    turn = asyncio.Semaphore(_AT_ONCE)

    async def ask(task: Task) -> tuple[Task, Answer]:
        async with turn:
            return task, Answer.of(await task.ask(client))

    async with AsyncClient(routers) as client:
        return await asyncio.gather(*map(ask, tasks))


async def _capacity(routers: list[str], pool: Pool) -> float:
    """Return the requests per second of the undisturbed cluster, with _AT_ONCE at a time."""
    end, done = time.monotonic() + _CALIBRATION_S, 0

    async def go_on(number: int, client: AsyncClient) -> None:
        nonlocal done
        while time.monotonic() < end:
            task, expected = pool[number % len(pool)]
            assert Answer.of(await task.ask(client)) == expected, task
            done += 1
            number += _AT_ONCE

    began = time.monotonic()
    async with AsyncClient(routers) as client:
        await asyncio.gather(*(go_on(number, client) for number in range(_AT_ONCE)))
    return done / (time.monotonic() - began)


async def _stored(ledger: RedisLedger, request_id: str) -> Stored:
    """Return the tokens by choice and the events; nothing if the ledger lacks the request."""
    with suppress(UnknownRequest):
        choices = (await ledger.read(request_id)).choices
        return tuple(choice.tokens for choice in choices), await ledger.events(request_id)
    return (), ()


def _report(name: str, config: Config, outcome: Outcome) -> None:
    figures = _figures(config, outcome)
    if path := os.environ.get("SOAK_REPORT"):
        _write(Path(path), name, figures)
    console = Console(highlight=False, width=120)
    console.print(f"\nsoak: {name}", injections_table(outcome.log), result_table(outcome.result))
    console.print_json(json.dumps(figures))
    for each in [*outcome.lost, *outcome.wrong, *outcome.unlike_ledger][:10]:
        console.print(each, outcome.stored[each.request_id])


def _write(path: Path, name: str, figures: Figures) -> None:
    """Write the figures of all runs by name, their sums, and the times of the run "processes"."""
    known = json.loads(path.read_text())["runs"] if path.exists() else {}
    runs: dict[str, Figures] = known | {name: figures}
    sums = {key: sum(run[key] for run in runs.values()) for key in _SUMMED}
    times = {key: runs.get("processes", figures)[key] for key in _TIMES}
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine()} | sums | times | {"runs": runs}
    path.write_text(json.dumps(report, indent=2) + "\n")


def _figures(config: Config, outcome: Outcome) -> Figures:
    lines = written(config.state_dir / "logs")
    log = struck(outcome.log, lines)
    found = detections(log, lines)
    of_workers = [each for name in SILENCING for each in found.get(name, ())]
    events = {request_id: stored[1] for request_id, stored in outcome.stored.items()}
    gaps = next_tokens(log, outcome.seen, events)
    alone = next_tokens(of_workers_alone(log), outcome.seen, events)
    made = Counter(each.name for each in log)
    return {
        "minutes": round(outcome.seconds / 60, 2),
        "requests": len(outcome.seen),
        "requests_per_s": round(outcome.rate, 2),
        "tokens": sum(each.num_tokens for each in outcome.seen),
        "faults": made.total(),
        "faults_by_name": dict(sorted(made.items())),
        "faults_refused": len(outcome.log) - made.total(),
        "lost": len(outcome.lost),
        "repeated": sum(each.repeated for each in outcome.seen),
        "unledgered": sum(each.unledgered for each in outcome.seen),
        "wrong": len({each.request_id for each in [*outcome.wrong, *outcome.unlike_ledger]}),
        "ledger_findings": len(outcome.result.findings),
        "detections": len(of_workers),
        "detection_s_p50": p(50, of_workers),
        "detection_s_p99": p(99, of_workers),
        "detection_s_max": round(max(of_workers, default=0.0), 3),
        "new_leader_s_p99": p(99, found.get(LEADERS, [])),
        "streams_struck": len(gaps),
        "next_token_s_p50": p(50, gaps),
        "next_token_s_p99": p(99, gaps),
        "streams_struck_by_workers_alone": len(alone),
        "next_token_of_workers_alone_s_p99": p(99, alone),
    }


def _check(outcome: Outcome) -> None:
    assert outcome.log and outcome.seen
    assert [(each.request_id, each.error) for each in outcome.lost] == []
    assert [each.request_id for each in outcome.wrong] == []
    assert [each.request_id for each in outcome.unlike_ledger] == []
    assert sum(each.repeated for each in outcome.seen) == 0
    assert outcome.result.findings == ()
