"""The leader over a memory ledger, with recorded gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from everlift.errors import LedgerUnavailable
from everlift.messages import OnDisconnect, Request
from everlift.sampling import SamplingParams
from everlift.v1 import inference_pb2, session_pb2
from router.admission.policy import Rules, policy_of
from router.admission.request import Waiting
from router.admission.workers import Departures
from router.config import RouterConfig
from router.event_loop import now
from router.leader.leader import Leader
from router.ledger.base import LoadReport, Membership
from router.ledger.entry import Entry, State
from router.ledger.memory.memory import MemoryLedger
from tests.support.in_process import until
from tests.support.ledger.ledgers import make_request
from tests.support.router.admission_support import paced

CONFIG = RouterConfig(model="fake", max_queued=2, lease=0.5, heartbeat=0.05)
INFO = session_pb2.WorkerInfo(worker_id="w", max_num_seqs=8, num_blocks=100)


class FlakyLedger(MemoryLedger):
    """Faulty ledger: ``ahead`` is added to its time, and campaigns of router ``paused`` hang."""

    is_away = False
    ahead = 0.0
    paused = ""
    loses_answers = loses_dispatches = loses_loads = 0
    #: requests whose shard does not answer
    hangs: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__(lambda: now() + self.ahead)
        self.terms: list[int] = []

    async def orphans(self, limit: int) -> list[str]:
        if self.is_away:
            raise LedgerUnavailable("away")
        return await super().orphans(limit)

    async def load(self) -> LoadReport | None:
        if self.loses_loads:
            self.loses_loads -= 1
            raise LedgerUnavailable("away")
        return await super().load()

    async def dispatch(self, request_id: str, worker: str, epoch: int, term: int) -> Entry:
        await until(lambda: request_id not in self.hangs, seconds=1000.0)
        entry = await super().dispatch(request_id, worker, epoch, term)
        if self.loses_dispatches:
            self.loses_dispatches -= 1
            raise LedgerUnavailable("the answer was lost")
        return entry

    async def lead(
        self, router: str, address: str, term: int, lease_s: float, *, is_new: bool = True
    ) -> bool:
        self.terms.append(term)
        await until(lambda: self.paused != router, seconds=1000.0)
        held = await super().lead(router, address, term, lease_s, is_new=is_new)
        if self.loses_answers:
            self.loses_answers -= 1
            raise LedgerUnavailable("the answer was lost")
        return held


@pytest.fixture
async def ledger() -> FlakyLedger:
    return FlakyLedger()


@asynccontextmanager
async def running(ledger: FlakyLedger, name: str = "router") -> AsyncIterator[Leader]:
    leader = Leader(CONFIG, name, "here:1", ledger)
    run = asyncio.create_task(leader.run())
    yield leader
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


@pytest.fixture
async def leader(ledger: FlakyLedger) -> AsyncIterator[Leader]:
    async with running(ledger) as leader:
        await until(lambda: leader.is_leading)
        yield leader


class Gateway:
    """Gateway without requests to hand over; ``is_handing_over``: it is not complete yet."""

    def __init__(
        self, leader: Leader, name: str, *, generation: str = "", is_handing_over: bool = False
    ) -> None:
        self.leader = leader
        self.name = name
        self.received: list[session_pb2.LeaderMessage] = []
        self.send = self.received.append
        leader._server.connect(name, self.send)
        self.say(generation=generation, is_complete=not is_handing_over)

    def say(self, **fields: object) -> None:
        message = session_pb2.GatewayMessage(**fields)  # type: ignore[arg-type]
        if self.leader._server._sends.get(self.name) is self.send:
            self.leader.receive(self.name, message)

    def enqueue(self, request_id: str, *, accepted: bool = False, **fields: object) -> None:
        waiting = session_pb2.Waiting(
            request_id=request_id,
            prompt_tokens=3,
            accepted=accepted,
            choices=1,
            **fields,  # type: ignore[arg-type]
        )
        self.say(enqueue=[waiting])

    def withdraw(self, request_id: str) -> None:
        self.say(withdraw=[request_id])

    def ids(self, field: str) -> list[str | int]:
        """Return the request ids or epochs in a field of the received messages."""
        entries = [it for message in self.received for it in getattr(message, field)]
        return [getattr(it, "request_id", it) for it in entries]


def say(leader: Leader, number: int = 1, running: tuple[str, ...] = (), **fields: object) -> None:
    """Send the leader a state of the worker."""
    state = session_pb2.WorkerState(
        sequence_number=number,
        running=[inference_pb2.RunningSequence(request_id=name) for name in running],
        **fields,  # type: ignore[arg-type]
    )
    leader.worker_frame("w", session_pb2.WorkerFrame(state=state))


def give_it_a_worker(leader: Leader) -> None:
    leader.worker_up(INFO)
    say(leader)


async def opened(ledger: MemoryLedger, request_id: str, gateway: str) -> None:
    request = Request(
        request_id=request_id,
        model="fake",
        fingerprint="",
        prompt_ids=(1,),
        max_tokens=3,
        sampling=SamplingParams(),
        stop=(),
        stop_token_ids=(),
        on_disconnect=OnDisconnect.CONTINUE,
        deadline=None,
        body_hash=b"",
    )
    await ledger.open(request, gateway)


async def test_leader_refuses_only_new_requests_when_full(leader: Leader) -> None:
    gateway = Gateway(leader, "g")
    for request_id in ("a", "b", "c"):
        gateway.enqueue(request_id)
    gateway.enqueue("b")
    gateway.enqueue("adopted", accepted=True)
    assert gateway.ids("refusals") == ["c"]
    assert leader.queued == 3


async def test_shed_request_is_reported_to_its_own_gateway(leader: Leader) -> None:
    low, high = Gateway(leader, "low"), Gateway(leader, "high")
    for request_id in ("a", "b"):
        low.enqueue(request_id)
    high.enqueue("c", priority=1)
    assert (low.ids("refusals"), high.ids("refusals")) == (["b"], [])
    assert [it.slug for message in low.received for it in message.refusals] == ["shed"]


async def test_leader_sends_queue_estimate_to_gateways(leader: Leader) -> None:
    gateway = Gateway(leader, "g")
    gateway.enqueue("a", priority=3)
    waits = [session_pb2.ClassWait(priority=3, work_tokens=3)]
    estimate = session_pb2.QueueEstimate(lowest=3, waits=waits, queued=1)
    await until(lambda: estimate in [it for m in gateway.received for it in m.queue_estimates])


async def test_leader_refuses_request_after_queue_ttl(ledger: FlakyLedger) -> None:
    leader = Leader(replace(CONFIG, queue_ttl=0.3), "router", "here:1", ledger)
    run = asyncio.create_task(leader.run())
    await until(lambda: leader.is_leading)
    gateway = Gateway(leader, "g")
    gateway.enqueue("a", arrived=now() + leader._ledger_offset_s)
    await until(lambda: gateway.ids("refusals") == ["a"])
    assert [it.slug for m in gateway.received for it in m.refusals] == ["queue_timeout"]
    assert leader.queued == 0
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


def arriving(arrived: float) -> Waiting:
    return Waiting("new", "g", arrived, prefill_tokens=3, max_tokens=0)


async def test_reserved_request_is_opened_as_dispatched(
    leader: Leader, ledger: FlakyLedger
) -> None:
    leader.on_heartbeat(Membership(now() + 500.0, "router", "here:1", 1, 0))
    gateway = Gateway(leader, "g")
    assert leader.reserve("g", arriving) is None
    give_it_a_worker(leader)
    assert leader.reserve("stranger", arriving) is None
    reservation = leader.reserve("g", arriving)
    assert reservation is not None and reservation.dispatch.worker == "w"
    assert reservation.placed.waiting.arrived == pytest.approx(now() + 500.0, abs=10.0)
    request = make_request("new")
    assert (await ledger.open(request, "g", None, reservation.dispatch)).entry.worker == "w"
    assert reservation.confirm()
    gateway.withdraw("new")
    await ledger.open(make_request("waits"), "g")
    gateway.enqueue("waits")
    await until(lambda: gateway.ids("dispatched") == ["waits"])


async def test_cancelled_reservation_frees_its_room(leader: Leader) -> None:
    Gateway(leader, "g")
    leader.worker_up(session_pb2.WorkerInfo(worker_id="w", max_num_seqs=1, num_blocks=100))
    say(leader, num_running=1)
    reserved = []
    while (reservation := leader.reserve("g", arriving)) is not None:
        reserved.append(reservation)
    assert reserved
    reserved[0].cancel()
    assert leader.reserve("g", arriving) is not None


async def test_new_term_invalidates_reservations(leader: Leader) -> None:
    Gateway(leader, "g")
    give_it_a_worker(leader)
    reservation = leader.reserve("g", arriving)
    assert reservation is not None
    leader._start_term()
    assert not reservation.confirm()


async def test_reserve_fails_while_ledger_is_being_restored(leader: Leader) -> None:
    Gateway(leader, "g", generation="before")
    give_it_a_worker(leader)
    leader.on_heartbeat(Membership(now(), "router", "here:1", 1, 0, generation="after"))
    assert leader.reserve("g", arriving) is None


async def test_leader_writes_its_load_to_the_ledger(leader: Leader, ledger: FlakyLedger) -> None:
    Gateway(leader, "g").enqueue("a", predicted_tokens=9)
    async with asyncio.timeout(10.0):
        while (report := await ledger.load()) is None or report.load.queued != 1:
            await asyncio.sleep(0.01)
    assert report.load.queued_tokens == 12
    assert report.load.term == ledger.terms[-1]


async def test_replaced_gateway_gets_stale_and_cannot_withdraw(leader: Leader) -> None:
    old, new = Gateway(leader, "old"), Gateway(leader, "new")
    old.enqueue("r")
    new.enqueue("r")
    assert old.ids("stale") == ["r"]
    old.withdraw("r")
    assert leader.queued == 1


async def test_withdrawal_reports_queue_wait_once(leader: Leader) -> None:
    gateway = Gateway(leader, "g")
    gateway.enqueue("r")
    gateway.withdraw("r")
    gateway.withdraw("r")
    assert gateway.ids("withdrawn") == ["r"]


async def test_dispatch_is_sent_to_the_gateway_in_the_ledger(
    leader: Leader, ledger: FlakyLedger
) -> None:
    mistaken, owner = Gateway(leader, "mistaken"), Gateway(leader, "owner")
    await opened(ledger, "r", "owner")
    mistaken.enqueue("r")
    give_it_a_worker(leader)
    await until(lambda: owner.ids("dispatched") == ["r"])
    assert mistaken.ids("stale") == ["r"]
    assert not mistaken.ids("dispatched")


async def test_disconnected_gateway_is_dropped_and_ignored(leader: Leader) -> None:
    gateway = Gateway(leader, "g")
    gateway.enqueue("r")
    leader._server.disconnect("g", gateway.send)
    assert leader.queued == 0
    gateway.enqueue("late")
    assert leader.queued == 0


async def test_reconnected_gateway_survives_old_line_disconnect(leader: Leader) -> None:
    old = Gateway(leader, "g")
    old.enqueue("before")
    again = Gateway(leader, "g")
    again.enqueue("r")
    leader._server.disconnect("g", old.send)
    assert leader.queued == 1


# leadership
async def test_paused_leader_is_fenced_without_losing_requests(ledger: FlakyLedger) -> None:
    async with running(ledger, "old") as old:
        await until(lambda: old.is_leading)
        gateway = Gateway(old, "g")
        await opened(ledger, "r", "g")
        ledger.paused, ledger.ahead = "old", 10.0
        async with running(ledger, "new") as new:
            await until(lambda: new.is_leading)
            assert old.is_leading
            gateway.enqueue("r")
            give_it_a_worker(old)
            await until(lambda: not old.is_leading)
            assert any(message.resigned for message in gateway.received)
            assert (await ledger.get("r")).state is State.QUEUED
            followed = Gateway(new, "g")
            followed.enqueue("r", accepted=True)
            give_it_a_worker(new)
            await until(lambda: followed.ids("dispatched") == ["r"])
        assert not gateway.ids("dispatched")


async def test_campaign_starts_at_once_if_there_is_no_leader(
    ledger: FlakyLedger,
) -> None:
    await ledger.lead("old", "there:1", 1, lease_s=1000.0)
    async with running(ledger) as leader:
        leader._lease._config = replace(CONFIG, lease=1000.0, heartbeat=400.0)
        await until(lambda: len(ledger.terms) == 1)
        await ledger.resign(1)
        leader.on_heartbeat(
            Membership(now=0.0, leader="", leader_address="", term=0, workers_version=0)
        )
        await until(lambda: leader.is_leading)


async def test_back_off_yields_lead_while_another_replica_runs(
    ledger: FlakyLedger,
) -> None:
    async with running(ledger, "old") as old:
        await until(lambda: old.is_leading)
        term = old._lease.term
        await old.back_off()
        for _ in range(4):
            old._lease.campaign_now()
            await asyncio.sleep(CONFIG.heartbeat)
            assert not old.is_leading
        async with running(ledger, "new") as new:
            # The lease is resigned, so the other replica need not wait until it expires.
            await until(lambda: new.is_leading, seconds=CONFIG.lease / 2)
            await asyncio.sleep(CONFIG.lease)
            assert new.is_leading and not old.is_leading
        await until(lambda: old.is_leading)
        assert old._lease.term != term


async def test_unanswered_campaign_is_retried_with_the_same_term(
    ledger: FlakyLedger,
) -> None:
    """A campaign with another term would be refused until the router's own lease ends."""
    ledger.loses_answers = 2
    async with running(ledger) as leader:
        await until(lambda: leader.is_leading)
        assert len(set(ledger.terms)) == 1
        leader._lease.lose()
        await until(lambda: leader.is_leading)
        assert len(set(ledger.terms)) == 2


