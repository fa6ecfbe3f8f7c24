"""Resync of a ledger that lost data: streams neither lose nor repeat tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count

import pytest

from everlift.errors import (
    Cancelled,
    DataLoss,
    LedgerUnavailable,
    Moved,
    QueueFull,
    RequestConflict,
    UnknownRequest,
)
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.leader.leader import dispatched
from router.ledger.base import Membership, NotQueued
from router.ledger.entry import Append, Appended, Entry, Reasserted, State, Stored
from router.ledger.memory.memory import MemoryLedger
from router.requests.request import LiveRequest
from tests.support.router.gateway_support import (
    CONFIG,
    TERM,
    Gateway,
    gateway_ledger,
    roll_back,
    saved,
    started_gateway,
    texts,
    until,
)

EOS, LENGTH = session_pb2.STOP_CAUSE_EOS, session_pb2.STOP_CAUSE_LENGTH


class LossyLedger(MemoryLedger):
    """Ledger whose server returns to an earlier state, and which records the calls of reassert."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.resent: list[str] = []
        self.num_active = self.most_at_once = 0
        self.is_away = False

    async def reassert(self, stored: Stored) -> tuple[Reasserted, Entry]:
        self.num_active += 1
        self.most_at_once = max(self.most_at_once, self.num_active)
        await asyncio.sleep(0)
        self.num_active -= 1
        if self.is_away:
            raise LedgerUnavailable("away")
        self.resent.append(stored.entry.request_id)
        return await super().reassert(stored)


@pytest.fixture
async def ledger() -> LossyLedger:
    return await gateway_ledger(LossyLedger())


@pytest.fixture
async def nothing(ledger: LossyLedger) -> dict[str, object]:
    return saved(ledger)


@pytest.fixture
async def gateway(ledger: LossyLedger) -> AsyncIterator[Gateway]:
    async with started_gateway(ledger) as gateway:
        await gateway.requests.generation_changed("first")
        yield gateway


class History:
    """Request of two choices, from its submission to its end, with a lost worker in between.

    A leader whose dispatch is refused notifies the gateway.
    """

    def __init__(self, gateway: Gateway, ledger: LossyLedger) -> None:
        self.gateway = gateway
        self.ledger = ledger
        self.live: LiveRequest
        self.steps: list[Callable[[], Awaitable[None]]] = [
            self.submit,
            self.dispatch,
            self.begin,
            self.end_a_choice,
            self.lose,
            self.dispatch,
            self.go_on,
            self.finish,
        ]
        self.saved = [saved(ledger)]

    async def run(self, steps: slice) -> None:
        for step in self.steps[steps]:
            await step()
            self.saved.append(saved(self.ledger))

    async def submit(self) -> None:
        self.live = await self.gateway.submit(n=2)

    async def dispatch(self) -> None:
        for _ in range(3):
            num_enqueued = len(self.gateway.line.enqueued)
            try:
                self.epoch = await self.gateway.dispatch()
                return
            except NotQueued:
                self.gateway.requests.stale("r")
                await until(lambda n=num_enqueued: len(self.gateway.line.enqueued) > n)
        raise AssertionError("never dispatched")

    async def begin(self) -> None:
        self.gateway.make(self.epoch, 0, "ab")
        await until(lambda: self.live.choices[0].stored == 2)

    async def end_a_choice(self) -> None:
        self.gateway.make(self.epoch, 0, "xyz", EOS, choice=1)
        await until(lambda: self.live.choices[1].is_complete)

    async def lose(self) -> None:
        num_enqueued = len(self.gateway.line.enqueued)
        self.gateway.requests.attempts.worker_lost("w")
        await until(lambda: len(self.gateway.line.enqueued) > num_enqueued)

    async def go_on(self) -> None:
        self.gateway.make(self.epoch, 2, "cd")
        await until(lambda: self.live.choices[0].stored == 4)

    async def finish(self) -> None:
        self.gateway.make(self.epoch, 4, "e", LENGTH)
        await until(lambda: self.live.is_over)


NUM_STEPS = 8


