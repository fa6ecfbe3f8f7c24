"""Helpers of the chaos tests: a cluster of real processes, its clients, and its logs.

    async with running(config(tmp_path)) as cluster, Load(cluster.addresses, 24) as load:
        await load.until(20)
        since = time.time()
        await cluster.kill_worker(0)
        await load.finish()
    load.check()
    report("worker killed", cluster, load, since)

Times are ``time.time()``, the clock of the logs.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import grpc

from cluster.config import Config
from cluster.groups import WorkerGroup
from cluster.local.processes import ProcessCluster
from cluster.local.replica import RouterReplica, WorkerReplica
from everlift import wire
from everlift.client.received_output import Chunk
from everlift.errors import EverliftError
from everlift.options import submission_message
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.config import RouterConfig
from router.ledger.config import LedgerConfig
from tests.support.router import retrying
from worker.config import FakeModel, WorkerConfig
from worker.runner.fake_runner import expected_tokens

FAKE = FakeModel(step_time=0.004)
COUNT = 150
#: On a busy machine a worker may be silent for a second. Tests in which silence is the fault set
#: another limit.
ROUTER: dict[str, Any] = {"port": 0, "http_port": 0, "grace": 20.0, "worker_silence": 5.0}
#: Limit of every wait.
TIMEOUT_S = 120.0


def config(
    state_dir: Path,
    *,
    routers: int = 1,
    workers: int = 2,
    ledger: LedgerConfig | None = None,
    router: dict[str, Any] | None = None,
    **worker: Any,
) -> Config:
    """Return the config of a cluster of fake workers, with these router and worker settings."""
    return Config(
        model="fake",
        num_routers=routers,
        num_workers=workers,
        state_dir=state_dir,
        router=RouterConfig(**ROUTER | (router or {})),
        worker=WorkerConfig(**{"model": "fake", "num_blocks": 1024, "fake": FAKE} | worker),
        ledger=ledger or LedgerConfig(),
    )


class Cluster(ProcessCluster):
    """Cluster of processes whose parts may have settings of their own.

    ``differing`` has settings of workers by their numbers, and ``ledgers`` the ledger's settings by
    the numbers of routers. ``announce_to`` returns the routers to which workers announce
    themselves, given all routers.
    """

    def __init__(self, config: Config, differing: dict[int, dict[str, Any]] | None = None) -> None:
        super().__init__(config)
        self.announce_to: Callable[[Sequence[str]], tuple[str, ...]] = tuple
        self.ledgers: dict[int, LedgerConfig] = {}
        self._differing = differing or {}

    def _router(self, index: int, ledger: LedgerConfig) -> RouterReplica:
        return super()._router(index, self.ledgers.get(index, ledger))

    def _worker(self, group: WorkerGroup, index: int) -> WorkerReplica:
        replica = super()._worker(group, index)
        launch = replica._launch
        worker = replace(launch.worker, **self._differing.get(index, {}))
        replica._launch = replace(launch, worker=worker, routers=self.announce_to(launch.routers))
        return replica

    @property
    def ledger_pid(self) -> int:
        """Process id of the ledger server that the cluster runs; 0 while there is none."""
        return self._ledger.pid

    @property
    def leader(self) -> int:
        """Index of the router that logged last that it leads."""
        said = [
            (event["ts"], index)
            for index in range(len(self.routers))
            for event in self.events(f"router-{index}")
            if event["event"] == "leadership acquired"
        ]
        return max(said)[1]

    def events(self, name: str = "router-*", since: float = 0.0) -> list[dict[str, Any]]:
        """Return the log events of the processes with this name, oldest first."""
        logs = sorted(self._log_dir.glob(f"{name}.log"))
        events = [json.loads(line) for log in logs for line in _lines(log)]
        return sorted((e for e in events if moment(e) >= since), key=moment)

    async def status(self, router: int = 0) -> pb.GetStatusResponse:
        async with retrying.client(self.routers[router].address) as client:
            return await client.status()

    async def restarted(self, router: int) -> None:
        """Stop a router gracefully, and start it again at the same address."""
        await self.routers[router].stop()
        await self.restart_router(router)

    async def idle(self) -> None:
        """Wait until no live worker holds a KV block or a sequence, so that nothing has leaked."""

        async def is_idle() -> bool:
            workers = [w for w in (await self.status()).workers if w.alive]
            return not any(w.num_running or w.num_waiting or w.blocks_used for w in workers)

        await until(is_idle)


def _lines(log: Path) -> Iterator[str]:
    """Yield the JSON lines of a log, without the last line, which may be incomplete."""
    *whole, _ = log.read_text(errors="replace").split("\n")
    yield from (line for line in whole if line.startswith("{"))


def moment(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["ts"]).timestamp()


@asynccontextmanager
async def running(
    config: Config, differing: dict[int, dict[str, Any]] | None = None
) -> AsyncIterator[Cluster]:
    async with Cluster(config, differing) as cluster:
        yield cluster


@contextmanager
def paused(pids: Iterable[int]) -> Iterator[None]:
    """Stop the processes by SIGSTOP; resume them by SIGCONT at the end."""
    pids = list(pids)
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def until(
    holds: Callable[[], Awaitable[object]] | Callable[[], object], seconds: float = TIMEOUT_S
) -> None:
    """Wait for a condition, which an EverliftError makes false. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not await _now(holds):
            await asyncio.sleep(0.01)


async def _now(holds: Callable[[], Any]) -> object:
    with suppress(EverliftError):
        answer = holds()
        return await answer if isinstance(answer, Awaitable) else answer
    return False


