"""The gateway's requests against a memory ledger, a recorded worker and a recorded queue."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from everlift.errors import (
    AttemptsExhausted,
    Cancelled,
    DeadlineExceeded,
    DeadlineUnmeetable,
    EverliftError,
    LedgerUnavailable,
    Moved,
    NoWorker,
    OffsetOutOfRange,
    QueueFull,
    QueueTimeout,
    RequestConflict,
    RetriedTooSoon,
    RouterStopping,
    Shed,
    UnknownModel,
    UnknownRequest,
)
from everlift.hashes import session_key
from everlift.request_id import unnamed_request_id
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.admission.policy import Fifo
from router.api.service import Inference
from router.auth.caller import ANYONE
from router.event_loop import now
from router.ledger.base import Membership, Opened
from router.ledger.entry import Append, Appended, Entry, State
from router.ledger.memory.memory import MemoryLedger
from router.requests import registry
from router.requests.request import Elsewhere, LiveRequest, Phase
from router.requests.timing import Journal
from tests.support.router.gateway_support import CONFIG, TERM, Gateway, texts, until


def _refusal(slug: str, retry_after_s: float | None = None) -> session_pb2.Refusal:
    """Return the leader's refusal of request r."""
    return session_pb2.Refusal(request_id="r", slug=slug, retry_after_s=retry_after_s)


FULL = _refusal(QueueFull.slug)
#: A minute of work or more is queued.
BUSY = session_pb2.QueueEstimate(
    model="fake", tokens_per_s=10.0, waits=[session_pb2.ClassWait(work_tokens=1000)]
)


def queue_of(queued: int, **fields: Any) -> session_pb2.QueueEstimate:
    return session_pb2.QueueEstimate(model="fake", queued=queued, **fields)


@pytest.fixture
async def ledger() -> MemoryLedger:
    ledger = MemoryLedger(time.monotonic)
    await ledger.lead("leader", "", TERM, 1000.0)
    await ledger.heartbeat("gateway", "here:1", 1000.0)
    return ledger


@pytest.fixture
async def gateway(ledger: MemoryLedger) -> AsyncIterator[Gateway]:
    gateway = Gateway(ledger)
    run = asyncio.create_task(gateway.requests.attempts.run())
    yield gateway
    await gateway.requests.stop(0.0)
    run.cancel()


async def test_tokens_pass_from_worker_to_ledger_to_client(gateway: Gateway) -> None:
    live = await gateway.submit()
    assert [w.request_id for w in gateway.line.enqueued] == ["r"]
    epoch = await gateway.dispatch()
    assert bytes(gateway.workers.started[0].prompt_ids) == b"hi"
    gateway.make(epoch, 0, "abc")
    gateway.make(epoch, 3, "d", session_pb2.STOP_CAUSE_LENGTH)
    pieces = await gateway.read(live)
    assert texts(pieces) == "abcd"
    assert pieces[0] == pb.GenerateResponse(request_id="r", prompt_tokens=2)
    assert pieces[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert pieces[-1].usage == pb.Usage(prompt_tokens=2, output_tokens=4)
    assert {piece.epoch for piece in pieces[1:]} == {epoch}
    assert await gateway.stored() == (State.FINISHED, b"abcd")


@pytest.mark.parametrize(
    ("request_id", "session_id", "session"),
    [
        ("r", "", 0),
        ("r", "s", session_key("", "s")),
        ("acme/r", "s", session_key("acme", "s")),
    ],
)
async def test_start_names_the_session_of_the_tenant(
    gateway: Gateway, request_id: str, session_id: str, session: int
) -> None:
    await gateway.submit(request_id=request_id, session_id=session_id, n=2)
    await gateway.dispatch(request_id)
    assert [start.session for start in gateway.workers.started] == [session] * 2


async def test_stop_string_truncates_text_before_the_append(gateway: Gateway) -> None:
    live = await gateway.submit(stop=["END"])
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "abE")
    gateway.make(epoch, 3, "NDxyz")
    pieces = await gateway.read(live)
    assert texts(pieces) == "ab"
    assert pieces[-1].usage.output_tokens == 5
    assert await gateway.stored() == (State.FINISHED, b"abEND")
    assert gateway.workers.aborted == [(epoch, (0,))]


async def test_worker_loss_neither_drops_nor_repeats_tokens(gateway: Gateway) -> None:
    live = await gateway.submit()
    first = await gateway.dispatch()
    gateway.make(first, 0, "abc")
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: len(gateway.line.enqueued) == 2)
    before, again = gateway.line.enqueued
    assert again.arrived == before.arrived
    assert again.prompt_tokens == 5
    gateway.make(first, 3, "LATE")
    assert gateway.workers.aborted == [(first, ())]
    second = await gateway.dispatch(worker_id="other")
    assert bytes(gateway.workers.started[-1].output_ids) == b"abc"
    gateway.make(second, 3, "de", session_pb2.STOP_CAUSE_EOS)
    pieces = await gateway.read(live)
    assert texts(pieces) == "abcde"
    assert [(p.offset, p.epoch) for p in pieces[1:]] == [(0, first), (3, second)]
    assert (pieces[-1].timing.attempts, pieces[-1].timing.migrations) == (2, 1)
    # The tenant's served tokens are counted once, too.
    assert gateway.line.outputs == {("r", 0): 5}


async def test_progress_drops_duplicates_and_fails_on_a_gap(gateway: Gateway) -> None:
    live = await gateway.submit()
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "abc")
    gateway.make(epoch, 1, "bcd")
    await until(lambda: live.choices[0].stored == 4)
    gateway.make(epoch, 5, "f")
    await until(lambda: len(gateway.line.enqueued) == 2)
    assert await gateway.stored() == (State.QUEUED, b"abcd")