@pytest.mark.parametrize("is_noticed", [True, False])
@pytest.mark.parametrize("kept", range(NUM_STEPS))
async def test_stream_is_complete_after_any_ledger_rollback(
    ledger: LossyLedger, gateway: Gateway, kept: int, is_noticed: bool
) -> None:
    """The ledger is rolled back to the state after ``kept`` steps, from every later state."""
    for done in range(kept + 1, NUM_STEPS + is_noticed):
        history = History(gateway, ledger)
        await history.run(slice(done))
        roll_back(ledger, history.saved[kept])
        if is_noticed:
            await gateway.requests.generation_changed(f"{kept} {done}")
        await history.run(slice(done, None))
        pieces = await gateway.read(history.live)
        by_choice = [texts([piece for piece in pieces if piece.choice == c]) for c in range(2)]
        assert by_choice == ["abcde", "xyz"]
        offsets = [(piece.choice, piece.offset) for piece in pieces if piece.token_ids]
        assert len(set(offsets)) == len(offsets)
        stored = await ledger.read("r")
        assert stored.entry.state is State.FINISHED
        assert [bytes(choice.tokens) for choice in stored.choices] == [b"abcde", b"xyz"]
        assert not ledger._owned
        await gateway.requests.forget("r")
        assert gateway.requests.counters.failed == 0


async def test_resync_sends_nothing_to_an_intact_ledger(
    ledger: LossyLedger, gateway: Gateway
) -> None:
    history = History(gateway, ledger)
    await history.run(slice(3))
    await gateway.submit(request_id="waits")
    await gateway.requests.generation_changed("second")
    assert gateway.line.generations == ["first", "second"]
    assert not ledger.resent
    assert len(gateway.line.enqueued) == 2
    assert gateway.requests.ledger_status().rollbacks == 0


async def test_resync_informs_the_leader_after_the_ledger(
    ledger: LossyLedger, gateway: Gateway, nothing: dict[str, object]
) -> None:
    for number in range(20):
        await gateway.submit(request_id=f"r{number}")
    roll_back(ledger, nothing)
    ledger.is_away = True
    resync = asyncio.create_task(gateway.requests.generation_changed("second"))
    await until(lambda: ledger.num_active == 0 and ledger.most_at_once > 1)
    assert gateway.line.generations == ["first"]
    ledger.is_away = False
    await resync
    assert gateway.line.generations == ["first", "second"]
    assert sorted(ledger.resent) == sorted(f"r{number}" for number in range(20))
    assert ledger.most_at_once < 20
    arrivals = [waiting.arrived for waiting in gateway.line.enqueued]
    assert [(await ledger.get(f"r{n}")).arrived for n in range(20)] == arrivals


async def test_resync_sends_running_requests_before_queued(
    ledger: LossyLedger, gateway: Gateway, nothing: dict[str, object]
) -> None:
    await gateway.submit(request_id="waits")
    await gateway.submit(request_id="runs")
    await gateway.dispatch("runs")
    roll_back(ledger, nothing)
    await gateway.requests.generation_changed("second")
    assert ledger.resent == ["runs", "waits"]


async def test_rollback_is_counted_once_per_generation(
    ledger: LossyLedger, gateway: Gateway, nothing: dict[str, object]
) -> None:
    membership = Membership(0.0, "", "", 0, 0, generation="first")
    gateway.requests.ledger_answered(membership)
    for number in range(3):
        await gateway.submit(request_id=f"r{number}")
    for generation in ("second", "third"):
        roll_back(ledger, nothing)
        gateway.requests.ledger_answered(replace(membership, generation=generation))
        await gateway.requests.generation_changed(generation)
        gateway.requests.ledger_answered(replace(membership, generation=generation))
    assert gateway.requests.ledger_status().rollbacks == 2


async def test_rollback_before_the_next_heartbeat_is_counted_once(
    ledger: LossyLedger, gateway: Gateway, nothing: dict[str, object]
) -> None:
    first = Membership(0.0, "", "", 0, 0, generation="first")
    gateway.requests.ledger_answered(first)
    for number in range(2):
        await gateway.submit(request_id=f"r{number}")
    roll_back(ledger, nothing)
    await gateway.requests.cancel("r0")
    gateway.requests.ledger_answered(replace(first, generation="second"))
    await gateway.requests.generation_changed("second")
    assert gateway.requests.ledger_status().rollbacks == 1


