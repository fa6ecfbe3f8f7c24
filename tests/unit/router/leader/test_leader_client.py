"""Stream of a gateway to a leader in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

import pytest

from everlift.transport import GRPC
from everlift.v1 import session_pb2 as pb
from router.admission.policy import Policy
from router.admission.request import Running, Waiting
from router.config import RouterConfig
from router.event_loop import now
from router.leader.client import LeaderClient
from router.leader.leader import Leader
from router.ledger.entry import Entry, State
from router.ledger.memory.memory import MemoryLedger
from tests.support.in_process import until

CONFIG = RouterConfig(model="fake", lease=0.5, heartbeat=0.05)
INFO = pb.WorkerInfo(worker_id="w", max_num_seqs=8, num_blocks=100)


class WillingLedger(MemoryLedger):
    """Ledger that permits every dispatch."""

    async def dispatch(self, request_id: str, worker: str, epoch: int, term: int) -> Entry:
        return Entry(request_id, State.RUNNING, request_id.partition("-")[0], 0.0, attempts=1)


def waits(request_id: str, gateway: str, arrived: float, *, accepted: bool = False) -> Waiting:
    return Waiting(request_id, gateway, arrived, prefill_tokens=0, max_tokens=0, accepted=accepted)


def runs(request_id: str, gateway: str, *, is_preempted: bool = False) -> Running:
    return Running(request_id, gateway, "w", 1, 0, 0, 0.0, 0, is_preempted=is_preempted)


class Gateway:
    """Gateway that creates its entries lazily during the handover, and counts them in ``made``."""

    def __init__(self, name: str, leader: Leader, total: int) -> None:
        self.name = name
        self.total = total
        self.made = 0
        self.received: list[str] = []
        self.queue_estimates: list[pb.QueueEstimate] = []
        self.line = LeaderClient(name, leader, GRPC)
        self.line.serve(self)

    def waiting(self, order: Policy) -> Iterator[Waiting]:
        for number in range(self.total):
            self.made += 1
            yield waits(f"{self.name}-{number}", self.name, float(number), accepted=True)

    def running(self) -> Iterator[Running]:
        yield runs(f"{self.name}-runs", self.name)

    def dispatched(self, message: pb.Dispatched) -> None:
        self.received.append(f"dispatched {message.request_id}")

    def refused(self, refusal: pb.Refusal) -> None:
        self.received.append(f"refused {refusal.request_id} {refusal.slug}")

    def withdrawn(self, message: pb.Withdrawn) -> None:
        self.received.append(f"withdrawn {message.request_id}")

    def on_queue_estimates(self, estimates: Iterable[pb.QueueEstimate]) -> None:
        self.queue_estimates.extend(estimates)

    def schedule_adoption(self, request_id: str) -> None:
        self.received.append(f"adopt {request_id}")

    def stale(self, request_id: str) -> None:
        self.received.append(f"stale {request_id}")

    def move(self, epoch: int) -> None:
        self.received.append(f"move {epoch}")

    def evict(self, eviction: pb.Eviction) -> None:
        self.received.append(f"evict {eviction.epoch} for {eviction.request_id}")


@asynccontextmanager
async def leading(name: str) -> AsyncIterator[Leader]:
    leader = Leader(CONFIG, name, "here:1", WillingLedger(now))
    run = asyncio.create_task(leader.run())
    await until(lambda: leader.is_leading)
    try:
        yield leader
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


@pytest.fixture
async def leader() -> AsyncIterator[Leader]:
    async with leading("g") as leader:
        yield leader


@pytest.fixture
async def gateway(leader: Leader) -> AsyncIterator[Gateway]:
    gateway = Gateway("g", leader, total=3)
    await gateway.line.follow("g", "here:1")
    yield gateway
    await gateway.line.close()


def leader_state(leader: Leader) -> tuple[int, int]:
    """Return the leader's numbers of queued and of running requests."""
    assert leader._leader_state is not None
    return leader._leader_state.queued, leader._leader_state.running