async def test_request_fails_after_max_losses(gateway: Gateway) -> None:
    live = await gateway.submit()
    for _ in range(CONFIG.max_losses):
        assert not live.is_over
        await gateway.lose(live, in_step=True)
    with pytest.raises(AttemptsExhausted, match=r"after 2 lost attempts.* worker w was lost"):
        await gateway.read(live)
    assert (await gateway.stored())[0] is State.FAILED
    assert gateway.line.withdrawn == ["r"]


async def test_losses_outside_a_step_end_at_the_larger_limit(gateway: Gateway) -> None:
    live = await gateway.submit()
    for _ in range(CONFIG.max_losses_total):
        assert not live.is_over
        await gateway.lose(live, in_step=False)
    with pytest.raises(AttemptsExhausted, match="after 5 lost attempts"):
        await gateway.read(live)
    assert (await gateway.stored())[0] is State.FAILED


async def test_unreported_first_loss_counts_as_in_a_step(gateway: Gateway) -> None:
    """The worker may have ended in the first step, before the report was sent."""
    live = await gateway.submit()
    await gateway.lose(live, in_step=False)
    assert not gateway.workers.started[-1].confirm_first_step
    assert not gateway.workers.confirmed
    await gateway.lose(live, in_step=True)
    assert gateway.workers.started[-1].confirm_first_step
    assert gateway.workers.confirmed == [gateway.workers.started[-1].epoch]
    await until(lambda: live.is_over)
    assert (live.losses.in_step, live.losses.in_a_row) == (2, 2)


async def test_new_token_resets_all_losses(gateway: Gateway) -> None:
    live = await gateway.submit(max_tokens=64)
    for offset in range(2 * CONFIG.max_losses_total):
        epoch = await gateway.dispatch()
        gateway.make(epoch, offset, "x")
        gateway.requests.attempts.worker_lost("w")
        await until(lambda: live.phase.value == "waiting")
        assert not live.losses.need_confirmation(live.num_tokens + 1, CONFIG)
        assert not live.losses.is_suspect(live.num_tokens + 1, CONFIG)
    assert not live.is_over
    assert (live.losses.in_step, live.losses.in_a_row) == (1, 1)


async def test_max_losses_of_one_confirms_the_first_attempt(ledger: MemoryLedger) -> None:
    gateway = Gateway(ledger, config=replace(CONFIG, max_losses=1))
    live = await gateway.submit()
    await gateway.lose(live, in_step=False)
    assert gateway.workers.started[-1].confirm_first_step
    assert not live.is_over
    await gateway.lose(live, in_step=True)
    await until(lambda: live.is_over)


async def test_failures_of_a_live_worker_count_by_its_reports(gateway: Gateway) -> None:
    """A failure outside a step, such as of a grammar's compilation, leaves the worker alive."""
    live = await gateway.submit()
    for _ in range(CONFIG.max_losses):
        epoch = await gateway.dispatch()
        gateway.make(
            epoch, 0, "", session_pb2.STOP_CAUSE_FAILED, error="no", error_slug="engine_failed"
        )
        await until(lambda: live.phase.value != "running")
    assert not live.is_over
    assert (live.losses.in_step, live.losses.in_a_row) == (0, 2)


async def without_workers(ledger: MemoryLedger, **settings: float) -> Gateway:
    gateway = Gateway(ledger, config=replace(CONFIG, **settings))
    gateway.workers.has_worker = False
    return gateway


async def test_request_fails_after_worker_wait_without_a_worker(
    ledger: MemoryLedger,
) -> None:
    gateway = await without_workers(ledger, worker_wait=0.05)
    live = await gateway.submit()
    with pytest.raises(NoWorker, match=r"no worker of the model 'fake' was connected for 0\.05 s"):
        await gateway.read(live)
    assert (await gateway.stored())[0] is State.FAILED
    assert gateway.line.withdrawn == ["r"]


async def test_worker_wait_ends_when_a_worker_connects(
    ledger: MemoryLedger,
) -> None:
    gateway = await without_workers(ledger, worker_wait=0.05)
    before = await gateway.submit()
    gateway.requests.attempts.worker_up("fake")
    after = await gateway.submit(request_id="later")
    await asyncio.sleep(0.15)
    assert not before.is_ending and not after.is_ending


async def test_worker_wait_begins_when_the_last_worker_is_lost(
    ledger: MemoryLedger,
) -> None:
    gateway = await without_workers(ledger, worker_wait=0.1)
    gateway.requests.attempts.worker_up("fake")
    running, waiting = await gateway.submit(), await gateway.submit(request_id="waits")
    await gateway.dispatch()
    gateway.workers.has_worker = True
    gateway.requests.attempts.worker_lost("another")
    await asyncio.sleep(0.2)
    assert not running.is_ending and not waiting.is_ending
    gateway.workers.has_worker = False
    gateway.requests.attempts.worker_lost("w")
    for live in (running, waiting):
        with pytest.raises(NoWorker):
            await gateway.read(live)


async def test_request_taken_over_elsewhere_is_withdrawn(
    gateway: Gateway, ledger: MemoryLedger
) -> None:
    live = await gateway.submit()
    await gateway.dispatch()
    await ledger.heartbeat("other", "there:1", 1000.0)
    await ledger.take_over("r", "other", "gateway")
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: live.is_over)
    assert gateway.line.withdrawn == ["r"]


@pytest.mark.parametrize("has_ended", [True, False])
async def test_reconcile_withdraws_ended_and_moved_requests(
    gateway: Gateway, ledger: MemoryLedger, has_ended: bool
) -> None:
    live = await gateway.submit()
    if has_ended:
        await ledger.end_request("r", State.CANCELLED, "cancelled", "elsewhere", "gateway")
    else:
        await ledger.heartbeat("other", "there:1", 1000.0)
        await ledger.take_over("r", "other", "gateway")
    await gateway.requests.attempts.reconcile(live)
    assert live.is_over
    assert gateway.line.withdrawn == ["r"]