async def test_leader_resets_its_state_after_a_missed_term(
    ledger: FlakyLedger,
) -> None:
    """Otherwise, it would continue with the old queue."""
    async with running(ledger, "old") as old:
        await until(lambda: old.is_leading)
        term, leader_state = old._lease.term, old._leader_state
        ledger.paused, ledger.ahead = "old", 10.0
        assert await ledger.lead("new", "there:1", 7, lease_s=1000.0)
        await ledger.resign(7)
        ledger.paused = ""
        await until(lambda: old._leader_state not in (None, leader_state))
        assert old._lease.term not in (term, 7)
        assert ledger._term == old._lease.term


async def test_leader_continues_if_ledger_lost_its_term(
    leader: Leader, ledger: FlakyLedger
) -> None:
    leader_state, term = leader._leader_state, leader._lease.term
    ledger._leader, ledger._term = MemoryLedger(now)._leader, 0
    await until(lambda: ledger._term == term)
    assert leader._leader_state is leader_state


# ledger that restarted without its last second


async def test_dispatch_waits_until_all_gateways_restore_ledger(
    leader: Leader, ledger: FlakyLedger
) -> None:
    gateways = [Gateway(leader, "a"), Gateway(leader, "b")]
    give_it_a_worker(leader)
    leader.on_heartbeat(Membership(0.0, "router", "here:1", 1, 0, generation="two"))
    await opened(ledger, "r", "a")
    gateways[0].enqueue("r")
    gateways[0].say(generation="two")
    await asyncio.sleep(CONFIG.lease / 4)
    assert not gateways[0].ids("dispatched")
    gateways[1].say(generation="two")
    await until(lambda: gateways[0].ids("dispatched") == ["r"])


