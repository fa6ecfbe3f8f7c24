"""Unread output of slow clients, as reported during and after a request."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.ledger.entry import Entry, State, Stored, StoredChoice
from router.requests.explanation import resumed_journal, stored_explanation
from router.requests.request import Choice, LiveRequest, Output
from router.requests.timing import Journal
from router.requests.tokenizer import ServedModel
from tests.support.ledger.ledgers import make_request
from tests.support.router.gateway_support import started_gateway, until

CAME = 100.0
ENTRY = Entry("r", State.QUEUED, "g", CAME, (0, 0, 0), finish_reasons=(None, None, None))
TOKENIZER = ServedModel.load("fake").tokenizer
MOVES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans(), st.floats(0, 3)))


class Reader:
    """Choices of a request, as written by a gateway and read by a client; each call advances the
    clock.
    """

    def __init__(self) -> None:
        request = make_request(n=3)
        outputs = [Output.of(request, TOKENIZER) for _ in range(3)]
        self.live = LiveRequest(request, ENTRY, outputs, CAME)
        self.now = CAME

    def make(self, choice: Choice, count: int) -> None:
        choice.output.extend([65] * count)
        self.live.mark_stored(choice, len(choice.output), self.now)

    def read(self, choice: Choice, count: int) -> None:
        choice.mark_delivered(min(choice.readable, choice.delivered + count))
        if choice.has_slow_reader and choice.delivered >= choice.readable:
            self.live.caught_up(choice, self.now)

    @property
    def unread_s(self) -> float:
        return self.live.explanation(self.now).unread_s


@given(MOVES)
def test_unread_time_counts_any_choice_with_a_reader(
    moves: list[tuple[int, int, bool, float]],
) -> None:
    """A move makes more of a choice readable, or lets its client read, after some time."""
    reader, whole_s = Reader(), 0.0
    choices = reader.live.choices
    for index, count, is_read, seconds in moves:
        whole_s += seconds * any(it.delivered < it.readable for it in choices)
        reader.now += seconds
        assert reader.unread_s == pytest.approx(whole_s)
        (reader.read if is_read else reader.make)(choices[index], count)


@given(MOVES)
def test_unread_tokens_exclude_what_is_read_at_once(
    moves: list[tuple[int, int, bool, float]],
) -> None:
    reader = Reader()
    (choice, *_), since, whole_s = reader.live.choices, 0.0, 0.0
    is_late = False
    for _, count, is_read, seconds in moves:
        reader.now += seconds
        if is_read:
            reader.read(choice, count)
        else:
            is_late |= choice.delivered < choice.readable and count > 0
            since = since if choice.delivered < choice.readable else reader.now
            reader.make(choice, count)
        if choice.delivered == choice.readable and is_late:
            is_late, whole_s = False, whole_s + reader.now - since
    reader.live.journal.ended("", reader.now)
    going_on_s = reader.now - since if is_late else 0.0
    assert reader.live.journal.unread_s == pytest.approx(whole_s + going_on_s)


async def test_unread_tokens_are_reported_while_the_client_reads() -> None:
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
            # The stream is now the only holder of the request.
            gateway.requests._recent.discard("r")
            await asyncio.sleep(0.03)
            explained = await gateway.requests.explain("r")
            assert explained.state == pb.REQUEST_STATE_FINISHED and explained.unread_tokens == 1
            assert explained.spans[-1].kind == pb.SPAN_KIND_CLIENT
            assert explained.spans[-1].seconds >= 0.03
            assert sum(span.seconds for span in explained.spans) == pytest.approx(explained.total_s)
            async for _ in pieces:
                pass
        await gateway.requests._deliveries.flush()
        explained = await gateway.requests.explain("r")
        assert explained == stored_explanation(*await gateway.requests.get("r"))
        assert explained.unread_s >= 0.06 and explained.unread_tokens == 0


async def test_unread_time_ends_for_a_departed_client() -> None:
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


def test_takeover_counts_earlier_tokens_as_read() -> None:
    explanation = pb.Explanation(total_s=9.0, unread_s=2.5)
    explanation.spans.add(kind=pb.SPAN_KIND_DECODE, seconds=9.0)
    entry = Entry("r", State.QUEUED, "g", 1e9, (4,), attempts=1, finish_reasons=(None,))
    stored = Stored(
        entry,
        make_request(),
        (StoredChoice(),),
        1e9 + 9.0,
        explanation=explanation.SerializeToString(),
    )
    assert resumed_journal(stored, 100.0).unread_s == 2.5
    assert Journal(100.0).unread_s == 0.0