async def test_dispatch_during_an_end_is_withdrawn_again(gateway: Gateway) -> None:
    """The leader may receive the end before the ledger's answer to the dispatch."""
    await gateway.submit()
    entry = await gateway.ledger.dispatch("r", "w", 7, TERM)
    await gateway.requests.cancel("r")
    gateway.requests.dispatched(
        session_pb2.Dispatched(request_id="r", worker_id="w", epoch=7, attempt=entry.attempts)
    )
    await until(lambda: gateway.line.withdrawn == ["r", "r"])


async def test_return_by_a_draining_worker_is_no_loss(gateway: Gateway) -> None:
    live = await gateway.submit()
    for round_trip in range(CONFIG.max_losses + 1):
        epoch = await gateway.dispatch()
        gateway.make(epoch, round_trip, "x", session_pb2.STOP_CAUSE_RETURNED)
        await until(lambda: live.phase.value == "waiting")
    assert await gateway.stored() == (State.QUEUED, b"xxx")


async def test_disconnect_cancels_and_frees_the_worker(gateway: Gateway) -> None:
    live = await gateway.submit()
    epoch = await gateway.dispatch()
    stream = gateway.requests.stream(live)
    await anext(stream)
    await stream.aclose()
    await until(lambda: live.is_over)
    assert gateway.workers.aborted == [(epoch, ())]
    assert (await gateway.stored())[0] is State.CANCELLED


async def test_grace_waits_for_the_client_and_then_cancels(gateway: Gateway) -> None:
    live = await gateway.submit(on_disconnect=pb.ON_DISCONNECT_GRACE)
    await _leave(gateway, live)
    again = asyncio.create_task(gateway.read(live))
    await asyncio.sleep(2 * CONFIG.grace)
    assert not live.is_over
    again.cancel()
    await until(lambda: live.is_over)
    assert isinstance(live.error, Cancelled)


async def test_continue_mode_runs_without_a_client(gateway: Gateway) -> None:
    live = await gateway.submit(on_disconnect=pb.ON_DISCONNECT_CONTINUE)
    await _leave(gateway, live)
    await asyncio.sleep(2 * CONFIG.grace)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "done", session_pb2.STOP_CAUSE_EOS)
    await until(lambda: live.is_over)
    assert await gateway.stored() == (State.FINISHED, b"done")


async def _leave(gateway: Gateway, live: LiveRequest) -> None:
    stream = gateway.requests.stream(live)
    await anext(stream)
    await stream.aclose()


async def test_deadline_expires_queued_and_running_requests(gateway: Gateway) -> None:
    waits = await gateway.submit(timeout_s=0.02, request_id="waits")
    runs = await gateway.submit(timeout_s=0.02, request_id="runs")
    epoch = await gateway.dispatch("runs")
    for live in (waits, runs):
        with pytest.raises(DeadlineExceeded):
            await gateway.read(live)
    assert gateway.line.withdrawn == ["waits", "runs"]
    assert gateway.workers.aborted == [(epoch, ())]
    assert (await gateway.stored("runs"))[0] is State.EXPIRED


async def test_duplicate_request_shares_one_run(gateway: Gateway) -> None:
    live = await gateway.submit()
    twin = await gateway.submit()
    assert twin is live
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "ab", session_pb2.STOP_CAUSE_EOS)
    first, second = await asyncio.gather(gateway.read(live), gateway.read(twin))
    assert texts(first) == texts(second) == "ab"
    assert len(gateway.line.enqueued) == 1
    late = await gateway.submit()
    assert texts(await gateway.read(late)) == "ab"
    with pytest.raises(RequestConflict):
        await gateway.submit(max_tokens=3)


async def test_attach_continues_at_any_offset_live_and_ended(gateway: Gateway) -> None:
    live = await gateway.submit(stop=["#"], max_tokens=20)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "caf\u00e9 au")
    await until(lambda: live.choices[0].stored == 8)
    running = [
        asyncio.create_task(gateway.read(await gateway.requests.attach("r"), offset))
        for offset in range(9)
    ]
    with pytest.raises(OffsetOutOfRange):
        await gateway.read(live, 9)
    gateway.make(epoch, 8, " lait", session_pb2.STOP_CAUSE_EOS)
    whole = texts(await gateway.read(live))
    assert whole == "caf\u00e9 au lait"
    live_texts = [texts(await task) for task in running]
    ended = [texts(await gateway.read(await gateway.requests.attach("r"), k)) for k in range(9)]
    assert live_texts == ended
    # Half a character has no text: offset 4 is between the two bytes of the accent.
    expected = [whole[k:] for k in range(4)] + [whole[3:]] + [whole[k - 1 :] for k in range(5, 9)]
    assert ended == expected


async def test_attach_adopts_the_request_of_a_dead_gateway(
    gateway: Gateway, ledger: MemoryLedger
) -> None:
    live = await gateway.submit()
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "abc")
    await until(lambda: live.choices[0].stored == 3)
    other = Gateway(ledger, "other")
    run = asyncio.create_task(other.requests.attempts.run())
    with pytest.raises(Elsewhere) as elsewhere:
        await other.requests.attach("r")
    assert elsewhere.value.address == "here:1"
    await ledger.end_lease("gateway")
    adopted = await other.requests.attach("r")
    assert [w.prompt_tokens for w in other.line.enqueued] == [5]
    gateway.make(epoch, 3, "LATE")
    with pytest.raises(EverliftError, match="attach again"):
        await gateway.read(live, 3)
    other.epochs = iter([7])
    await other.dispatch()
    other.make(7, 3, "de", session_pb2.STOP_CAUSE_EOS)
    assert texts(await other.read(adopted, 3)) == "de"
    assert await gateway.stored() == (State.FINISHED, b"abcde")
    run.cancel()


