"""Injected faults: their targets, refusals and forwarding between routers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest

from cluster.chaos.run import Injection
from cluster.chaos.view import fault_message, outcome
from cluster.config import load
from everlift import wire
from everlift.errors import (
    ChaosForbidden,
    EverliftError,
    InvalidRequest,
    OutOfRange,
    UnknownWorker,
)
from everlift.v1 import chaos_pb2 as pb
from everlift.v1 import chaos_pb2_grpc, inference_pb2, session_pb2, session_pb2_grpc
from router.api.grpc.admin_server import ChaosServer
from router.auth.caller import OPEN
from router.config import RouterConfig
from router.faults.faults import Part, check_fault
from router.faults.injector import Chaos
from router.id_prefix import find_id
from router.internal_server import InternalServer
from router.ledger.memory.memory import MemoryLedger
from tests.support.ledger.ledgers import Clock

KILL, PAUSE = pb.FAULT_KIND_KILL, pb.FAULT_KIND_PAUSE
PARTITION, SLOW = pb.FAULT_KIND_PARTITION, pb.FAULT_KIND_SLOW
LEDGER_PID = 4711


@pytest.mark.parametrize(
    ("target", "peer", "fault"),
    [
        (Part.WORKER, None, {"kind": KILL, "rank": 1}),
        (Part.WORKER, None, {"kind": PAUSE, "seconds": 600}),
        (Part.WORKER, None, {"kind": SLOW, "seconds": 1, "factor": 10}),
        (Part.WORKER, Part.ROUTER, {"kind": PARTITION, "seconds": 5}),
        (Part.ROUTER, None, {"kind": KILL}),
        (Part.ROUTER, Part.LEDGER, {"kind": PARTITION, "seconds": 5}),
        (Part.LEDGER, None, {"kind": SLOW, "seconds": 5, "delay_s": 0.2}),
    ],
)
def test_check_fault_accepts_valid_faults(
    target: Part, peer: Part | None, fault: dict[str, float]
) -> None:
    check_fault(pb.Fault(**fault), target, peer, num_ranks=2 if target is Part.WORKER else 1)


@pytest.mark.parametrize(
    ("target", "peer", "fault", "error", "why"),
    [
        (Part.WORKER, None, {}, InvalidRequest, "one of kill, pause, partition and slow"),
        (Part.WORKER, None, {"kind": 9}, InvalidRequest, "one of kill"),
        (Part.WORKER, None, {"kind": PAUSE}, OutOfRange, "seconds"),
        (Part.WORKER, None, {"kind": PAUSE, "seconds": 601}, OutOfRange, "seconds"),
        (Part.WORKER, None, {"kind": PAUSE, "seconds": math.nan}, OutOfRange, "seconds"),
        (Part.WORKER, None, {"kind": SLOW, "seconds": 1, "factor": 0.5}, OutOfRange, "factor"),
        (Part.WORKER, None, {"kind": KILL, "rank": 2}, OutOfRange, "rank must be from 0 to 1"),
        (Part.LEDGER, None, {"kind": SLOW, "seconds": 1}, OutOfRange, "delay"),
        (Part.LEDGER, None, {"kind": KILL, "rank": 1}, InvalidRequest, "rank"),
        (
            Part.ROUTER,
            None,
            {"kind": SLOW, "seconds": 1},
            InvalidRequest,
            "only workers and the ledger can be slowed",
        ),
        (
            Part.ROUTER,
            Part.WORKER,
            {"kind": KILL},
            InvalidRequest,
            "peer applies only to a partition",
        ),
        (
            Part.WORKER,
            Part.LEDGER,
            {"kind": PARTITION, "seconds": 1},
            InvalidRequest,
            "a worker can be partitioned from a router, not from a ledger",
        ),
    ],
)
def test_check_fault_rejects_invalid_faults(
    target: Part, peer: Part | None, fault: dict[str, float], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        check_fault(pb.Fault(**fault), target, peer, num_ranks=2 if target is Part.WORKER else 1)


def test_find_id_accepts_a_unique_prefix() -> None:
    assert find_id("ab", ["abc", "b"]) == "abc"
    assert find_id("ab", ["ab", "abc"]) == "ab"
    assert find_id("c", ["abc"]) is None
    assert find_id("", ["abc"]) is None
    with pytest.raises(UnknownWorker, match="the id 'a' is ambiguous: it may be abc, abd"):
        find_id("a", ["abd", "abc"])


@pytest.mark.parametrize(
    ("assignment", "router", "worker"),
    [
        ("log_level=info", False, False),
        ("chaos=true", True, True),
        ("router.chaos=true", True, False),
        ("worker.chaos=true", False, True),
    ],
)
def test_chaos_setting_enables_routers_and_workers(
    assignment: str, router: bool, worker: bool
) -> None:
    config = load(None, {}, ["model=fake", assignment])
    assert (config.router.chaos, config.worker.chaos) == (router, worker)


# one router with recorded surroundings


class RecordedLedger(MemoryLedger):
    def __init__(self) -> None:
        super().__init__(Clock())
        self.disturbed: list[tuple[float, float]] = []

    def disturb(self, seconds: float, delay_s: float) -> None:
        self.disturbed.append((seconds, delay_s))

    async def process_id(self) -> int:
        return LEDGER_PID


@dataclass
class RecordedLink:
    info: session_pb2.WorkerInfo
    is_up: bool = True
    delays: list[float] = field(default_factory=list)

    def delay_messages(self, seconds: float) -> None:
        self.delays.append(seconds)


class RecordedSessions:
    def __init__(self, *workers: str) -> None:
        self.links = [
            RecordedLink(session_pb2.WorkerInfo(worker_id=each, tensor_parallel=1))
            for each in workers
        ]
        self.injected: list[tuple[str, pb.Fault]] = []

    def inject(self, worker_id: str, fault: pb.Fault) -> None:
        self.injected.append((worker_id, fault))


class RecordedProcesses:
    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []
        self.happened = asyncio.Event()

    def kill(self, pid: int) -> None:
        self._note("kill", pid)

    async def pause(self, pid: int, seconds: float) -> None:
        self._note("pause", pid, seconds)

    def _note(self, *what: object) -> None:
        self.done.append(what)
        self.happened.set()


@dataclass
class Led:
    leader_id: str = ""


class Place:
    """Chaos service of one router, with recorded sessions and processes."""

    def __init__(self, ledger: MemoryLedger, name: str, allowed: bool = True) -> None:
        self.ledger = ledger
        self.sessions = RecordedSessions("worker-1", "worker-2")
        self.heartbeat = Led()
        self.processes = RecordedProcesses()
        self.chaos = Chaos(
            RouterConfig(model="fake", chaos=allowed),
            name,
            ledger,
            self.sessions,  # type: ignore[arg-type]
            self.heartbeat,  # type: ignore[arg-type]
            processes=self.processes,
        )

    async def inject(self, kind: pb.FaultKind, target: str, **fields: object) -> str:
        return await self.chaos.inject(pb.Fault(kind=kind, target=target, **fields))  # type: ignore[arg-type]

    @property
    def delays(self) -> list[list[float]]:
        return [link.delays for link in self.sessions.links]


@pytest.fixture
async def ledger() -> RecordedLedger:
    ledger = RecordedLedger()
    await ledger.heartbeat("me", "m:1", 3600.0)
    return ledger


@pytest.fixture
def me(ledger: RecordedLedger) -> Place:
    return Place(ledger, "me")


async def test_chaos_disabled_forbids_every_fault(ledger: RecordedLedger) -> None:
    place = Place(ledger, "me", allowed=False)
    with pytest.raises(ChaosForbidden, match="everlift up --chaos"):
        await place.inject(KILL, "worker-1")
    with pytest.raises(ChaosForbidden):
        await place.chaos.apply(pb.Fault(kind=KILL, target="me"))
    assert (place.sessions.injected, place.processes.done) == ([], [])


async def test_inject_sends_a_worker_fault_under_its_full_id(me: Place) -> None:
    me.sessions.links[1].info.worker_id = "other"
    assert await me.inject(SLOW, "work", seconds=2, factor=3) == "worker-1"
    [(worker_id, fault)] = me.sessions.injected
    assert (worker_id, fault.target, fault.factor) == ("worker-1", "worker-1", 3.0)


async def test_inject_partition_resolves_the_peer_to_its_full_id(me: Place) -> None:
    await me.inject(PARTITION, "worker-2", seconds=2, peer="m")
    [(worker_id, fault)] = me.sessions.injected
    assert (worker_id, fault.peer) == ("worker-2", "me")


async def test_inject_rejects_an_ambiguous_prefix(me: Place, ledger: RecordedLedger) -> None:
    await ledger.heartbeat("worker-3", "w:3", 60.0)
    me.sessions.links.pop()
    with pytest.raises(UnknownWorker, match="is ambiguous"):
        await me.inject(KILL, "worker")
    assert await me.inject(KILL, "worker-1") == "worker-1"


async def test_inject_any_worker_picks_a_live_one(me: Place) -> None:
    me.sessions.links[0].is_up = False
    assert await me.inject(KILL, "any-worker") == "worker-2"


@pytest.mark.parametrize("target", ["nobody", "", "leader", "any-worker"])
async def test_inject_rejects_an_absent_target(me: Place, target: str) -> None:
    me.sessions.links.clear()
    with pytest.raises(UnknownWorker):
        await me.inject(KILL, target)


async def test_router_kills_and_pauses_its_own_process(me: Place) -> None:
    me.heartbeat.leader_id = "me"
    assert await me.inject(PAUSE, "leader", seconds=2) == "me"
    await me.processes.happened.wait()
    me.processes.happened.clear()
    assert await me.inject(KILL, "any-router") == "me"
    assert len(me.processes.done) == 1, "the answer comes first"
    await me.processes.happened.wait()
    (pause, pid, seconds), (kill, same) = me.processes.done
    assert (pause, seconds, kill, pid) == ("pause", 2.0, "kill", same)


async def test_inject_kill_ledger_kills_its_server_process(me: Place) -> None:
    assert await me.inject(KILL, "ledger") == "ledger"
    await me.processes.happened.wait()
    assert me.processes.done == [("kill", LEDGER_PID)]


@pytest.mark.parametrize(
    ("peer", "disturbed", "delays"),
    [
        ("", [(2.0, math.inf)], [[2.0], [2.0]]),
        ("ledger", [(2.0, math.inf)], [[], []]),
        ("worker-2", [], [[], [2.0]]),
    ],
)
async def test_router_partition_disturbs_ledger_and_workers(
    me: Place, ledger: RecordedLedger, peer: str, disturbed: list[object], delays: list[object]
) -> None:
    await me.inject(PARTITION, "me", seconds=2, peer=peer)
    assert (ledger.disturbed, me.delays) == (disturbed, delays)


async def test_inject_rejects_killing_a_ledger_without_a_server() -> None:
    plain = MemoryLedger(Clock())
    await plain.heartbeat("me", "m:1", 60.0)
    with pytest.raises(InvalidRequest, match="no server"):
        await Place(plain, "me").inject(KILL, "ledger")


# two routers


@pytest.fixture
async def other(ledger: RecordedLedger) -> AsyncIterator[Place]:
    """Yield another router, with its own internal address."""
    place = Place(RecordedLedger(), "other")
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    internal = InternalServer(None, None, place.chaos, None)  # type: ignore[arg-type]
    session_pb2_grpc.add_RouterInternalServicer_to_server(internal, server)
    await server.start()
    await ledger.heartbeat("other", f"127.0.0.1:{port}", 3600.0)
    yield place
    await server.stop(None)


async def test_inject_forwards_a_fault_to_its_router(me: Place, other: Place) -> None:
    assert await me.inject(PAUSE, "oth", seconds=1) == "other"
    await other.processes.happened.wait()
    assert (len(other.processes.done), me.processes.done) == (1, [])


async def test_inject_slow_ledger_reaches_every_router(
    me: Place, other: Place, ledger: RecordedLedger
) -> None:
    await me.inject(SLOW, "ledger", seconds=3, delay_s=0.2)
    assert (ledger.disturbed, other.ledger.disturbed) == ([(3.0, 0.2)], [(3.0, 0.2)])  # type: ignore[attr-defined]


async def test_inject_partitions_the_ledger_from_one_router(
    me: Place, other: Place, ledger: RecordedLedger
) -> None:
    await me.inject(PARTITION, "ledger", seconds=3, peer="other")
    assert (ledger.disturbed, other.ledger.disturbed) == ([], [(3.0, math.inf)])  # type: ignore[attr-defined]
    assert other.delays == [[], []]


async def test_inject_skips_a_dead_router_in_a_broadcast(
    me: Place, other: Place, ledger: RecordedLedger
) -> None:
    await ledger.heartbeat("dead", "127.0.0.1:1", 60.0)
    await me.inject(SLOW, "ledger", seconds=3, delay_s=0.2)
    assert len(ledger.disturbed) == 1
    with pytest.raises(EverliftError):
        await me.inject(KILL, "dead")


async def test_inject_returns_the_error_of_another_router(me: Place, other: Place) -> None:
    other.chaos._config = RouterConfig(model="fake")
    with pytest.raises(ChaosForbidden):
        await me.inject(KILL, "other")


# client and server


async def test_chaos_client_injects_faults_and_receives_statuses(me: Place) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_generic_rpc_handlers((ChaosServer(me.chaos).handlers(OPEN),))
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: chaos_pb2_grpc.ChaosAsyncStub = chaos_pb2_grpc.ChaosStub(channel)
        answer = await stub.Inject(pb.Fault(kind=KILL, target="worker-1"))
        call = stub.Inject(pb.Fault(kind=PAUSE, target="worker-1"))
        with pytest.raises(OutOfRange):
            await wire.answer(call, call)
    await server.stop(None)
    assert answer.target == "worker-1"


def test_done_describes_the_effect_of_a_fault() -> None:
    running = {"w1": 3, "w2": 0}

    def said(kind: pb.FaultKind.ValueType, target: str, **fields: float | str) -> str:
        return fault_message(pb.Fault(kind=kind, target="any", **fields), target, running)  # type: ignore[arg-type]

    handed_on = "killed worker w1; its 3 running sequences resume elsewhere"
    assert said(pb.FAULT_KIND_KILL, "w1") == handed_on
    assert said(pb.FAULT_KIND_KILL, "w2", rank=1) == "killed rank 1 of worker w2"
    assert said(pb.FAULT_KIND_KILL, "ledger") == "killed the ledger"
    assert said(pb.FAULT_KIND_PAUSE, "r", seconds=2.5) == "paused router r for 2.5 s"
    cut = said(pb.FAULT_KIND_PARTITION, "w1", seconds=5)
    assert cut == "cut worker w1 off from everything for 5 s"


def test_outcome_of_random_faults_counts_requests() -> None:
    log = [Injection("kill worker", 1.0, "w1"), Injection("kill worker", 2.0, "", "refused")]
    before = inference_pb2.GetStatusResponse(completed=5, migrated=1, failed=2)
    after = inference_pb2.GetStatusResponse(completed=9, migrated=4, failed=0)
    first, second = outcome(log, before, after).splitlines()
    assert first.startswith("1 faults injected;")
    assert first.endswith("4 completed, 3 migrated, 0 failed")
    assert second.startswith("`everlift chaos check`")
