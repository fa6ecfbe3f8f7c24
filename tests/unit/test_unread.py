"""What a slow client leaves unread is told while its request runs, and while it reads on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.gateway.choice import Choice
from router.gateway.explanation import kept, resumed
from router.gateway.journal import Journal
from router.gateway.model import ServedModel
from router.gateway.output import Output
from router.gateway.unread import Unread
from router.ledger.entry import Entry, State, Stored, StoredChoice
from tests.gateway_support import started_gateway, until
from tests.ledgers import make_request

TOKENIZER = ServedModel.load("fake").tokenizer
MOVES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans(), st.floats(0, 3)))


def choices(count: int) -> list[Choice]:
    outputs = (Output.of(make_request(), TOKENIZER) for _ in range(count))
    return [Choice("r", index, output, None) for index, output in enumerate(outputs)]


@given(MOVES)
def test_it_is_the_time_in_which_any_choice_had_unread_tokens(
    moves: list[tuple[int, int, bool, float]],
) -> None:
    """Each move makes more of a choice readable, or has its client read, after some time."""
    unread, each, now, told_s = Unread(5.0), choices(3), 100.0, 5.0
    for index, count, is_read, seconds in moves:
        told_s += seconds * any(it.taken < it.readable for it in each)
        now += seconds
        if is_read:
            each[index].take(min(each[index].readable, count))
        else:
            each[index].readable += count
        unread.look(each[index], now)
        assert unread.until(now) == pytest.approx(told_s)


async def test_it_is_told_while_a_request_runs_and_while_its_client_reads_on() -> None:
    async with started_gateway() as gateway:
        live = await gateway.submit(on_disconnect=pb.ON_DISCONNECT_CONTINUE)
        epoch = await gateway.dispatch()
        async with aclosing(gateway.requests.stream(live)) as pieces:
            await anext(pieces)
            gateway.make(epoch, 0, "abc")
            await until(lambda: live.choices[0].readable == 3)
            await asyncio.sleep(0.03)
            slow = await gateway.requests.explain("r")
            assert slow.state == pb.REQUEST_STATE_RUNNING
            assert slow.unread_tokens == 3 and 0.03 <= slow.unread_s <= slow.total_s
            await anext(pieces)
            quick = await gateway.requests.explain("r")
            assert quick.unread_tokens == 0 and quick.unread_s >= slow.unread_s
            assert (await gateway.requests.explain("r")).unread_s == quick.unread_s
            gateway.make(epoch, 3, "d", session_pb2.STOP_CAUSE_EOS)
            await until(lambda: live.is_over)
            # Nobody has it any more but who reads it.
            gateway.requests._recent.begin("r")
            await asyncio.sleep(0.03)
            told = await gateway.requests.explain("r")
            assert told.state == pb.REQUEST_STATE_FINISHED and told.unread_tokens == 1
            assert told.spans[-1].kind == pb.SPAN_KIND_DELIVERY
            assert told.spans[-1].seconds >= 0.03
            assert sum(span.seconds for span in told.spans) == pytest.approx(told.total_s)
            async for _ in pieces:
                pass
        await gateway.requests._deliveries.tell()
        told = await gateway.requests.explain("r")
        assert told == kept(*await gateway.requests.get("r"))
        assert told.unread_s >= 0.06 and told.unread_tokens == 0


async def test_whoever_left_before_the_end_is_not_waited_for() -> None:
    async with started_gateway() as gateway:
        live = await gateway.submit(on_disconnect=pb.ON_DISCONNECT_CONTINUE)
        async with aclosing(gateway.requests.stream(live)) as pieces:
            await anext(pieces)
        gateway.make(await gateway.dispatch(), 0, "abc", session_pb2.STOP_CAUSE_EOS)
        await until(lambda: live.is_over)
        first = await gateway.requests.explain("r")
        await asyncio.sleep(0.03)
        assert await gateway.requests.explain("r") == first
        assert first.unread_tokens == 3 and first.unread_s <= first.total_s


def test_an_heir_goes_on_from_what_was_told_and_takes_its_tokens_for_read() -> None:
    told = pb.Explanation(total_s=9.0, unread_s=2.5)
    told.spans.add(kind=pb.SPAN_KIND_DECODE, seconds=9.0)
    entry = Entry("r", State.QUEUED, "g", 1e9, (4,), attempts=1, finish_reasons=(None,))
    stored = Stored(
        entry, make_request(), (StoredChoice(),), 1e9 + 9.0, explanation=told.SerializeToString()
    )
    assert resumed(stored, 100.0).unread_s == 2.5
    assert Journal(100.0).unread_s == 0.0
