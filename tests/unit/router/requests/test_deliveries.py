"""Times to store and deliver an end, stored in the ledger if they are a large part of the total."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.messages import FinishReason
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.event_loop import now
from router.ledger.base import Membership
from router.ledger.entry import Entry, Event, Explained, State, Stored, StoredChoice
from router.ledger.memory.memory import MemoryLedger
from router.requests.delivery_reports import Deliveries
from router.requests.explanation import stored_explanation
from router.requests.request import LiveRequest
from router.requests.timing import FINISHED
from router.requests.tokenizer import ServedModel
from tests.support.ledger.ledgers import make_request
from tests.support.router.gateway_support import Gateway, started_gateway, until
from tests.support.router.journal_support import WatchedJournal

EOS = session_pb2.STOP_CAUSE_EOS
MEMBERSHIP = Membership(0.0, "", "", 0, 0)
CAME, LEDGER = 50.0, 1e9
TOKENIZER = ServedModel.load("fake").tokenizer
OVER = Entry(
    "r",
    State.FINISHED,
    "gateway",
    LEDGER + CAME,
    num_tokens=(1,),
    attempts=1,
    finish_reasons=(FinishReason.STOP,),
)


class Recording(MemoryLedger):
    def __init__(self) -> None:
        super().__init__(lambda: LEDGER)
        self.recorded: list[Explained] = []
        self.num_calls = 0

    async def explain(self, explained: Sequence[Explained]) -> None:
        self.recorded += explained
        self.num_calls += 1


def finished(worker_s: float) -> LiveRequest:
    """Return a request whose last token arrived after ``worker_s`` seconds."""
    journal = WatchedJournal(CAME)
    journal.accepted(CAME)
    journal.dispatch(CAME)
    journal.says(CAME + worker_s, 1, waited_s=0.0)
    return LiveRequest.opened(make_request(), OVER, TOKENIZER, now(), journal)


def settle(live: LiveRequest, storing_s: float, delivery_s: float) -> None:
    last = live.journal.last_event_at
    live.has_unreported_end = True
    live.journal.ended(FINISHED, last + storing_s)
    live.journal.delivered(last + storing_s + delivery_s)


async def delivered_explanation(worker_s: float, storing_s: float, delivery_s: float) -> bytes:
    """Return the explanation that the ledger has after the delivery."""
    ledger, live = Recording(), finished(worker_s)
    with_its_end = live.packed_explanation(live.journal.last_event_at)
    settle(live, storing_s, delivery_s)
    deliveries = Deliveries(ledger)
    deliveries.note_delivered(live)
    await deliveries.flush()
    return ledger.recorded[0].explanation if ledger.recorded else with_its_end


@given(st.floats(0.001, 10.0), st.floats(0.0, 0.5), st.floats(0.0, 0.5), st.floats(0, 1))
def test_stored_times_are_exact_to_1_ms_or_1_percent(
    worker_s: float, storing_s: float, delivery_s: float, when: float
) -> None:
    """The ledger had the end after the fraction ``when`` of ``storing_s``."""
    explanation = asyncio.run(delivered_explanation(worker_s, storing_s, delivery_s))
    stored = Stored(OVER, make_request(), (StoredChoice(),), LEDGER, explanation=explanation)
    end = OVER.arrived + worker_s + when * storing_s
    answer = stored_explanation(
        stored, (Event(OVER.arrived, "open", "gateway"), Event(end, "finish", ""))
    )
    whole_s = worker_s + storing_s + delivery_s
    # Ledger time has microseconds, at best.
    assert answer.total_s == pytest.approx(whole_s, rel=0.01, abs=1.01e-3)
    assert sum(span.seconds for span in answer.spans) == pytest.approx(answer.total_s)


async def test_noted_deliveries_are_stored_once_in_one_call() -> None:
    ledger = Recording()
    deliveries = Deliveries(ledger)
    slow, quick, going = finished(1.0), finished(1.0), finished(1.0)
    settle(slow, 0.0, 0.5)
    settle(quick, 0.004, 0.005)
    for _ in range(2):
        for live in (slow, quick, going, slow):
            deliveries.note_delivered(live)
        await deliveries.flush()
    assert [it.request_id for it in ledger.recorded] == ["r"]
    assert ledger.num_calls == 1


async def ended(gateway: Gateway) -> LiveRequest:
    live = await gateway.submit(on_disconnect=pb.ON_DISCONNECT_CONTINUE)
    gateway.make(await gateway.dispatch(), 0, "abc", EOS)
    await until(lambda: live.is_over)
    return live


async def test_client_read_time_is_stored_with_the_next_heartbeat() -> None:
    async with started_gateway() as gateway:
        live = await ended(gateway)
        record = gateway.ledger._records["r"]
        before = record.explanation
        await asyncio.sleep(0.05)
        await gateway.read(live)
        gateway.requests.ledger_answered(MEMBERSHIP)
        await until(lambda: record.explanation != before)
        answer = stored_explanation(*await gateway.requests.get("r"))
        assert answer.spans[-1].kind == pb.SPAN_KIND_CLIENT
        assert answer.spans[-1].seconds >= 0.05
        assert answer == live.explanation(now())


async def test_stopping_router_flushes_pending_deliveries() -> None:
    async with started_gateway() as gateway:
        live = await ended(gateway)
        await asyncio.sleep(0.05)
        await gateway.read(live)
    answer = stored_explanation(*await gateway.requests.get("r"))
    assert answer.spans[-1].kind == pb.SPAN_KIND_CLIENT


async def test_reread_of_an_old_request_keeps_its_explanation() -> None:
    async with started_gateway() as gateway:
        await ended(gateway)
        gateway.requests._recent.discard("r")
        before = gateway.ledger._records["r"].explanation
        await asyncio.sleep(0.05)
        await gateway.read(await gateway.requests.attach("r"))
    assert gateway.ledger._records["r"].explanation == before