async def test_rollback_before_a_restart_is_counted_separately(
    ledger: LossyLedger, gateway: Gateway, nothing: dict[str, object]
) -> None:
    """The first rollback does not change the generation, like FLUSHALL."""
    first = Membership(0.0, "", "", 0, 0, generation="first")
    gateway.requests.ledger_answered(first)
    for number in range(2):
        await gateway.submit(request_id=f"r{number}")
    roll_back(ledger, nothing)
    await gateway.requests.cancel("r0")
    gateway.requests.ledger_answered(first)
    roll_back(ledger, nothing)
    gateway.requests.ledger_answered(replace(first, generation="second"))
    await gateway.requests.generation_changed("second")
    assert gateway.requests.ledger_status().rollbacks == 2


@pytest.mark.parametrize("ending", ["cancelled", "refused"])
async def test_resync_restores_recent_ends(
    ledger: LossyLedger, gateway: Gateway, nothing: dict[str, object], ending: str
) -> None:
    await gateway.submit()
    epoch = await gateway.dispatch()
    if ending == "cancelled":
        await gateway.requests.cancel("r")
    else:
        gateway.make(epoch, 0, "", session_pb2.STOP_CAUSE_REFUSED, error="no")
        await until(lambda: not len(gateway.requests))
    entry = await ledger.get("r")
    assert entry.state.is_final
    roll_back(ledger, nothing)
    await gateway.requests.generation_changed("second")
    assert await ledger.get("r") == entry
    assert not ledger._owned


async def test_resync_omits_requests_that_ended_long_ago(
    ledger: LossyLedger, nothing: dict[str, object]
) -> None:
    gateway = Gateway(ledger, config=replace(CONFIG, reassert=0.0))
    await gateway.requests.generation_changed("first")
    await gateway.submit()
    await gateway.requests.cancel("r")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    roll_back(ledger, nothing)
    await gateway.requests.generation_changed("second")
    with pytest.raises(UnknownRequest):
        await ledger.get("r")


@pytest.mark.parametrize("ending", ["finished", "rejected", "forgotten"])
async def test_resync_restores_ends_after_a_long_outage(ledger: LossyLedger, ending: str) -> None:
    """Ends are kept while no heartbeat is answered, however long that takes."""
    async with started_gateway(ledger, replace(CONFIG, reassert=0.0)) as gateway:
        await gateway.requests.generation_changed("first")
        live = await gateway.submit()
        epoch = await gateway.dispatch() if ending == "finished" else 0
        before = saved(ledger)
        for _ in range(2):
            gateway.requests.ledger_failed()
        if ending == "finished":
            gateway.make(epoch, 0, "abc", EOS)
        elif ending == "rejected":
            gateway.requests.refused(session_pb2.Refusal(request_id="r", slug=QueueFull.slug))
        else:
            await gateway.requests.forget("r")
        await until(lambda: live.is_over and not len(gateway.requests))
        await asyncio.sleep(0.01)
        roll_back(ledger, before)
        gateway.requests.ledger_answered(Membership(0.0, "", "", 0, 0, generation="second"))
        await gateway.requests.generation_changed("second")
        if ending == "finished":
            entry = await ledger.get("r")
            assert (entry.state, entry.num_tokens) == (State.FINISHED, (3,))
        else:
            assert not ledger._records
        await asyncio.sleep(0.01)
        assert not (gateway.requests._recent.ended or gateway.requests._recent.erased)