async def test_client_reports_all_requests_to_a_new_leader(
    leader: Leader, gateway: Gateway
) -> None:
    await until(lambda: leader_state(leader) == (3, 1))
    await until(lambda: gateway.line.queued == 3)


async def test_client_reports_changes_after_the_handover(leader: Leader, gateway: Gateway) -> None:
    await until(lambda: leader_state(leader) == (3, 1))
    gateway.line.enqueue(waits("g-new", "g", 9.0))
    gateway.line.withdraw("g-runs")
    await until(lambda: leader_state(leader) == (4, 0))
    gateway.line.report_running(runs("g-new", "g", is_preempted=True))
    await until(lambda: leader_state(leader) == (3, 1))


async def test_client_reports_the_restored_ledger_generation(
    leader: Leader, gateway: Gateway
) -> None:
    assert leader._leader_state is not None
    generations = leader._leader_state.generations
    await until(lambda: leader_state(leader) == (3, 1))
    generations.change("two", now() + 1000.0)
    gateway.line.report_generation("two")
    await until(lambda: generations.agree(now()))
    await gateway.line.close()
    await gateway.line.follow("g", "here:1")
    await until(lambda: "g" in generations._resyncs)
    assert generations._resyncs["g"].generation == "two"


async def test_client_delivers_every_leader_message(leader: Leader, gateway: Gateway) -> None:
    await until(lambda: leader_state(leader) == (3, 1))
    send = leader._server._sends["g"]
    full = pb.Refusal(request_id="a", slug="queue_full")
    evictions = [pb.Eviction(epoch=5, request_id="high")]
    send(pb.LeaderMessage(refusals=[full], adopt=["b"], stale=["c"], move=[4], evictions=evictions))
    expected = ["refused a queue_full", "adopt b", "stale c", "move 4", "evict 5 for high"]
    await until(lambda: gateway.received == expected)
    both = [pb.Refusal(request_id=name, slug="shed") for name in "de"]
    send(pb.LeaderMessage(refusals=both))
    await until(lambda: gateway.received[5:] == ["refused d shed", "refused e shed"])
    send(pb.LeaderMessage(queue_estimates=[pb.QueueEstimate(tokens_per_s=2.0)]))
    await until(lambda: pb.QueueEstimate(tokens_per_s=2.0) in gateway.queue_estimates)


async def test_line_closes_when_its_leader_resigns(leader: Leader, gateway: Gateway) -> None:
    await until(lambda: leader_state(leader) == (3, 1))
    leader._lease.lose()
    await until(lambda: not gateway.line.is_open)
    gateway.line.enqueue(waits("g-new", "g", 9.0))
    assert gateway.line._sender is None


async def test_silent_line_is_closed_and_reopened(
    leader: Leader, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: leader_state(leader) == (3, 1))
    assert not gateway.line.is_quiet
    send = leader._server.send
    monkeypatch.setattr(leader._server, "send", lambda *_: None)
    monkeypatch.setattr("router.leader.client._QUIET_S", 0.3)
    monkeypatch.setattr("router.leader.client._DEAD_S", 0.5)
    await until(lambda: gateway.line.is_quiet)
    assert gateway.line.is_open
    await until(lambda: not gateway.line.is_open)
    monkeypatch.setattr(leader._server, "send", send)
    await gateway.line.follow("g", "here:1")
    assert gateway.line.is_open
    await until(lambda: gateway.made == 6)