@dataclass
class Following:
    """Record of one client: its request, and the output that it received, in order."""

    request_id: str
    prompt: list[int]
    count: int
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    #: arrival time and epoch of each message with tokens
    pieces: list[tuple[float, int]] = field(default_factory=list)
    unledgered: int = 0
    timing: pb.Timing | None = None
    error: EverliftError | None = None

    def take(self, piece: pb.GenerateResponse | Chunk) -> None:
        if piece.token_ids:
            self.tokens.extend(piece.token_ids)
            self.offsets.extend(range(piece.offset, piece.offset + len(piece.token_ids)))
            self.pieces.append((time.time(), piece.epoch))
            self.unledgered += len(piece.token_ids) if piece.unledgered else 0

    def next_token(self, since: float) -> float | None:
        """Return the seconds from ``since`` to the first token of a new attempt.

        Return None if there is no such token, or none before ``since``.
        """
        before = {epoch for when, epoch in self.pieces if when <= since}
        later = [when for when, epoch in self.pieces if when > since and epoch not in before]
        return later[0] - since if before and later else None

    def silence(self, since: float) -> float:
        """Return the longest time between tokens, in seconds, that ended after ``since``."""
        times = [when for when, _ in self.pieces]
        gaps = pairwise(times)
        return max((later - when for when, later in gaps if later > since), default=0.0)

    def check(self, fake: FakeModel) -> None:
        """Check that the client has the undisturbed stream's tokens, each offset once."""
        assert self.error is None, f"{self.request_id}: {self.error!r}"
        assert self.offsets == list(range(self.count)), self.request_id
        assert self.tokens == expected_tokens(self.prompt, self.count, fake), self.request_id


class Load:
    """Concurrent clients with one request each, spread over the routers.

    All clients start at once; without ``addresses``, ``follow`` starts each of them. They use the
    client library or, if ``plain``, bare gRPC with one router, which neither drops repeated tokens
    nor retries.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        count: int,
        *,
        seed: int = 0,
        max_tokens: int = COUNT,
        fake: FakeModel = FAKE,
        plain: bool = False,
        **options: Any,
    ) -> None:
        rng = Random(seed)
        self._fake = fake
        self._plain = plain
        self._options = {"max_tokens": max_tokens, "temperature": 0.0} | options
        self._addresses = addresses
        self._tasks: list[asyncio.Task[None]] = []
        self.streams = [
            Following(f"load{seed}.{n}", _prompt(rng), max_tokens) for n in range(count)
        ]

    async def __aenter__(self) -> Load:
        if self._addresses:
            for at, stream in enumerate(self.streams):
                self.follow(stream, self._ordered(at))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ordered(self, at: int) -> list[str]:
        """Return the routers' addresses, rotated by ``at``."""
        addresses = deque(self._addresses)
        addresses.rotate(-at)
        return list(addresses)

    def follow(self, stream: Following, addresses: Sequence[str]) -> None:
        """Start a client's request; the first address is its router."""
        self._tasks.append(asyncio.create_task(self._follow(stream, addresses)))

    async def _follow(self, stream: Following, addresses: Sequence[str]) -> None:
        try:
            await (self._by_wire if self._plain else self._by_client)(stream, addresses)
        except EverliftError as error:
            stream.error = error

    async def _by_client(self, stream: Following, addresses: Sequence[str]) -> None:
        async with retrying.client(addresses) as client:
            pieces = client.generate(stream.prompt, request_id=stream.request_id, **self._options)
            async for chunk in pieces:
                stream.take(chunk)
            stream.timing = pieces.timing

    async def _by_wire(self, stream: Following, addresses: Sequence[str]) -> None:
        message = submission_message(
            stream.prompt, {"request_id": stream.request_id, **self._options}
        )
        async with grpc.aio.insecure_channel(addresses[0]) as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(message)
            while (piece := await wire.read(call)) is not None:
                stream.take(piece)
                stream.timing = piece.timing

    async def until(self, tokens: int, part: float = 0.5) -> None:
        """Wait until ``part`` of all clients, and at least one, have ``tokens`` tokens each."""
        enough = max(1.0, part * len(self.streams))
        await until(lambda: sum(len(s.tokens) >= tokens for s in self.streams) >= enough)

    async def finish(self) -> None:
        """Wait until every client has ended, with or without an error."""
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*self._tasks)

    def check(self) -> None:
        for stream in self.streams:
            stream.check(self._fake)

    @property
    def moved(self) -> list[Following]:
        """Clients whose tokens were generated in more than one attempt."""
        return [s for s in self.streams if s.timing is not None and s.timing.attempts > 1]


def _prompt(rng: Random) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randint(1, 100))]


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def report(title: str, cluster: Cluster, load: Load, since: float) -> None:
    """Print the cost of a fault for people to read (pytest -rP or -s)."""
    lost = [
        moment(event) - since
        for event in cluster.events(since=since - 0.05)
        if event["event"] in ("worker lost", "leadership acquired")
    ]
    again = [seconds for s in load.streams if (seconds := s.next_token(since)) is not None]
    silence = max((s.silence(since) for s in load.streams), default=0.0)
    print(
        f"{title}: noticed after {_seconds(lost[:1])}, "
        f"next token {_seconds(again)} ({len(again)} of {len(load.streams)} streams moved), "
        f"longest silence {silence:.2f} s"
    )


def _seconds(values: Sequence[float]) -> str:
    return f"{max(values):.2f} s" if values else "-"