@pytest.mark.parametrize("phase", ["running", "finishing", "over"])
async def test_resync_keeps_a_contradicting_end_of_the_ledger(
    ledger: LossyLedger, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """The ledger had no living gateway of the request, so another router ended it."""
    history = History(gateway, ledger)
    await history.run(slice(NUM_STEPS if phase == "over" else NUM_STEPS - 1))
    roll_back(ledger, history.saved[3])
    await ledger.end_request("r", State.CANCELLED, Cancelled.slug, "gone")
    if phase == "finishing":
        monkeypatch.setattr(ledger, "append", never)
        gateway.make(history.epoch, 4, "e", LENGTH)
    async with asyncio.timeout(1):
        await gateway.requests.generation_changed("second")
        if phase != "over":
            with pytest.raises(Cancelled, match="gone"):
                await gateway.read(history.live)
    assert (await ledger.get("r")).state is State.CANCELLED
    assert ledger.resent == ["r"]


async def never(appends: object) -> list[Appended]:
    raise LedgerUnavailable("away")


async def test_ended_request_cannot_be_cancelled_after_a_rollback(
    ledger: LossyLedger, gateway: Gateway
) -> None:
    history = History(gateway, ledger)
    await history.run(slice(NUM_STEPS))
    roll_back(ledger, history.saved[3])
    assert (await gateway.requests.cancel("r")).state is State.FINISHED
    await gateway.requests.generation_changed("second")
    assert (await ledger.get("r")).state is State.FINISHED
    roll_back(ledger, history.saved[3])
    await gateway.requests.forget("r")
    assert not ledger._records


async def test_ended_request_is_not_rerun_after_a_rollback(
    ledger: LossyLedger, gateway: Gateway, nothing: dict[str, object]
) -> None:
    history = History(gateway, ledger)
    await history.run(slice(NUM_STEPS))
    roll_back(ledger, nothing)
    assert await gateway.submit(n=2) is history.live
    with pytest.raises(RequestConflict):
        await gateway.submit(n=3)


async def test_reused_id_is_not_erased_again(ledger: LossyLedger, gateway: Gateway) -> None:
    history = History(gateway, ledger)
    await history.run(slice(NUM_STEPS))
    await gateway.requests.forget("r")
    other = Gateway(ledger, "other")
    await other.submit()
    entry = await other.requests.cancel("r")
    await gateway.requests.generation_changed("second")
    assert await ledger.get("r") == entry
    # The client means the request that has the id now.
    await gateway.requests.forget("r")
    assert not ledger._records


async def test_queued_request_keeps_unstored_tokens(
    ledger: LossyLedger, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger refuses appends to a queued request, so retries would never end."""
    history = History(gateway, ledger)
    await history.run(slice(2))
    await ledger.take_over("r", "gateway", "gateway")
    gateway.make(history.epoch, 0, "ab")
    await until(lambda: len(gateway.line.enqueued) == 2)
    offered: list[Append] = []
    append = ledger.append

    async def noted(appends: Sequence[Append]) -> list[Appended]:
        offered.extend(appends)
        return await append(appends)

    monkeypatch.setattr(ledger, "append", noted)
    await gateway.requests.generation_changed("second")
    await asyncio.sleep(0.02)
    assert not offered
    third = await gateway.dispatch()
    gateway.make(third, 2, "c", EOS)
    gateway.make(third, 0, "x", EOS, choice=1)
    pieces = await gateway.read(history.live)
    assert texts([piece for piece in pieces if piece.choice == 0]) == "abc"


async def test_rejected_request_stays_rejected_after_a_rollback(
    ledger: LossyLedger, gateway: Gateway
) -> None:
    """Otherwise, it would stay queued for days at a gateway that does not know it."""
    live = await gateway.submit()
    before = saved(ledger)
    gateway.requests.refused(session_pb2.Refusal(request_id="r", slug=QueueFull.slug))
    await until(lambda: live.is_over)
    for generation in ("second", "third"):
        roll_back(ledger, before)
        await gateway.requests.generation_changed(generation)
        assert not ledger._records
    # A new request with its id is another request.
    again = await gateway.submit()
    await gateway.requests.generation_changed("fourth")
    assert (await ledger.get("r")).arrived == again.arrived


async def test_rejected_request_resubmitted_elsewhere_is_kept(
    ledger: LossyLedger, gateway: Gateway
) -> None:
    live = await gateway.submit()
    gateway.requests.refused(session_pb2.Refusal(request_id="r", slug=QueueFull.slug))
    await until(lambda: live.is_over)
    await Gateway(ledger, "other").submit()
    await gateway.requests.generation_changed("second")
    assert (await ledger.get("r")).gateway == "other"


async def test_forgotten_request_stays_erased_after_a_rollback(
    ledger: LossyLedger, gateway: Gateway
) -> None:
    history = History(gateway, ledger)
    await history.run(slice(NUM_STEPS))
    before = saved(ledger)
    await gateway.requests.forget("r")
    for generation in ("second", "third"):
        await gateway.requests.generation_changed(generation)
        with pytest.raises(UnknownRequest):
            await ledger.get("r")
        roll_back(ledger, before)
    await gateway.requests.generation_changed("fourth")
    assert not ledger._records
    # A new request with its id is another request.
    again = await gateway.submit()
    assert not again.is_over


async def test_forgotten_request_of_a_dead_router_stays_erased(
    ledger: LossyLedger, gateway: Gateway
) -> None:
    await Gateway(ledger, "dead").submit()
    before = saved(ledger)
    await gateway.requests.forget("r")
    roll_back(ledger, before)
    await gateway.requests.generation_changed("second")
    assert not ledger._records


async def test_resync_with_diverged_tokens_is_data_loss(
    ledger: LossyLedger, gateway: Gateway
) -> None:
    history = History(gateway, ledger)
    await history.run(slice(3))
    ledger._records["r"].choices[0].tokens[:] = b"a?"
    ledger._records["r"].entry = replace(ledger._records["r"].entry, moves=1)
    await gateway.requests.generation_changed("second")
    with pytest.raises(DataLoss, match="other tokens"):
        await gateway.read(history.live)
    assert gateway.workers.aborted == [(history.epoch, ())]
    entry = await ledger.get("r")
    assert (entry.state, entry.error_slug) == (State.FAILED, DataLoss.slug)
    assert gateway.requests.counters.failed == 1


async def test_resync_divergence_of_an_erased_request_is_data_loss(
    ledger: LossyLedger, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(gateway, ledger)
    await history.run(slice(3))
    reassert = ledger.reassert

    async def diverged(stored: Stored) -> tuple[Reasserted, Entry]:
        answer = await reassert(stored)
        await ledger.end_request("r", State.CANCELLED, Cancelled.slug, "by its owner of that day")
        await ledger.erase("r")
        return answer

    monkeypatch.setattr(ledger, "reassert", diverged)
    ledger._records["r"].choices[0].tokens[:] = b"a?"
    ledger._records["r"].entry = replace(ledger._records["r"].entry, moves=1)
    await gateway.requests.generation_changed("second")
    with pytest.raises(DataLoss, match="other tokens"):
        async with asyncio.timeout(1):
            await gateway.read(history.live)
    assert gateway.workers.aborted == [(history.epoch, ())]
    assert not ledger._records


async def test_resync_leaves_requests_of_another_gateway(
    ledger: LossyLedger, gateway: Gateway
) -> None:
    history = History(gateway, ledger)
    await history.run(slice(3))
    await ledger.take_over("r", "other", "gateway")
    await gateway.requests.generation_changed("second")
    with pytest.raises(Moved):
        await gateway.read(history.live)
    assert (await ledger.get("r")).gateway == "other"
    assert gateway.workers.aborted == [(history.epoch, ())]


async def test_resync_waits_for_a_dispatch_in_flight(ledger: LossyLedger, gateway: Gateway) -> None:
    live = await gateway.submit()
    entry = await ledger.dispatch("r", "w", 7, TERM)
    await gateway.requests.generation_changed("second")
    assert await ledger.get("r") == entry
    gateway.requests.dispatched(
        session_pb2.Dispatched(request_id="r", worker_id="w", epoch=7, attempt=1, moves=entry.moves)
    )
    gateway.make(7, 0, "a", EOS)
    assert texts(await gateway.read(live)) == "a"


async def test_dispatch_during_a_takeback_is_aborted(
    ledger: LossyLedger, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dispatch arrives while the router takes the request back, because it was stale."""
    live = await gateway.submit()
    entry = await ledger.dispatch("r", "w", 7, TERM)
    take_over, is_asked, is_answered = ledger.take_over, asyncio.Event(), asyncio.Event()

    async def slow(*arguments: str) -> Stored:
        is_asked.set()
        await is_answered.wait()
        return await take_over(*arguments)

    monkeypatch.setattr(ledger, "take_over", slow)
    gateway.requests.stale("r")
    await is_asked.wait()
    gateway.requests.dispatched(dispatched(entry))
    assert [start.epoch for start in gateway.workers.started] == [7]
    is_answered.set()
    await until(lambda: len(gateway.line.enqueued) == 2)
    assert gateway.workers.aborted == [(7, ())]
    assert gateway.requests.running() == []
    gateway.requests.attempts.worker_lost("w")
    gateway.make(await gateway.dispatch(), 0, "a", EOS)
    assert texts(await gateway.read(live)) == "a"
    assert gateway.requests.running() == []
    assert (await ledger.get("r")).losses == 0


async def test_duplicate_dispatch_after_a_rollback_runs_once(
    ledger: LossyLedger, gateway: Gateway
) -> None:
    """The ledger lost the first dispatch, and a leader that did not know it dispatched again."""
    history = History(gateway, ledger)
    await history.run(slice(3))
    roll_back(ledger, history.saved[1])
    second = await gateway.dispatch()
    await until(lambda: len(gateway.line.enqueued) == 2)
    third = await gateway.dispatch()
    assert len({history.epoch, second, third}) == 3
    gateway.make(history.epoch, 2, "LATE")
    assert (await ledger.get("r")).epoch == third
    started = [(start.epoch, bytes(start.output_ids)) for start in gateway.workers.started]
    assert started[2:] == [(third, b"ab"), (third, b"")]
    gateway.make(third, 2, "c", EOS)
    gateway.make(third, 0, "x", EOS, choice=1)
    pieces = await gateway.read(history.live)
    assert [texts([p for p in pieces if p.choice == c]) for c in range(2)] == ["abc", "x"]


async def test_cancellation_holds_after_a_rollback(
    ledger: LossyLedger, gateway: Gateway, nothing: dict[str, object]
) -> None:
    history = History(gateway, ledger)
    await history.run(slice(3))
    roll_back(ledger, nothing)
    assert (await gateway.requests.cancel("r")).state is State.CANCELLED
    stored = await ledger.read("r")
    assert stored.entry.state is State.CANCELLED
    assert bytes(stored.choices[0].tokens) == b"ab"
    assert not ledger._owned


async def test_resync_restores_deadline_priority_and_logprobs(
    ledger: LossyLedger, gateway: Gateway, nothing: dict[str, object]
) -> None:
    scores = [pb.TokenLogprobs(logprob=-1.0)]
    live = await gateway.submit(
        timeout_s=60.0,
        priority=3,
        ttft_target_ms=500,
        sampling=pb.Sampling(logprobs=0, prompt_logprobs=0),
    )
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "a", logprobs=scores, prompt_offset=1, prompt_logprobs=scores)
    await until(lambda: live.choices[0].stored == 1)
    before = await ledger.read("r")
    roll_back(ledger, nothing)
    await gateway.requests.generation_changed("second")
    after = await ledger.read("r")
    assert after.explanation and not before.explanation
    assert replace(after, now=before.now, explanation=b"") == before


async def test_resync_includes_tokens_generated_meanwhile(
    ledger: LossyLedger, gateway: Gateway, nothing: dict[str, object]
) -> None:
    live = await gateway.submit(max_tokens=64)
    epoch = await gateway.dispatch()
    roll_back(ledger, nothing)
    resync = asyncio.create_task(gateway.requests.generation_changed("second"))
    for offset in count():
        gateway.make(epoch, offset, "x")
        await asyncio.sleep(0)
        if resync.done():
            break
    gateway.make(epoch, offset + 1, "y", EOS)
    assert texts(await gateway.read(live)) == "x" * (offset + 1) + "y"
    assert await gateway.stored() == (State.FINISHED, b"x" * (offset + 1) + b"y")