async def test_line_failure_is_logged(
    leader: Leader, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    await until(lambda: leader_state(leader) == (3, 1))

    def fail(request_id: str) -> None:
        raise ZeroDivisionError

    gateway.stale = fail  # type: ignore[method-assign]
    leader._server._sends["g"](pb.LeaderMessage(stale=["c"]))
    await until(lambda: not gateway.line.is_open)
    assert "ZeroDivisionError" in caplog.text


async def test_dispatch_does_not_wait_for_the_full_handover(leader: Leader) -> None:
    """The first dispatch precedes the report of a tenth of the queued requests."""
    gateways = [Gateway(f"g{number}", leader, total=20_000) for number in range(20)]
    leader.worker_up(INFO)
    state = pb.WorkerState(sequence_number=1)
    leader.worker_frame("w", pb.WorkerFrame(state=state))
    for gateway in gateways:
        # A client with the leader's own router id connects to it within the process.
        gateway.line._router_id = "g"
        await gateway.line.follow("g", "here:1")
        gateway.line._router_id = gateway.name
    await until(lambda: any(gateway.received for gateway in gateways))
    assert sum(gateway.made for gateway in gateways) < 40_000
    for gateway in gateways:
        await gateway.line.close()


async def test_client_reports_tpot_ratio_once_with_next_message(
    leader: Leader, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[float] = []
    receive = leader.receive

    def record(name: str, message: pb.GatewayMessage) -> None:
        reported.extend(it.ratio for it in message.tpot_ratios)
        receive(name, message)

    monkeypatch.setattr(leader, "receive", record)
    await until(lambda: leader_state(leader) == (3, 1))
    for ratio, name in ((0.5, "g-0"), (2.0, "g-1")):
        gateway.line.report_finished("m", ratio)
        gateway.line.withdraw(name)
        await until(lambda: reported[-1:] == [ratio])  # noqa: B023
    assert reported == [0.5, 2.0]


async def test_client_reports_worker_demand_to_each_new_leader(
    leader: Leader, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[int] = []
    receive = leader.receive

    def record(name: str, message: pb.GatewayMessage) -> None:
        reported.extend(demand.workers for demand in message.demands)
        receive(name, message)

    monkeypatch.setattr(leader, "receive", record)
    await until(lambda: leader_state(leader) == (3, 1))
    line, demand = gateway.line, pb.WorkerDemand(workers=2)
    line.report_demand(demand)
    line.report_demand(demand)
    await until(lambda: reported == [2])
    await line.close()
    await line.follow("g", "here:1")
    await until(lambda: reported == [2, 2])
    demand.workers = 3
    line.report_demand(demand)
    await until(lambda: reported == [2, 2, 3])


async def test_client_reports_session_outputs_once(leader: Leader, gateway: Gateway) -> None:
    reported: list[tuple[int, int]] = []
    receive = leader.receive

    def record(name: str, message: pb.GatewayMessage) -> None:
        reported.extend((it.session, it.tokens) for it in message.session_outputs)
        receive(name, message)

    leader.receive = record  # type: ignore[method-assign]
    await until(lambda: leader_state(leader) == (3, 1))
    line = gateway.line
    for tokens in (3, 4):
        line.report_session_output("m", 7, tokens)
    await until(lambda: reported == [(7, 3), (7, 4)])
    await line.close()
    line.report_session_output("m", 8, 5)
    await line.follow("g", "here:1")
    await until(lambda: leader_state(leader) == (3, 1))
    line.report_session_output("m", 9, 6)
    await until(lambda: reported == [(7, 3), (7, 4), (9, 6)])


async def test_client_reports_served_tokens_once_across_leaders(
    leader: Leader, gateway: Gateway
) -> None:
    reported: list[tuple[str, int, int]] = []
    receive = leader.receive

    def record(name: str, message: pb.GatewayMessage) -> None:
        reported.extend((it.tenant, it.priority, it.tokens) for it in message.served)
        receive(name, message)

    leader.receive = record  # type: ignore[method-assign]
    await until(lambda: leader_state(leader) == (3, 1))
    line = gateway.line
    line.report_served("acme/r", "m", 0, 3)
    line.report_served("acme/s", "m", 0, 4)
    line.report_served("acme/t", "m", 1, 5)
    line.report_served("nobodys", "m", 0, 6)
    line.flush_served()
    await until(lambda: sorted(reported) == [("acme", 0, 7), ("acme", 1, 5)])
    await line.close()
    line.report_served("other/r", "m", 0, 8)
    line.flush_served()
    await line.follow("g", "here:1")
    await until(lambda: ("other", 0, 8) in reported)
    line.flush_served()
    line.withdraw("g-runs")
    await until(lambda: leader_state(leader) == (3, 0))
    assert len(reported) == 3