async def test_lost_term_is_rewritten_before_dispatch(leader: Leader, ledger: FlakyLedger) -> None:
    gateway = Gateway(leader, "g", generation="two")
    give_it_a_worker(leader)
    await opened(ledger, "r", "g")
    term = leader._lease.term
    ledger._term = 1
    leader.on_heartbeat(Membership(0.0, "router", "here:1", 1, 0, generation="two"))
    gateway.enqueue("r")
    await until(lambda: gateway.ids("dispatched") == ["r"])
    assert leader.is_leading and ledger._term == term


# order and capacity


async def test_leader_waits_for_known_gateway_up_to_a_limit(
    ledger: FlakyLedger,
) -> None:
    await ledger.heartbeat("frozen", "there:2", lease_s=1000.0)
    await opened(ledger, "r", "g")
    async with running(ledger) as leader:
        await until(lambda: leader.is_leading)
        gateway = Gateway(leader, "g")
        gateway.enqueue("r")
        give_it_a_worker(leader)
        await asyncio.sleep(CONFIG.heartbeat)
        assert not gateway.ids("dispatched")
        await until(lambda: gateway.ids("dispatched") == ["r"])


async def test_hanging_shard_delays_no_other_dispatch(leader: Leader, ledger: FlakyLedger) -> None:
    gateway = Gateway(leader, "g")
    ledger.hangs = frozenset({"stuck"})
    for number, name in enumerate(("stuck", "a", "b")):
        await opened(ledger, name, "g")
        gateway.enqueue(name, accepted=True, arrived=float(number))
    give_it_a_worker(leader)
    await until(lambda: gateway.ids("dispatched") == ["a", "b"])
    await opened(ledger, "c", "g")
    gateway.enqueue("c", accepted=True, arrived=3.0)
    await until(lambda: gateway.ids("dispatched") == ["a", "b", "c"])
    ledger.hangs = frozenset()
    await until(lambda: gateway.ids("dispatched") == ["a", "b", "c", "stuck"])