async def test_adoption_awaiting_the_ledger_delays_no_other(
    ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard of the ledger may be away while the others answer."""
    gone = Gateway(ledger, "gone")
    for number in range(9):
        await gone.submit(request_id=f"r{number}")
    get = ledger.get
    asked: list[str] = []

    async def away_but_for_the_last(request_id: str) -> Entry:
        if request_id != "r8":
            asked.append(request_id)
            raise LedgerUnavailable("its shard is away")
        return await get(request_id)

    monkeypatch.setattr(ledger, "get", away_but_for_the_last)
    other = Gateway(ledger, "other")
    for number in range(8):
        other.requests.schedule_adoption(f"r{number}")
    await until(lambda: len(set(asked)) == 8)
    adopted = await other.requests.attach("r8")
    assert adopted.phase is Phase.WAITING
    await other.requests.stop(0.0)


async def test_frozen_gateway_does_not_restore_a_forgotten_request(
    gateway: Gateway, ledger: MemoryLedger
) -> None:
    live = await gateway.submit()
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "ab")
    await until(lambda: live.choices[0].stored == 2)
    await ledger.end_lease("gateway")
    other = Gateway(ledger, "other")
    await other.requests.forget("r")
    gateway.make(epoch, 2, "cd")
    with pytest.raises(Cancelled, match="erased"):
        await gateway.read(live)
    assert gateway.workers.aborted == [(epoch, ())]
    assert not ledger._records
    assert gateway.requests.ledger_status().rollbacks == 0
    assert (await gateway.submit()) is not live
    await other.requests.stop(0.0)


async def test_adopted_request_has_a_grace(
    ledger: MemoryLedger,
) -> None:
    gone = Gateway(ledger, "gone")
    await gone.submit()
    other = Gateway(ledger, "other")
    live = await other.requests._takeover.take_over("r")
    assert not live.is_over
    await until(lambda: live.is_over)
    assert isinstance(live.error, Cancelled)
    await other.requests.stop(0.0)


async def test_tokens_lost_by_the_ledger_are_appended_again(
    gateway: Gateway, ledger: MemoryLedger
) -> None:
    live = await gateway.submit()
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "abcd")
    await until(lambda: live.choices[0].stored == 4)
    record = ledger._records["r"]
    del record.choices[0].tokens[1:]
    record.entry = replace(record.entry, num_tokens=(1,))
    gateway.make(epoch, 4, "e")
    gateway.make(epoch, 5, "f", session_pb2.STOP_CAUSE_EOS)
    assert texts(await gateway.read(live)) == "abcdef"
    assert await gateway.stored() == (State.FINISHED, b"abcdef")


@pytest.fixture
def slow_open(ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event until which answers to ``open`` are delayed; requests are opened at once."""
    may_answer, open_ = asyncio.Event(), ledger.open

    async def open_and_answer_late(*args: Any) -> Opened:
        opened = await open_(*args)
        await may_answer.wait()
        return opened

    monkeypatch.setattr(ledger, "open", open_and_answer_late)
    return may_answer


@pytest.mark.parametrize("what", ["cancel", "forget"])
async def test_arriving_request_can_be_cancelled_and_forgotten(
    gateway: Gateway, ledger: MemoryLedger, slow_open: asyncio.Event, what: str
) -> None:
    coming = asyncio.create_task(gateway.submit())
    await until(lambda: "r" in ledger._records)
    ending = asyncio.create_task(getattr(gateway.requests, what)("r"))
    for _ in range(10):
        await asyncio.sleep(0)
    slow_open.set()
    live = await coming
    await ending
    with pytest.raises(Cancelled):
        await gateway.read(live)
    assert len(gateway.requests) == 0
    assert ("r" in ledger._records) is (what == "cancel")


async def test_stopping_router_waits_for_arriving_requests(
    ledger: MemoryLedger, slow_open: asyncio.Event
) -> None:
    gateway = Gateway(ledger)
    coming = asyncio.create_task(gateway.submit())
    await until(lambda: "r" in ledger._records)
    stopping = asyncio.create_task(gateway.requests.stop(60.0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not stopping.done()
    slow_open.set()
    live = await coming
    await gateway.requests.cancel("r")
    await stopping
    assert live.is_over


@pytest.mark.usefixtures("slow_open")
async def test_stopping_router_redirects_an_unanswered_submission(
    ledger: MemoryLedger,
) -> None:
    gateway = Gateway(ledger)
    coming = asyncio.create_task(gateway.submit())
    await until(lambda: "r" in ledger._records)
    await gateway.requests.stop(0.0)
    with pytest.raises(RouterStopping):
        await coming


async def test_stopping_router_takes_no_new_request(
    ledger: MemoryLedger, slow_open: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(ledger)

    async def flush() -> None:
        slow_open.set()
        for _ in range(10):
            await asyncio.sleep(0)

    monkeypatch.setattr(gateway.requests.quotas, "flush", flush)
    coming = asyncio.create_task(gateway.submit())
    await until(lambda: "r" in ledger._records)
    await gateway.requests.stop(0.0)
    with pytest.raises(RouterStopping):
        await coming


@pytest.mark.parametrize("before", [1, 2], ids=["as many choices", "fewer choices"])
async def test_append_answer_applies_only_to_its_own_request(
    gateway: Gateway, ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    may_answer, append = asyncio.Event(), ledger.append

    async def append_and_answer_late(appends: Sequence[Append]) -> list[Appended]:
        answers = await append(appends)
        await may_answer.wait()
        return answers

    monkeypatch.setattr(ledger, "append", append_and_answer_late)
    await gateway.submit(n=before)
    gateway.make(await gateway.dispatch(), 0, "abc", choice=before - 1)
    await until(lambda: bool(ledger._records["r"].choices[before - 1].tokens))
    await gateway.requests.cancel("r")
    await gateway.requests.forget("r")
    other = await gateway.submit()
    may_answer.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert other.choices[0].stored == 0
    gateway.make(await gateway.dispatch(), 0, "xy", session_pb2.STOP_CAUSE_EOS)
    assert texts(await gateway.read(other)) == "xy"


async def test_full_queue_rejects_and_leaves_no_entry(
    gateway: Gateway,
) -> None:
    gateway.requests.on_queue_estimates([queue_of(CONFIG.max_queued)])
    with pytest.raises(QueueFull):
        await gateway.submit()
    gateway.requests.on_queue_estimates([queue_of(0)])
    live = await gateway.submit()
    gateway.requests.refused(FULL)
    with pytest.raises(QueueFull):
        await gateway.read(live)
    again = await gateway.submit()
    assert again is not live


async def test_accepted_request_is_not_rejected_when_resent(
    gateway: Gateway,
) -> None:
    """The request is resent to a gateway with a full queue, during its run and after its end."""
    other = Gateway(gateway.ledger, "other")
    busy = queue_of(CONFIG.max_queued, tokens_per_s=10.0, waits=BUSY.waits)
    other.requests.on_queue_estimates([busy])
    await gateway.submit()
    with pytest.raises(Elsewhere):
        await other.submit()
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "abc", session_pb2.STOP_CAUSE_EOS)
    await until(lambda: gateway.requests.counters.completed == 1)
    assert texts(await other.read(await other.submit())) == "abc"
    with pytest.raises(RequestConflict):
        await other.submit(text="ho")
    with pytest.raises(QueueFull):
        await other.submit(request_id="new")
    await other.requests.stop(0.0)


@pytest.mark.parametrize(
    "cause, error",
    [
        (_refusal("shed"), Shed),
        (_refusal("queue_timeout"), QueueTimeout),
        (_refusal("deadline_unmeetable", 7.0), DeadlineUnmeetable),
        (_refusal("deadline_unmeetable", 1.0), DeadlineUnmeetable),
    ],
)
async def test_refusal_reports_its_cause_and_retry_after(
    gateway: Gateway, cause: session_pb2.Refusal, error: type[EverliftError]
) -> None:
    gateway.requests.on_queue_estimates([BUSY])
    live = await gateway.submit()
    gateway.requests.refused(cause)
    with pytest.raises(error) as refused:
        await gateway.read(live)
    retry_after_s = refused.value.retry_after_s
    assert retry_after_s is not None and retry_after_s >= max(30.0, cause.retry_after_s)
    assert await gateway.submit() is not live, "its id is free"


BACKGROUND = {"attachment": b"R", "on_disconnect": pb.ON_DISCONNECT_CONTINUE}


async def test_refused_background_request_ends_as_failed(gateway: Gateway) -> None:
    live = await gateway.submit(**BACKGROUND)
    await _leave(gateway, live)
    gateway.requests.refused(_refusal("queue_timeout"))
    await until(lambda: live.is_over)
    stored, _ = await gateway.requests.get("r")
    assert (stored.entry.state, stored.entry.error_slug) == (State.FAILED, "queue_timeout")
    assert gateway.requests.counters.failed == 1


@pytest.mark.parametrize("missing", BACKGROUND)
async def test_refused_request_is_discarded_unless_stored(gateway: Gateway, missing: str) -> None:
    live = await gateway.submit(**{**BACKGROUND, missing: None})
    gateway.requests.refused(FULL)
    await until(lambda: live.is_over)
    with pytest.raises(UnknownRequest):
        await gateway.requests.get("r")


async def test_refused_background_request_is_discarded_while_read(gateway: Gateway) -> None:
    live = await gateway.submit(**BACKGROUND)
    read = asyncio.create_task(gateway.read(live))
    await until(lambda: live.has_readers)
    gateway.requests.refused(FULL)
    with pytest.raises(QueueFull):
        await read
    with pytest.raises(UnknownRequest):
        await gateway.requests.get("r")


async def test_early_retry_is_refused_before_any_check(
    ledger: MemoryLedger,
) -> None:
    gateway = Gateway(ledger, config=replace(CONFIG, retry_burst=0))
    gateway.requests.on_queue_estimates([BUSY])
    live = await gateway.submit()
    gateway.requests.refused(FULL)
    await until(lambda: live.is_over)
    with pytest.raises(RetriedTooSoon) as refused:
        await gateway.submit()
    assert 29.0 < (refused.value.retry_after_s or 0.0) <= 150.0
    assert await gateway.submit(request_id="other")
    await gateway.requests.stop(0.0)


async def test_estimate_of_an_earlier_leader_is_dropped(gateway: Gateway) -> None:
    gateway.requests.on_queue_estimates([queue_of(CONFIG.max_queued)])
    other = session_pb2.QueueEstimate(model="other")
    gateway.requests.on_queue_estimates([other])
    assert await gateway.submit()


async def test_higher_class_passes_a_full_queue(gateway: Gateway) -> None:
    gateway.requests.on_queue_estimates([queue_of(CONFIG.max_queued, lowest=0)])
    with pytest.raises(QueueFull):
        await gateway.submit()
    assert await gateway.submit(request_id="high", priority=1)


async def test_unreachable_worker_counts_as_no_loss(gateway: Gateway) -> None:
    live = await gateway.submit()
    gateway.workers.reachable = False
    await gateway.dispatch()
    await until(lambda: len(gateway.line.enqueued) == 2)
    assert live.entry.losses == 0
    assert (await gateway.ledger.get("r")).losses == 0


async def test_cancelling_a_finished_request_changes_nothing(gateway: Gateway) -> None:
    await gateway.submit()
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "ab", session_pb2.STOP_CAUSE_EOS)
    await until(lambda: gateway.requests.counters.completed == 1)
    assert (await gateway.requests.cancel("r")).state is State.FINISHED


async def test_stopping_router_redirects_its_clients(gateway: Gateway) -> None:
    live = await gateway.submit()
    await gateway.requests.stop(0.0)
    with pytest.raises(RouterStopping):
        await gateway.read(live)
    with pytest.raises(RouterStopping):
        await gateway.submit(request_id="next")
    assert (await gateway.stored())[0] is State.QUEUED


async def test_stopping_router_waits_for_unstored_tokens(
    gateway: Gateway, ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, let = ledger.append, asyncio.Event()

    async def late_append(appends: Sequence[Append]) -> list[Appended]:
        await let.wait()
        return await append(appends)

    monkeypatch.setattr(ledger, "append", late_append)
    live = await gateway.submit()
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "abc")
    await until(lambda: live.choices[0].readable == 3)
    stopping = asyncio.create_task(gateway.requests.stop(0.0))
    await until(lambda: gateway.workers.aborted == [(epoch, ())])
    assert not live.is_over
    let.set()
    await stopping
    assert await gateway.stored() == (State.RUNNING, b"abc")


async def test_request_finished_elsewhere_is_reported_as_moved(
    gateway: Gateway, ledger: MemoryLedger
) -> None:
    """The gateway stalls beyond its lease; another one takes the request over and finishes it."""
    live = await gateway.submit()
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "ab")
    await until(lambda: live.choices[0].stored == 2)
    await ledger.end_lease("gateway")
    other = Gateway(ledger, "other")
    run = asyncio.create_task(other.requests.attempts.run())
    await other.requests._takeover.take_over("r")
    other.epochs = iter([7])
    await other.dispatch()
    other.make(7, 2, "cdefgh", session_pb2.STOP_CAUSE_EOS)
    await until(lambda: other.requests.counters.completed == 1)
    gateway.make(epoch, 2, "X")
    with pytest.raises(Moved):
        await gateway.read(live)
    run.cancel()


class SlowToEnd(MemoryLedger):
    """Ledger that ends requests only while ``let`` is set."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.let = asyncio.Event()

    async def end_request(
        self,
        request_id: str,
        state: State,
        slug: str,
        message: str,
        owner: str | None = None,
        explanation: bytes = b"",
    ) -> Entry:
        await self.let.wait()
        return await super().end_request(request_id, state, slug, message, owner, explanation)


async def test_cancel_completes_after_its_caller_is_gone() -> None:
    ledger = SlowToEnd()
    await ledger.lead("leader", "", TERM, 1000.0)
    gateway = Gateway(ledger)
    live = await gateway.submit()
    epoch = await gateway.dispatch()
    asked = asyncio.create_task(gateway.requests.cancel("r"))
    await until(lambda: gateway.workers.aborted == [(epoch, ())])
    asked.cancel()
    ledger.let.set()
    await until(lambda: live.is_over)
    assert (await gateway.stored())[0] is State.CANCELLED


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("request_id", [unnamed_request_id("r"), "r"])
async def test_unanswered_submission_is_cancelled(
    gateway: Gateway,
    ledger: MemoryLedger,
    monkeypatch: pytest.MonkeyPatch,
    request_id: str,
    goes_on: bool,
) -> None:
    """A client that did not choose the id cannot retry, so its request has no grace period."""
    starts_grace, open_ = [], ledger.open
    monkeypatch.setattr(gateway.requests._timeouts, "start_grace", starts_grace.append)

    async def open_without_answer(*args: Any) -> None:
        await open_(*args)
        raise LedgerUnavailable("not replicated")

    monkeypatch.setattr(ledger, "open", open_without_answer)
    fields = {"on_disconnect": pb.ON_DISCONNECT_CONTINUE} if goes_on else {}
    with pytest.raises(LedgerUnavailable):
        await gateway.submit(request_id=request_id, **fields)
    if request_id == "r":
        await until(lambda: len(starts_grace) == 2)
        assert (await gateway.stored())[0] is State.QUEUED
    else:
        await until(lambda: ledger._records[request_id].entry.state is State.CANCELLED)


async def test_disconnect_during_a_refusal_restores_nothing(
    gateway: Gateway, ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = await gateway.submit()
    discard, let = ledger.discard, asyncio.Event()

    async def slow_discard(*args: str) -> Entry | None:
        await let.wait()
        return await discard(*args)

    monkeypatch.setattr(ledger, "discard", slow_discard)
    gateway.requests.refused(FULL)
    await until(lambda: live.phase is Phase.ENDING)
    await _leave(gateway, live)
    let.set()
    await until(lambda: live.is_over)
    await asyncio.sleep(0.01)
    assert not ledger._records
    assert gateway.requests.ledger_status().rollbacks == 0


async def test_cancel_during_a_refusal_restores_nothing(
    gateway: Gateway, ledger: MemoryLedger
) -> None:
    live = await gateway.submit()
    gateway.requests.refused(FULL)
    with pytest.raises(UnknownRequest):
        await gateway.requests.cancel("r")
    assert isinstance(live.error, QueueFull)
    assert not ledger._records
    assert gateway.requests.ledger_status().rollbacks == 0


async def test_refusal_after_the_deadline_changes_nothing(gateway: Gateway) -> None:
    live = await gateway.submit(timeout_s=100.0)
    gateway.requests._timeouts._expire(live)
    gateway.requests.refused(FULL)
    await until(lambda: live.is_over)
    await asyncio.sleep(0.01)
    assert isinstance(live.error, DeadlineExceeded)
    assert (await gateway.stored())[0] is State.EXPIRED
    assert gateway.requests.ledger_status().rollbacks == 0


async def test_delayed_refusal_spares_an_adopted_request(
    gateway: Gateway, ledger: MemoryLedger
) -> None:
    """The gateway was frozen during the takeover."""
    live = await gateway.submit()
    taken = await ledger.take_over("r", "successor", "gateway")
    gateway.requests.refused(FULL)
    await until(lambda: live.is_over)
    assert isinstance(live.error, Moved)
    assert await ledger.get("r") == taken.entry


async def test_submit_reports_moved_if_another_gateway_discarded(
    gateway: Gateway, ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other gateway discards the request, as its queue is full, while this one opens it."""
    await Gateway(ledger, "other").submit()
    opening = ledger.open

    async def open_and_discard(*args: Any) -> Opened:
        opened = await opening(*args)
        await ledger.discard("r", "other")
        return opened

    monkeypatch.setattr(ledger, "open", open_and_discard)
    with pytest.raises(Moved, match="send it again"):
        await gateway.submit()


async def test_generate_reports_moved_if_owner_forgot_the_request(
    ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Gateway(ledger).submit()

    async def unknown(*args: Any) -> AsyncIterator[pb.GenerateResponse]:
        raise UnknownRequest("no request r")
        yield

    other = Gateway(ledger, "other")
    inference = Inference(other.requests, other.models, None)  # type: ignore[arg-type]
    monkeypatch.setattr(inference._relay, "attach", unknown)
    message = pb.GenerateRequest(text="hi", request_id="r", max_tokens=8)
    opened = await inference.generate(ANYONE, message, {}, Journal(now()))
    with pytest.raises(Moved, match="send it again"):
        await anext(opened.pieces)


async def test_cancel_during_a_takeover_is_redirected_to_the_successor(
    gateway: Gateway, ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Gateway(ledger, "gone").submit()
    await ledger.heartbeat("successor", "there:1", 1000.0)
    end = ledger.end_request

    async def late_end(*args: Any) -> Entry:
        await ledger.take_over("r", "successor", "gone")
        return await end(*args)

    monkeypatch.setattr(ledger, "end_request", late_end)
    with pytest.raises(Elsewhere) as elsewhere:
        await gateway.requests.cancel("r")
    assert elsewhere.value.address == "there:1"


async def test_cancel_at_a_former_owner_is_redirected_to_the_successor(
    gateway: Gateway, ledger: MemoryLedger
) -> None:
    """The gateway was frozen during the takeover."""
    live = await gateway.submit()
    await ledger.heartbeat("successor", "there:1", 1000.0)
    await ledger.take_over("r", "successor", "gateway")
    with pytest.raises(Elsewhere) as elsewhere:
        await gateway.requests.cancel("r")
    assert elsewhere.value.address == "there:1"
    assert isinstance(live.error, Moved)


async def test_request_cancelled_before_its_first_step_leaves_nothing(
    gateway: Gateway,
) -> None:
    live = await gateway.submit()
    gateway.requests.attempts.end(live, State.CANCELLED, Cancelled())
    await gateway.requests.stop(0.0)
    # The collection of a coroutine that was never awaited is a warning, and so an error.
    gc.collect()


async def test_redirect_to_another_gateway_is_not_logged(
    gateway: Gateway, ledger: MemoryLedger, caplog: pytest.LogCaptureFixture
) -> None:
    await gateway.submit()
    with caplog.at_level(logging.INFO), pytest.raises(Elsewhere):
        await Gateway(ledger, "other").requests.attach("r")
    assert "operation on a request failed" not in caplog.text


async def test_unfit_ledger_blocks_new_requests(gateway: Gateway) -> None:
    membership = Membership(0.0, "", "", 0, 0, unfit="appendonly no")
    gateway.requests.ledger_answered(membership)
    with pytest.raises(LedgerUnavailable, match="appendonly no"):
        await gateway.submit()
    gateway.requests.ledger_answered(replace(membership, unfit=""))
    await gateway.submit()


async def test_registry_keeps_a_bounded_number_of_ended_requests(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_MAX_ENDED", 2)
    ended = []
    for number in range(4):
        live = await gateway.submit(request_id=f"r{number}")
        await gateway.requests.cancel(live.request_id)
        ended.append(weakref.ref(live))
    del live
    await asyncio.sleep(CONFIG.grace)
    gc.collect()
    assert [each() is not None for each in ended] == [False, False, True, True]


async def test_dispatch_of_an_ending_request_starts_nothing() -> None:
    ledger = SlowToEnd()
    await ledger.lead("leader", "", TERM, 1000.0)
    gateway = Gateway(ledger)
    live = await gateway.submit()
    asked = asyncio.create_task(gateway.requests.cancel("r"))
    await until(lambda: gateway.line.withdrawn == ["r"])
    await gateway.dispatch()
    ledger.let.set()
    assert (await asked).state is State.CANCELLED
    assert live.is_over
    assert not gateway.workers.started
    assert not gateway.requests.attempts.running()


async def test_disconnect_restarts_the_whole_grace(gateway: Gateway) -> None:
    live = await gateway.submit(on_disconnect=pb.ON_DISCONNECT_GRACE)
    ends = []
    for _ in range(4):
        await _leave(gateway, live)
        assert live.grace is not None
        ends.append(live.grace)
        await asyncio.sleep(0.001)
    assert [end.cancelled() for end in ends] == [True] * 3 + [False]
    assert sorted(end.when() for end in ends) == [end.when() for end in ends]
    await until(lambda: live.is_over)


async def test_disconnect_at_a_former_owner_cancels_nothing(
    gateway: Gateway, ledger: MemoryLedger
) -> None:
    live = await gateway.submit()
    await ledger.end_lease("gateway")
    other = Gateway(ledger, "other")
    adopted = await other.requests._takeover.take_over("r")
    await _leave(gateway, live)
    await until(lambda: live.is_over)
    assert isinstance(live.error, Moved)
    assert not adopted.is_over
    assert (await gateway.stored())[0] is State.QUEUED
    await other.requests.stop(0.0)


async def test_takeover_fails_a_request_of_another_model(ledger: MemoryLedger) -> None:
    gone = Gateway(ledger, "gone")
    live = await gone.submit()
    record = ledger._records["r"]
    record.request = replace(live.request, model="another")
    successor = Gateway(ledger, "successor")
    ended = await successor.requests._takeover.take_over("r")
    assert isinstance(ended.error, UnknownModel)
    assert (await successor.stored())[0] is State.FAILED


async def test_attach_rejects_tokens_of_another_model(
    gateway: Gateway, ledger: MemoryLedger
) -> None:
    live = await gateway.submit()
    gateway.make(await gateway.dispatch(), 0, "ab", session_pb2.STOP_CAUSE_EOS)
    await until(lambda: live.is_over)
    ledger._records["r"].request = replace(live.request, model="another")
    # This gateway still has the request in memory, as its own model generated it.
    assert await gateway.requests.attach("r") is live
    with pytest.raises(UnknownModel):
        await Gateway(ledger, "other").requests.attach("r")


@pytest.mark.parametrize("has_begun", [False, True])
async def test_started_request_fails_under_other_weights(
    ledger: MemoryLedger, has_begun: bool
) -> None:
    """A restarted router may learn of its workers only after it took the request over."""
    for is_known_at_once in (True, False):
        gone = Gateway(ledger, "gone")
        gone.model.fingerprint = "old"
        live = await gone.submit()
        if has_begun:
            run = asyncio.create_task(gone.requests.attempts.run())
            gone.make(await gone.dispatch(), 0, "ab")
            await until(lambda live=live: live.choices[0].stored == 2)
            run.cancel()
        successor = Gateway(ledger, "successor")
        successor.epochs = iter(range(7, 9))
        if is_known_at_once:
            successor.model.fingerprint = "new"
        adopted = await successor.requests._takeover.take_over("r")
        successor.model.fingerprint = "new"
        if not adopted.is_over:
            await successor.dispatch()
        if has_begun:
            with pytest.raises(UnknownModel, match="was old and is new"):
                await successor.read(adopted)
            assert (await successor.stored())[0] is State.FAILED
            assert not successor.workers.started
        else:
            assert adopted.request.fingerprint == "new"
            await successor.requests.cancel("r")
        await successor.requests.forget("r")


async def test_takeover_continues_with_the_versions_of_the_output(ledger: MemoryLedger) -> None:
    gone, successor = Gateway(ledger, "gone"), Gateway(ledger, "successor")
    gone.serve("old", "old")
    live = await gone.submit(model="sql")
    gone.serve("new", "new")
    epoch = await gone.dispatch()
    run = asyncio.create_task(gone.requests.attempts.run())
    gone.make(epoch, 0, "ab")
    await until(lambda: live.choices[0].stored == 2)
    assert live.append(live.choices[0], 2).request is None
    run.cancel()
    successor.serve("new", "newer")
    successor.epochs = iter([7])
    adopted = await successor.requests._takeover.take_over("r")
    await successor.dispatch()
    assert not adopted.is_over
    [start] = successor.workers.started
    assert (start.adapter_digest, bytes(start.output_ids)) == ("new", b"ab")
    assert start.salt == live.request.salt
    await successor.requests.stop(0.0)


async def test_forget_erases_a_request_in_any_phase(gateway: Gateway, ledger: MemoryLedger) -> None:
    for step in range(4):
        live = await gateway.submit()
        if step > 0:
            epoch = await gateway.dispatch()
        if step > 1:
            gateway.make(epoch, 0, "ab")
            await until(lambda live=live: live.choices[0].stored == 2)
        if step > 2:
            gateway.make(epoch, 2, "c", session_pb2.STOP_CAUSE_EOS)
            await until(lambda live=live: live.is_over)
        await gateway.requests.forget("r")
        assert live.is_over
        assert not ledger._records
        for ask in (gateway.requests.attach, gateway.requests.get, gateway.requests.cancel):
            with pytest.raises(UnknownRequest):
                await ask("r")
        # The answer was lost, and the client retries.
        await gateway.requests.forget("r")
    with pytest.raises(UnknownRequest):
        await gateway.requests.forget("never")


async def test_forget_is_redirected_to_the_owning_gateway(
    gateway: Gateway, ledger: MemoryLedger
) -> None:
    other = Gateway(ledger, "other")
    for end in (False, True):
        await gateway.submit()
        if end:
            await gateway.requests.cancel("r")
        with pytest.raises(Elsewhere) as elsewhere:
            await other.requests.forget("r")
        assert elsewhere.value.address == "here:1"
        await gateway.requests.forget("r")
    await gateway.submit()
    await ledger.end_lease("gateway")
    await other.requests.forget("r")
    assert not ledger._records


async def test_get_returns_the_events_of_a_request(gateway: Gateway) -> None:
    await gateway.submit(priority=2)
    await gateway.dispatch()
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: len(gateway.line.enqueued) == 2)
    stored, events = await gateway.requests.get("r")
    assert (stored.entry.losses, stored.request.priority) == (1, 2)
    assert [(event.move, event.detail) for event in events] == [
        ("open", "gateway"),
        ("dispatch", "w"),
        ("release", "worker w was lost"),
    ]


async def test_relayed_client_always_has_the_grace(gateway: Gateway) -> None:
    """The relaying gateway may have died instead of the client."""
    live = await gateway.submit()
    stream = gateway.requests.stream(live, is_relayed=True)
    await anext(stream)
    await stream.aclose()
    assert not live.is_over
    await until(lambda: live.is_over)
    assert isinstance(live.error, Cancelled)


async def test_waiting_report_marks_requests_as_accepted(gateway: Gateway) -> None:
    await gateway.submit()
    assert [w.accepted for w in gateway.line.enqueued] == [False]
    assert [w.accepted for w in gateway.requests.waiting(Fifo())] == [True]


async def test_unexpected_error_fails_only_its_request(
    gateway: Gateway, ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = await gateway.submit(request_id="struck")
    spared = await gateway.submit(request_id="spared")
    await gateway.dispatch("struck", "w")
    await gateway.dispatch("spared", "other")
    release = ledger.release

    async def broken(request_id: str, epoch: int, **fields: Any) -> Entry:
        if request_id == "struck":
            raise ZeroDivisionError
        return await release(request_id, epoch, **fields)

    monkeypatch.setattr(ledger, "release", broken)
    gateway.requests.attempts.worker_lost("w")
    gateway.requests.attempts.worker_lost("other")
    await until(lambda: struck.is_over and spared.phase is Phase.WAITING)
    assert struck.error is not None and struck.error.slug == "internal"
    assert (await ledger.get("struck")).state is State.FAILED