async def test_dispatches_in_flight_are_bounded(
    leader: Leader, ledger: FlakyLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.leader.leader.DISPATCHES_AT_ONCE", 2)
    monkeypatch.setattr("router.leader.leader._MAX_RETRYING", 1)
    gateway = Gateway(leader, "g")
    names = ["a", "b", "c", "d"]
    for name in names:
        await opened(ledger, name, "g")
        gateway.enqueue(name, accepted=True)
    ledger.hangs = frozenset(names)
    give_it_a_worker(leader)
    await until(lambda: leader.queued == 2)
    await asyncio.sleep(2 * CONFIG.heartbeat)
    assert leader.queued == 2
    ledger.hangs = frozenset()
    await until(lambda: sorted(gateway.ids("dispatched")) == names)
    assert (leader._num_in_flight, leader._num_retrying) == (0, 0)


async def test_dispatch_is_retried_after_a_lost_answer(leader: Leader, ledger: FlakyLedger) -> None:
    gateway = Gateway(leader, "g")
    await opened(ledger, "r", "g")
    ledger.loses_dispatches = 1
    gateway.enqueue("r")
    give_it_a_worker(leader)
    await until(lambda: gateway.ids("dispatched") == ["r"])
    assert (leader._num_in_flight, leader._num_retrying) == (0, 0)


async def test_dispatch_with_unexpected_error_ends_the_leader(
    ledger: FlakyLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ledger, "dispatch", fail)
    leader = Leader(CONFIG, "router", "here:1", ledger)
    run = asyncio.create_task(leader.run())
    await until(lambda: leader.is_leading)
    Gateway(leader, "g").enqueue("r")
    give_it_a_worker(leader)
    with pytest.raises(ExceptionGroup) as raised:
        await run
    assert raised.group_contains(ZeroDivisionError)


async def test_dispatch_for_disconnected_gateway_is_not_tracked(
    leader: Leader, ledger: FlakyLedger
) -> None:
    gateway = Gateway(leader, "g")
    await opened(ledger, "r", "g")
    ledger.hangs = frozenset({"r"})
    gateway.enqueue("r")
    give_it_a_worker(leader)
    await until(lambda: leader.queued == 0)
    leader._server.disconnect("g", gateway.send)
    ledger.hangs = frozenset()
    await until(lambda: not leader._num_in_flight)
    assert (await ledger.get("r")).state is State.RUNNING
    assert leader._leader_state is not None and leader._leader_state.running == 0


async def test_eviction_is_sent_after_successful_dispatch(
    leader: Leader, ledger: FlakyLedger
) -> None:
    gateway, other = Gateway(leader, "g"), Gateway(leader, "other")
    leader.worker_up(session_pb2.WorkerInfo(worker_id="w", max_num_seqs=1, num_blocks=100))
    say(leader, running=("low",), num_running=1, num_waiting=2, blocks_used=9)
    low = session_pb2.Running(request_id="low", worker_id="w", epoch=5, known_tokens=9, choices=1)
    other.say(running=[low])
    await opened(ledger, "high", "g")
    gateway.enqueue("high", priority=1, ttft_deadline=ledger._clock() + 0.3)
    leader.on_heartbeat(Membership(ledger._clock(), "router", "here:1", 1, 0))
    await until(lambda: other.ids("evictions") == ["high"])
    assert (await ledger.get("high")).state is State.RUNNING


async def test_preempted_request_is_moved_to_worker_with_room(leader: Leader) -> None:
    gateway = Gateway(leader, "g")
    leader.worker_up(INFO)
    say(leader, num_running=8, blocks_used=100)
    view = leader.view("w")
    assert view is not None
    view.throughput = paced()
    empty = session_pb2.WorkerInfo(worker_id="empty", max_num_seqs=8, num_blocks=100)
    leader.worker_up(empty)
    state = session_pb2.WorkerState(sequence_number=1)
    leader.worker_frame("empty", session_pb2.WorkerFrame(state=state))
    preempted = session_pb2.Running(
        request_id="r",
        worker_id="w",
        epoch=5,
        known_tokens=9,
        moves_left=1,
        preempted=True,
        choices=1,
    )
    gateway.say(running=[preempted])
    await until(lambda: gateway.ids("move") == [5])


@pytest.fixture
def without_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.leader.leader.TICK_S", 1000.0)


@pytest.mark.usefixtures("without_ticks")
async def test_wait_for_a_prefix_ends_without_any_message(
    leader: Leader, ledger: FlakyLedger
) -> None:
    gateway, chunks = Gateway(leader, "g"), list(range(1, 5))
    for worker_id, num_running in (("warm", 8), ("cold", 0)):
        leader.worker_up(session_pb2.WorkerInfo(worker_id=worker_id, max_num_seqs=8, num_blocks=99))
        state = session_pb2.WorkerState(
            sequence_number=1, num_running=num_running, num_waiting=num_running
        )
        stored = chunks if worker_id == "warm" else []
        frame = session_pb2.WorkerFrame(state=state, stored_chunks=stored)
        leader.worker_frame(worker_id, frame)
        view = leader.view(worker_id)
        assert view is not None
        view.throughput, view.departures = paced(tokens_per_s=10_000.0), Departures(per_s=300.0)
    await opened(ledger, "r", "g")
    waiting = session_pb2.Waiting(
        request_id="r", prompt_tokens=1025, chunks=chunks, choices=1, accepted=True
    )
    gateway.say(enqueue=[waiting])
    state = leader._leader_state
    assert state is not None
    await until(lambda: state.queue("")._queue.num_parked == 1)
    await until(lambda: gateway.ids("dispatched") == ["r"])
    [message] = [it for message in gateway.received for it in message.dispatched]
    assert message.worker_id == "cold"


# orphans


async def test_outage_gives_renewals_priority_over_orphans(
    leader: Leader, ledger: FlakyLedger
) -> None:
    gateway, sweep = Gateway(leader, "g"), leader._sweep
    await ledger.heartbeat("g", "there:1", lease_s=1000.0)
    await opened(ledger, "r", "dead")
    await until(lambda: gateway.ids("adopt") == ["r"])
    sweep._assigned_until.clear()
    gateway.received.clear()
    ledger.is_away = True
    await until(lambda: sweep._paused_until > now())
    ledger.is_away = False
    held_until = sweep._paused_until
    await until(lambda: gateway.ids("adopt"))
    assert now() > held_until


async def test_orphans_without_a_gateway_wait_for_one(leader: Leader, ledger: FlakyLedger) -> None:
    await opened(ledger, "r", "dead")
    await until(lambda: now() > leader._sweep._paused_until)
    await asyncio.sleep(3 * CONFIG.heartbeat)
    await ledger.heartbeat("g", "there:1", lease_s=1000.0)
    gateway = Gateway(leader, "g")
    await until(lambda: gateway.ids("adopt") == ["r"])


async def test_frozen_gateway_adopts_no_orphans(leader: Leader, ledger: FlakyLedger) -> None:
    """The gateway's stream is open, but its lease has ended; another gateway gets its requests."""
    living, frozen = Gateway(leader, "living"), Gateway(leader, "frozen")
    await ledger.heartbeat("living", "there:1", lease_s=1000.0)
    for request_id in ("a", "b"):
        await opened(ledger, request_id, "frozen")
        frozen.enqueue(request_id)
    await until(lambda: len(living.ids("adopt")) == 2)
    assert any(message.resigned for message in frozen.received)
    assert not frozen.ids("adopt")
    assert leader.queued == 0


def rules(order: str, max_queued: int = CONFIG.max_queued) -> Rules:
    return Rules.of(replace(CONFIG, order=order, max_queued=max_queued))


async def test_leader_applies_rules_while_leading(leader: Leader) -> None:
    gateway = Gateway(leader, "g")
    gateway.enqueue("a", arrived=1.0)
    gateway.enqueue("b", arrived=2.0, deadline=9.0)
    leader.apply_rules(rules("deadline", 3))
    leader_state = leader._leader_state
    assert leader_state is not None
    queue = leader_state.queue("")
    await until(lambda: queue._queue.peek().request_id == "b")
    for request_id in ("c", "d"):
        gateway.enqueue(request_id)
    await until(lambda: gateway.ids("refusals") == ["d"])


async def test_tpot_target_is_passed_to_placement_at_once(leader: Leader) -> None:
    leader.apply_rules(replace(rules("fifo"), tpot_target=0.05))
    assert leader._placements[""].tpot_target == 0.05


async def test_new_leader_starts_with_the_current_rules(ledger: FlakyLedger) -> None:
    leader = Leader(CONFIG, "next", "here:1", ledger)
    leader.apply_rules(rules("deadline"))
    run = asyncio.create_task(leader.run())
    await until(lambda: leader.is_leading)
    assert leader._leader_state is not None and leader._leader_state.queue("")._order == policy_of(
        "deadline", CONFIG
    )
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_last_of_consecutive_rule_changes_holds(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.admission.queue._REORDER_BATCH", 1)
    gateway = Gateway(leader, "g")
    leader.apply_rules(rules("deadline", 1000))
    await until(
        lambda: (
            leader._leader_state and leader._leader_state.queue("")._bounds.rules.max_queued == 1000
        )
    )
    leader.apply_rules(rules("fifo", 1000))
    for number in range(100):
        gateway.enqueue(f"r{number}", arrived=float(number), deadline=1000.0 - number)
    leader.apply_rules(rules("deadline", 1000))
    await asyncio.sleep(0)
    leader.apply_rules(rules("fifo", 999))
    leader_state = leader._leader_state
    assert leader_state is not None
    queue = leader_state.queue("")
    await until(lambda: queue._bounds.rules.max_queued == 999)
    await until(lambda: queue._order == policy_of("fifo", CONFIG))
    assert queue._queue.peek().request_id == "r0"


# fair share of tenants


@asynccontextmanager
async def leading(ledger: FlakyLedger, name: str) -> AsyncIterator[Leader]:
    """Run a leader that distinguishes tenants."""
    leader = Leader(CONFIG, name, "here:1", ledger, lambda tenant: 1.0)
    run = asyncio.create_task(leader.run())
    await until(lambda: leader.is_leading)
    yield leader
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def counters(ledger: FlakyLedger) -> dict[str, float]:
    report = await ledger.load()
    return {it.tenant: it.counter for it in report.load.models[""].services} if report else {}


async def test_next_leader_recalls_tenant_service_counters(ledger: FlakyLedger) -> None:
    served = [session_pb2.ServedTokens(tenant="much", tokens=500)]
    async with leading(ledger, "one") as leader:
        gateway = Gateway(leader, "g")
        for name in ("much/1", "little/1"):
            gateway.enqueue(name, accepted=True)
        gateway.say(served=served)
        expected = {"much": 1000.0}
        async with asyncio.timeout(20.0):
            while await counters(ledger) != expected:
                await asyncio.sleep(0.01)
    async with leading(ledger, "two") as leader:
        gateway = Gateway(leader, "g", is_handing_over=True)
        for number, name in enumerate(("much/1", "much/2", "little/1", "new/1")):
            await ledger.open(make_request(name), "g")
            gateway.enqueue(name, accepted=True, arrived=float(number))
        gateway.say(is_complete=True)
        assert leader._leader_state is not None
        await until(lambda: leader._leader_state.has_restored_counters)
        give_it_a_worker(leader)
        await until(lambda: len(gateway.ids("dispatched")) == 4)
        assert gateway.ids("dispatched") == ["little/1", "new/1", "much/1", "much/2"]


async def test_leader_does_not_overwrite_an_unread_load_report(ledger: FlakyLedger) -> None:
    async with leading(ledger, "one") as leader:
        Gateway(leader, "g").say(
            served=[session_pb2.ServedTokens(tenant="much", tokens=500)],
            enqueue=[session_pb2.Waiting(request_id="little/1", choices=1)],
        )
        async with asyncio.timeout(20.0):
            while await counters(ledger) != {"much": 1000.0}:
                await asyncio.sleep(0.01)
    ledger.loses_loads = 3
    async with leading(ledger, "two") as leader:
        await until(lambda: leader._leader_state and leader._leader_state.has_restored_counters)
        assert ledger.loses_loads == 0
        assert await counters(ledger) == {"much": 1000.0}
