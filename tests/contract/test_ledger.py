"""Contract of all ledgers, in memory and on servers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any, assert_never

import pytest

from everlift.errors import (
    AttemptsExhausted,
    Cancelled,
    ForgottenRequest,
    OffsetOutOfRange,
    RequestConflict,
    UnknownRequest,
)
from everlift.messages import FinishReason
from everlift.v1 import session_pb2
from router.leader.adapter_catalogue import AdapterEntry, catalogue_of, setting_of
from router.ledger.base import (
    MAX_PAGE_SIZE,
    ClusterPolicy,
    Ledger,
    NotQueued,
    Page,
    Position,
    StaleTerm,
)
from router.ledger.entry import (
    MAX_EVENTS,
    Append,
    Appended,
    Dispatch,
    Entry,
    Explained,
    Move,
    Reasserted,
    State,
    Stored,
    StoredChoice,
    Tally,
    attempts_exhausted_message,
)
from tests.support.ledger.ledgers import (
    Tick,
    eventually,
    lose_answers,
    make_request,
    scored,
    tokens_of,
    unbury,
)

TERM = 2**63
EPOCH = 2**64 - 1
#: Equal to EPOCH in double precision.
NEAR_EPOCH = 2**64 - 2
#: Long enough for calls before its end, short enough to wait for its end.
LEASE_S = 0.25
AGES_S = 3600.0

TARGETS = {
    (State.QUEUED, Move.DISPATCH): State.RUNNING,
    (State.RUNNING, Move.APPEND): State.RUNNING,
    (State.RUNNING, Move.RELEASE): State.QUEUED,
    (State.QUEUED, Move.TAKE_OVER): State.QUEUED,
    (State.RUNNING, Move.TAKE_OVER): State.QUEUED,
    (State.QUEUED, Move.DISCARD): None,
    (State.QUEUED, Move.END): State.CANCELLED,
    (State.RUNNING, Move.END): State.CANCELLED,
    (State.FINISHED, Move.FORGET): None,
    (State.FAILED, Move.FORGET): None,
    (State.CANCELLED, Move.FORGET): None,
    (State.EXPIRED, Move.FORGET): None,
}
PAIRS = [
    pytest.param(state, move, id=f"{state.value}-{move.name.lower()}")
    for move in Move
    if move is not Move.OPEN
    for state in State
]


async def lead(ledger: Ledger, term: int = TERM) -> None:
    assert await ledger.lead("router", "127.0.0.1:1", term, AGES_S)


async def run(ledger: Ledger, request_id: str = "r", epoch: int = EPOCH) -> Entry:
    """Create a request on a worker, with three tokens; return its entry."""
    await ledger.open(make_request(request_id), "gateway")
    await lead(ledger)
    await ledger.dispatch(request_id, "worker", epoch, TERM)
    assert await store(ledger, Append(request_id, epoch, 0, (10, 11, 12))) is Appended.OK
    return await ledger.get(request_id)


async def store(ledger: Ledger, item: Append) -> Appended:
    [answer] = await ledger.append([item])
    return answer


async def bring(ledger: Ledger, state: State) -> Stored:
    """Create the request "r" in ``state``; return it as stored."""
    await ledger.open(make_request(), "gateway")
    await lead(ledger)
    if state is not State.QUEUED:
        await run(ledger)
    if state is State.FINISHED:
        await store(ledger, Append("r", EPOCH, 3, (13,), finish_reason=FinishReason.STOP))
    elif state.is_final:
        await ledger.end_request("r", state, "slug", "message")
    stored = await ledger.read("r")
    assert stored.entry.state is state
    return stored


async def make(ledger: Ledger, move: Move) -> object:
    """Make a move of "r"; return the ledger's answer."""
    match move:
        case Move.OPEN:
            return await ledger.open(make_request(), "gateway")
        case Move.DISPATCH:
            return await ledger.dispatch("r", "other worker", 7, TERM)
        case Move.APPEND:
            return await store(ledger, Append("r", EPOCH, 3, (20,)))
        case Move.RELEASE:
            return await ledger.release("r", EPOCH, loss=None, max_losses=3)
        case Move.TAKE_OVER:
            return replace(await ledger.take_over("r", "successor", "gateway"), now=0.0)
        case Move.DISCARD:
            return await ledger.discard("r", "gateway")
        case Move.END:
            return await ledger.end_request("r", State.CANCELLED, Cancelled.slug, "why")
        case Move.FORGET:
            return await ledger.erase("r")
        case _:
            assert_never(move)


async def content(ledger: Ledger) -> Stored | None:
    """Return all stored data of "r"; None if there is none."""
    try:
        return replace(await ledger.read("r"), now=0.0)
    except UnknownRequest:
        return None


# the table of moves


def test_moves_match_expected_table() -> None:
    allowed = {(state, move) for move in Move for state in move.sources}
    assert set(TARGETS) == allowed


@pytest.mark.parametrize(("state", "move"), PAIRS)
async def test_move_is_allowed_only_from_its_source_states(
    ledger: Ledger, state: State, move: Move
) -> None:
    before = replace(await bring(ledger, state), now=0.0)
    events = await ledger.events("r")
    refused = state not in move.sources
    if refused and move is Move.DISPATCH:
        with pytest.raises(NotQueued) as error:
            await make(ledger, move)
        assert error.value.entry == before.entry
    else:
        answer = await make(ledger, move)
        if refused:
            assert answer == refusal(move, before)
    after = await content(ledger)
    if refused:
        assert after == before
        assert await ledger.events("r") == events
    else:
        assert (after and after.entry.state) == TARGETS[state, move]
    if after and not refused:
        counted = move is not Move.APPEND
        assert after.entry.moves == before.entry.moves + counted
        assert [it.move for it in (await ledger.events("r"))[len(events) :]] == (
            [move.name.lower()] if counted else []
        )


def refusal(move: Move, before: Stored) -> object:
    match move:
        case Move.APPEND:
            return Appended.ENDED if before.entry.state.is_final else Appended.FENCED
        case Move.TAKE_OVER:
            return before
        case _:
            return before.entry


@pytest.mark.parametrize("state", State)
async def test_open_creates_each_id_once(ledger: Ledger, state: State) -> None:
    before = await bring(ledger, state)
    opened = await ledger.open(make_request(), "other gateway", timeout_s=5.0)
    assert (opened.created, opened.entry) == (False, before.entry)
    with pytest.raises(RequestConflict):
        await ledger.open(make_request(body=b"other"), "gateway")
    assert replace(await ledger.read("r"), now=before.now) == before


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED, State.EXPIRED])
@pytest.mark.parametrize("source", [State.QUEUED, State.RUNNING])
async def test_end_request_stores_state_and_error(
    ledger: Ledger, source: State, state: State
) -> None:
    before = (await bring(ledger, source)).entry
    entry = await ledger.end_request("r", state, "some_slug", "some message, ä")
    assert entry == replace(
        before,
        state=state,
        worker="",
        epoch=0,
        error_slug="some_slug",
        error_message="some message, ä",
        moves=before.moves + 1,
    )


@pytest.mark.parametrize("state", [State.QUEUED, State.RUNNING, State.FINISHED])
async def test_end_request_rejects_non_failure_states(ledger: Ledger, state: State) -> None:
    await run(ledger)
    with pytest.raises(ValueError, match=state.value):
        await ledger.end_request("r", state, "", "")


#: All moves but FORGET, whose repetition is rejected as unknown; its retry has a test below.
MADE = [
    pytest.param(s, m, id=f"{s.value}-{m.name.lower()}") for s, m in TARGETS if m is not Move.FORGET
]


@pytest.mark.parametrize(("state", "move"), MADE)
async def test_repeated_move_changes_nothing_and_answers_the_same(
    ledger: Ledger, state: State, move: Move
) -> None:
    await bring(ledger, state)
    first = await make(ledger, move)
    between = await content(ledger)
    assert await make(ledger, move) == first
    assert await content(ledger) == between
    if between:
        assert len(await ledger.events("r")) == between.entry.moves


async def test_moves_of_unknown_request_are_rejected(ledger: Ledger) -> None:
    await lead(ledger)
    assert await make(ledger, Move.APPEND) is Appended.UNKNOWN
    assert await make(ledger, Move.DISCARD) is None
    with pytest.raises(NotQueued) as error:
        await make(ledger, Move.DISPATCH)
    assert error.value.entry is None
    for move in (Move.RELEASE, Move.TAKE_OVER, Move.END, Move.FORGET):
        with pytest.raises(UnknownRequest):
            await make(ledger, move)
    for ask in (ledger.get, ledger.read, ledger.events):
        with pytest.raises(UnknownRequest):
            await ask("r")


async def test_entry_is_complete_after_full_lifecycle(ledger: Ledger) -> None:
    opened = await ledger.open(make_request(), "gateway")
    assert opened.created
    arrived = opened.entry.arrived
    assert opened.entry == Entry("r", State.QUEUED, "gateway", arrived, moves=1)
    await lead(ledger)
    running = Entry("r", State.RUNNING, "gateway", arrived, (0,), "w1", EPOCH, 1, moves=2)
    assert await ledger.dispatch("r", "w1", EPOCH, TERM) == running
    assert await store(ledger, Append("r", EPOCH, 0, (1, 2))) is Appended.OK
    tally = Tally(preemptions=2)
    lost = await ledger.release("r", EPOCH, loss="why", max_losses=3, tally=tally)
    assert lost == replace(
        running,
        state=State.QUEUED,
        num_tokens=(2,),
        worker="",
        epoch=0,
        losses=1,
        moves=3,
        tally=tally,
    )
    await ledger.dispatch("r", "w2", 5, TERM)
    tally = Tally(preemptions=3, migrations=1, recomputed_tokens=2**31)
    last = Append("r", 5, 2, (3,), finish_reason=FinishReason.LENGTH, tally=tally)
    assert await store(ledger, last) is Appended.FINISHED
    assert await ledger.get("r") == Entry(
        "r",
        State.FINISHED,
        "gateway",
        arrived,
        num_tokens=(3,),
        attempts=2,
        losses=1,
        finish_reasons=(FinishReason.LENGTH,),
        moves=5,
        tally=tally,
    )


async def test_open_with_dispatch_runs_immediately(ledger: Ledger) -> None:
    await lead(ledger)
    opened = await ledger.open(make_request(), "gateway", 9.0, Dispatch("w1", EPOCH, TERM))
    assert opened.created
    arrived = opened.entry.arrived
    running = Entry("r", State.RUNNING, "gateway", arrived, (0,), "w1", EPOCH, 1, moves=2)
    assert opened.entry == running
    events = [(event.move, event.detail) for event in await ledger.events("r")]
    assert events == [("open", "gateway"), ("dispatch", "w1")]
    assert await ledger.dispatch("r", "w1", EPOCH, TERM) == running
    assert (await ledger.read("r")).request.deadline == pytest.approx(arrived + 9.0)
    assert await store(ledger, Append("r", EPOCH, 0, (1, 2))) is Appended.OK


async def test_open_with_stale_term_leaves_request_queued(ledger: Ledger) -> None:
    await lead(ledger)
    for request_id, term in (("other", TERM + 1), ("r", TERM)):
        dispatch = Dispatch("w1", EPOCH, term)
        await ledger.open(make_request(request_id), "gateway", None, dispatch)
    assert (await ledger.get("r")).state is State.RUNNING
    entry = await ledger.get("other")
    assert entry == Entry("other", State.QUEUED, "gateway", entry.arrived, moves=1)
    assert (await ledger.dispatch("other", "w2", 5, TERM)).attempts == 1


async def test_open_with_dispatch_before_any_leader_is_queued(ledger: Ledger) -> None:
    opened = await ledger.open(make_request(), "gateway", None, Dispatch("w1", EPOCH, TERM))
    assert opened.entry.state is State.QUEUED


async def test_open_of_known_request_does_not_dispatch(ledger: Ledger) -> None:
    await lead(ledger)
    known = (await ledger.open(make_request(), "gateway")).entry
    dispatch = Dispatch("w1", EPOCH, TERM)
    opened = await ledger.open(make_request(), "other gateway", None, dispatch)
    assert (opened.created, opened.entry) == (False, known)
    with pytest.raises(RequestConflict):
        await ledger.open(make_request(body=b"other"), "gateway", None, dispatch)
    assert await ledger.get("r") == known


@pytest.mark.parametrize(("epoch", "term"), [(0, TERM), (EPOCH, 0), (1 << 64, TERM)])
async def test_open_with_dispatch_requires_valid_nonces(
    ledger: Ledger, epoch: int, term: int
) -> None:
    await lead(ledger)
    with pytest.raises(ValueError):
        await ledger.open(make_request(), "gateway", None, Dispatch("w1", epoch, term))


async def test_discard_frees_request_id(ledger: Ledger) -> None:
    await ledger.open(make_request(), "gateway")
    assert await ledger.discard("r", "gateway") is None
    opened = await ledger.open(make_request(body=b"other"), "other gateway")
    assert (opened.created, opened.entry.gateway) == (True, "other gateway")
    assert await ledger.orphans(10) == ["r"]


async def test_discard_by_former_owner_is_ignored(ledger: Ledger) -> None:
    """The former owner was frozen, and is notified late that the queue is full."""
    await ledger.open(make_request(), "gateway")
    taken = await ledger.take_over("r", "successor", "gateway")
    assert await ledger.discard("r", "gateway") == taken.entry
    assert await ledger.get("r") == taken.entry
    assert await ledger.discard("r", "successor") is None
    with pytest.raises(UnknownRequest):
        await ledger.get("r")


# stored requests


async def test_read_returns_request_with_deadline(ledger: Ledger) -> None:
    entry = (await ledger.open(make_request(), "gateway", timeout_s=2.5)).entry
    stored = await ledger.read("r")
    assert stored.request.deadline == pytest.approx(entry.arrived + 2.5)
    assert replace(stored.request, deadline=None) == make_request()
    assert stored.now >= entry.arrived


async def test_request_without_timeout_has_no_deadline(ledger: Ledger) -> None:
    await ledger.open(replace(make_request(), deadline=1.0), "gateway")
    assert (await ledger.take_over("r", "successor", "gateway")).request == make_request()


TOKENS = (0, 1, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 0x0A0D0A0D, 0x25000000)


async def test_read_returns_tokens_of_every_size_and_offset(ledger: Ledger) -> None:
    await ledger.open(make_request(max_tokens=len(TOKENS)), "gateway")
    await lead(ledger)
    await ledger.dispatch("r", "worker", EPOCH, TERM)
    assert await store(ledger, Append("r", EPOCH, 0, TOKENS)) is Appended.OK
    for offset in range(len(TOKENS) + 1):
        stored = await ledger.read("r", [offset])
        assert stored.choices == (StoredChoice(TOKENS[offset:], offset=offset),)
        assert stored.entry.num_tokens == (len(TOKENS),)


@pytest.mark.parametrize("offsets", [[-1], [4], [2**70], [0, 0]])
async def test_read_beyond_tokens_is_rejected(ledger: Ledger, offsets: list[int]) -> None:
    await run(ledger)
    with pytest.raises(OffsetOutOfRange):
        await ledger.read("r", offsets)


LEGAL = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-"


@pytest.mark.parametrize("request_id", [LEGAL, ":", "r:0", "r", "0:0:0", ".", "-" * 128])
async def test_request_ids_of_legal_characters_are_distinct(
    ledger: Ledger, request_id: str
) -> None:
    neighbours = ["r:0:0", "t:r:0", "owners", f"{request_id[:120]}:0"]
    for neighbour in neighbours:
        await run(ledger, neighbour)
    entry = await run(ledger, request_id)
    assert entry.request_id == request_id
    assert await tokens_of(ledger, request_id) == (10, 11, 12)
    await ledger.end_request(request_id, State.CANCELLED, Cancelled.slug, "")
    for neighbour in neighbours:
        assert (await ledger.get(neighbour)).state is State.RUNNING


async def test_gateway_name_may_look_like_hash_tag(ledger: Ledger) -> None:
    await ledger.open(make_request(), "{3}:r:{x}")
    assert await ledger.orphans(10) == ["r"]
    assert (await ledger.get("r")).gateway == "{3}:r:{x}"


# appends


async def test_append_trims_overlap(ledger: Ledger) -> None:
    await run(ledger)
    assert await store(ledger, Append("r", EPOCH, 1, (99, 99, 13, 14))) is Appended.OK
    assert await store(ledger, Append("r", EPOCH, 0, (99,))) is Appended.OK
    assert await store(ledger, Append("r", EPOCH, 5, ())) is Appended.OK
    assert await tokens_of(ledger, "r") == (10, 11, 12, 13, 14)


@pytest.mark.parametrize("reason", [None, FinishReason.STOP])
@pytest.mark.parametrize(
    ("offset", "tokens", "answer"),
    [
        (4, (14,), Appended.GAP),
        (4, (), Appended.GAP),
        (100, (14,), Appended.GAP),
        (3, (0,) * 6, Appended.LIMIT),
        (0, (0,) * 9, Appended.LIMIT),
    ],
)
async def test_append_with_gap_or_excess_is_rejected(
    ledger: Ledger,
    offset: int,
    tokens: tuple[int, ...],
    answer: Appended,
    reason: FinishReason | None,
) -> None:
    before = await run(ledger)
    item = Append("r", EPOCH, offset, tokens, finish_reason=reason)
    assert await store(ledger, item) is answer
    assert await ledger.get("r") == before


async def test_append_accepts_exactly_max_tokens(ledger: Ledger) -> None:
    await run(ledger)
    assert await store(ledger, Append("r", EPOCH, 3, (13, 14, 15, 16, 17))) is Appended.OK
    assert await store(ledger, Append("r", EPOCH, 8, (18,))) is Appended.LIMIT
    assert (await ledger.get("r")).num_tokens == (8,)


async def test_append_finishes_request_with_or_without_tokens(ledger: Ledger) -> None:
    for request_id, tokens in (("more", (13,)), ("none", ())):
        await run(ledger, request_id)
        item = Append(request_id, EPOCH, 3, tokens, finish_reason=FinishReason.STOP)
        assert await store(ledger, item) is Appended.FINISHED
        entry = await ledger.get(request_id)
        assert (entry.state, entry.num_tokens) == (State.FINISHED, (3 + len(tokens),))


async def test_finished_request_accepts_only_its_last_append(ledger: Ledger) -> None:
    await run(ledger)
    last = Append("r", EPOCH, 3, (13,), finish_reason=FinishReason.STOP)
    assert await store(ledger, last) is Appended.FINISHED
    assert await store(ledger, last) is Appended.FINISHED
    joined = replace(last, offset=2, tokens=(12, 13))
    assert await store(ledger, joined) is Appended.FINISHED
    for other in (
        replace(last, finish_reason=FinishReason.LENGTH),
        replace(last, finish_reason=None),
        replace(last, tokens=(13, 14)),
        replace(last, offset=5, tokens=()),
        replace(last, epoch=NEAR_EPOCH),
    ):
        assert await store(ledger, other) is Appended.ENDED
    assert await tokens_of(ledger, "r") == (10, 11, 12, 13)


async def test_append_rejected_item_leaves_others_intact(ledger: Ledger) -> None:
    for request_id in ("a", "b", "c", "d", "e"):
        await run(ledger, request_id)
    await ledger.end_request("e", State.CANCELLED, Cancelled.slug, "")
    answers = await ledger.append(
        [
            Append("a", EPOCH, 3, (13,)),
            Append("nobody", EPOCH, 0, (1,)),
            Append("b", NEAR_EPOCH, 3, (13,)),
            Append("c", EPOCH, 4, (14,)),
            Append("d", EPOCH, 3, (0,) * 6),
            Append("e", EPOCH, 3, (13,)),
            Append("a", EPOCH, 4, (14,), finish_reason=FinishReason.STOP),
        ]
    )
    assert [answer.value for answer in answers] == (
        ["ok", "unknown", "fenced", "gap", "limit", "ended", "finished"]
    )
    assert await tokens_of(ledger, "a") == (10, 11, 12, 13, 14)
    assert [(await ledger.get(i)).num_tokens for i in "bcde"] == [(3,)] * 4


async def test_append_answers_follow_item_order(ledger: Ledger) -> None:
    ids = [f"r{n}" for n in range(100)]
    await lead(ledger)
    for n, request_id in enumerate(ids):
        await ledger.open(make_request(request_id), "gateway")
        await ledger.dispatch(request_id, "worker", n + 1, TERM)
    items = [Append(r, n + 1 + n % 2, 0, (n,)) for n, r in enumerate(ids)]
    assert await ledger.append(items) == [Appended.OK, Appended.FENCED] * 50


async def test_append_accepts_empty_batch(ledger: Ledger) -> None:
    assert await ledger.append([]) == []


# choices

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


async def run_three(
    ledger: Ledger, request_id: str = "r", num_top: int | None = None, epoch: int = EPOCH
) -> Entry:
    """Create a request with three choices, and log probabilities if ``num_top``, on a worker."""
    request = make_request(request_id, n=3, logprobs=num_top, prompt_logprobs=num_top)
    await ledger.open(request, "gateway")
    await lead(ledger)
    return await ledger.dispatch(request_id, "worker", epoch, TERM)


async def test_choices_have_separate_tokens(ledger: Ledger) -> None:
    before = await run_three(ledger)
    assert (before.num_tokens, before.finish_reasons) == ((0, 0, 0), (None, None, None))
    items = [Append("r", EPOCH, 0, (choice, 9)[: choice + 1], choice) for choice in range(3)]
    assert await ledger.append(items) == [Appended.OK] * 3
    assert await store(ledger, Append("r", EPOCH, 1, (7, 8), choice=0)) is Appended.OK
    assert await store(ledger, Append("r", EPOCH, 3, (7,), choice=1)) is Appended.GAP
    assert await store(ledger, Append("r", EPOCH, 1, (0,) * 8, choice=2)) is Appended.LIMIT
    stored = await ledger.read("r")
    assert [choice.tokens for choice in stored.choices] == [(0, 7, 8), (1, 9), (2, 9)]
    assert stored.entry == replace(before, num_tokens=(3, 2, 2))
    later = await ledger.read("r", [2, 1])
    assert [choice.tokens for choice in later.choices] == [(8,), (9,), (2, 9)]
    assert [choice.offset for choice in later.choices] == [2, 1, 0]
    for offsets in ([4], [0, 3], [0, 0, -1], [0, 0, 0, 0]):
        with pytest.raises(OffsetOutOfRange):
            await ledger.read("r", offsets)


@pytest.mark.parametrize("choice", [3, 127, 2**31])
async def test_append_to_choice_beyond_n_is_rejected(ledger: Ledger, choice: int) -> None:
    await run_three(ledger)
    await run(ledger, "single")
    before = await content(ledger)
    for reason in (None, STOP):
        item = Append("r", EPOCH, 0, (1,), choice, reason)
        assert await store(ledger, item) is Appended.UNKNOWN
    assert await store(ledger, Append("single", EPOCH, 3, (1,), choice)) is Appended.UNKNOWN
    assert await content(ledger) == before


async def test_request_finishes_with_its_last_choice(ledger: Ledger) -> None:
    await run_three(ledger)
    assert await store(ledger, Append("r", EPOCH, 0, (5,), 1, STOP)) is Appended.OK
    entry = await ledger.get("r")
    assert (entry.state, entry.finish_reasons) == (State.RUNNING, (None, STOP, None))
    assert await store(ledger, Append("r", EPOCH, 0, (6, 7), 2)) is Appended.OK
    # The ended choice and its tokens are kept when the others resume elsewhere.
    entry = await ledger.release("r", EPOCH, loss="why", max_losses=3)
    assert (entry.state, entry.finish_reasons) == (State.QUEUED, (None, STOP, None))
    assert (await ledger.take_over("r", "successor", "gateway")).entry.num_tokens == (0, 1, 2)
    await ledger.dispatch("r", "other worker", 5, TERM)
    items = [Append("r", 5, 0, (), 0, LENGTH), Append("r", 5, 2, (8,), 2, STOP)]
    assert await ledger.append(items) == [Appended.OK, Appended.FINISHED]
    stored = await ledger.read("r")
    assert stored.entry.state is State.FINISHED
    assert (stored.entry.epoch, stored.entry.worker) == (0, "")
    assert stored.entry.finish_reasons == (LENGTH, STOP, STOP)
    assert [choice.tokens for choice in stored.choices] == [(), (5,), (6, 7, 8)]
    assert await ledger.orphans(10) == []


async def test_ended_choice_accepts_only_its_last_append(ledger: Ledger) -> None:
    await run_three(ledger)
    last = Append("r", EPOCH, 0, (5, 6), 1, STOP)
    assert await ledger.append([last, last]) == [Appended.OK, Appended.OK]
    assert await store(ledger, replace(last, offset=2, tokens=())) is Appended.OK
    for other in (
        replace(last, finish_reason=LENGTH),
        replace(last, finish_reason=None),
        replace(last, tokens=(5, 6, 7)),
        replace(last, offset=3, tokens=()),
    ):
        assert await store(ledger, other) is Appended.ENDED
    ends = [Append("r", EPOCH, 0, (), choice, LENGTH) for choice in (0, 2)]
    assert await ledger.append(ends) == [Appended.OK, Appended.FINISHED]
    assert await ledger.append([*ends, last]) == [Appended.FINISHED] * 3
    assert await store(ledger, replace(last, finish_reason=LENGTH)) is Appended.ENDED
    assert await store(ledger, replace(last, epoch=NEAR_EPOCH)) is Appended.ENDED


async def test_logprobs_are_stored_and_trimmed_with_tokens(ledger: Ledger) -> None:
    await run_three(ledger, num_top=2)
    first = scored(-0.5, -1.25, float("-inf"), num_top=2)
    item = Append("r", EPOCH, 0, (1, 2, 3), 1, logprobs=first)
    assert await store(ledger, item) is Appended.OK
    late = scored(-9.0, -9.0, -2.0, num_top=2)
    overlap = Append("r", EPOCH, 1, (8, 8, 4), 1, STOP, logprobs=late)
    assert await store(ledger, overlap) is Appended.OK
    assert await store(ledger, replace(item, offset=5)) is Appended.ENDED
    for stored in (await ledger.read("r"), await ledger.take_over("r", "successor", "gateway")):
        assert stored.choices[1] == StoredChoice((1, 2, 3, 4), (*first, late[-1]))
        assert stored.choices[0] == StoredChoice()
    for offset in range(5):
        choice = (await ledger.read("r", [0, offset])).choices[1]
        assert choice.logprobs == (*first, late[-1])[offset:]


async def test_rejected_append_stores_no_logprobs(ledger: Ledger) -> None:
    await run_three(ledger, num_top=0)
    one = Append("r", EPOCH, 0, (1,), logprobs=scored(-1.0), prompt_logprobs=scored(-3.0, -4.0))
    many = replace(one, tokens=(0,) * 9, logprobs=scored(*[-1.0] * 9))
    for refused in (replace(one, offset=1), replace(one, epoch=NEAR_EPOCH), many):
        assert await store(ledger, refused) is not Appended.OK
    stored = await ledger.read("r")
    assert (stored.choices[0], stored.prompt_logprobs) == (StoredChoice(), ())


async def test_prompt_logprobs_are_stored_once(ledger: Ledger) -> None:
    await run_three(ledger, num_top=1)
    assert (await ledger.read("r")).prompt_logprobs == ()
    first = scored(-3.0, -4.0, num_top=1)
    tokens = scored(-1.0, num_top=1)
    item = Append("r", EPOCH, 0, (1,), logprobs=tokens, prompt_logprobs=first)
    for _ in range(2):
        assert await store(ledger, item) is Appended.OK
    again = replace(item, prompt_logprobs=scored(-5.0, -6.0, num_top=1))
    assert await store(ledger, again) is Appended.OK
    stored = await ledger.take_over("r", "successor", "gateway")
    assert stored.prompt_logprobs == first
    assert stored.choices[0] == StoredChoice((1,), tokens)


def test_append_requires_logprobs_for_all_tokens_or_none() -> None:
    with pytest.raises(ValueError, match="1 logprobs for 2 tokens"):
        Append("r", EPOCH, 0, (1, 2), logprobs=scored(-1.0))


async def test_discard_removes_choices(ledger: Ledger) -> None:
    await ledger.open(make_request(n=3, logprobs=2), "gateway")
    await ledger.discard("r", "gateway")
    await ledger.open(make_request(body=b"other", n=2), "gateway")
    stored = await ledger.read("r")
    assert stored.choices == (StoredChoice(), StoredChoice())


# moves and events


async def history(ledger: Ledger, request_id: str = "r") -> list[tuple[str, str]]:
    return [(event.move, event.detail) for event in await ledger.events(request_id)]


async def test_moves_are_counted_and_leave_one_event_each(ledger: Ledger, tick: Tick) -> None:
    arrived = (await run_three(ledger)).arrived
    await ledger.append([Append("r", EPOCH, 0, (1,)), Append("r", EPOCH, 0, (), 1, STOP)])
    await tick()
    await ledger.release("r", EPOCH, loss="its worker said: no ä", max_losses=3)
    await ledger.dispatch("r", "second", 2, TERM)
    await ledger.release("r", 2, loss=None, max_losses=3)
    await ledger.take_over("r", "successor", "gateway")
    await ledger.dispatch("r", "third", 3, TERM)
    await ledger.append([Append("r", 3, 1, (), choice, LENGTH) for choice in (0, 2)])
    await ledger.append([Append("r", 3, 0, (), 2, LENGTH)])
    assert await history(ledger) == [
        ("open", "gateway"),
        ("dispatch", "worker"),
        ("release", "its worker said: no ä"),
        ("dispatch", "second"),
        ("release", ""),
        ("take_over", "successor"),
        ("dispatch", "third"),
        ("finish", ""),
    ]
    assert (await ledger.get("r")).moves == 8
    times = [event.time for event in await ledger.events("r")]
    assert times == sorted(times)
    assert arrived <= times[0] < times[2]


async def test_request_end_leaves_one_event(ledger: Ledger) -> None:
    await ledger.open(make_request("ended"), "gateway")
    await ledger.end_request("ended", State.EXPIRED, "deadline_exceeded", "it was late")
    assert await history(ledger, "ended") == [("open", "gateway"), ("end", "deadline_exceeded")]
    await run(ledger, "lost")
    await ledger.release("lost", EPOCH, loss="why", max_losses=1)
    assert (await history(ledger, "lost"))[2:] == [("release", "why")]
    assert (await ledger.get("lost")).moves == 3


async def test_events_keep_only_the_latest(ledger: Ledger) -> None:
    await ledger.open(make_request(), "gateway")
    await lead(ledger)
    for epoch in range(1, MAX_EVENTS + 1):
        await ledger.dispatch("r", f"w{epoch}", epoch, TERM)
        await ledger.release("r", epoch, loss=None, max_losses=3)
    kept = range(MAX_EVENTS // 2 + 1, MAX_EVENTS + 1)
    expected = [event for n in kept for event in (("dispatch", f"w{n}"), ("release", ""))]
    assert await history(ledger) == expected
    assert (await ledger.get("r")).moves == 1 + 2 * MAX_EVENTS


async def test_tally_is_stored_as_sent(ledger: Ledger) -> None:
    await run_three(ledger)
    many, few = Tally(2, 1, 2**40, 7), Tally(0, 0, 1)
    assert await store(ledger, Append("r", EPOCH, 0, (1,), tally=few)) is Appended.OK
    assert (await ledger.get("r")).tally == few
    assert await store(ledger, Append("r", EPOCH, 1, (1,))) is Appended.OK
    assert (await ledger.get("r")).tally == few
    end = Append("r", EPOCH, 0, (), 1, STOP, tally=many)
    assert await ledger.append([end, replace(end, choice=2, tally=None)]) == [Appended.OK] * 2
    assert (await ledger.get("r")).tally == many
    # A choice ends once: a repeated end changes nothing.
    assert await store(ledger, replace(end, tally=few)) is Appended.OK
    assert (await ledger.get("r")).tally == many
    assert (await ledger.release("r", EPOCH, loss=None, max_losses=3, tally=few)).tally == few
    await ledger.dispatch("r", "worker", 2, TERM)
    assert (await ledger.release("r", 2, loss="why", max_losses=1, tally=many)).tally == many


async def explanation(ledger: Ledger) -> bytes:
    return (await ledger.read("r")).explanation


async def test_explanation_is_kept_until_replaced(ledger: Ledger) -> None:
    await run_three(ledger)
    assert await explanation(ledger) == b""
    early = Append("r", EPOCH, 0, (1,), explanation=b"early")
    assert await store(ledger, early) is Appended.OK
    assert await explanation(ledger) == b""
    end = Append("r", EPOCH, 0, (), 1, STOP, explanation=b"\x00\xffend")
    await store(ledger, end)
    assert await explanation(ledger) == b"\x00\xffend"
    await store(ledger, replace(end, choice=2, explanation=b""))
    assert await explanation(ledger) == b"\x00\xffend"
    await ledger.release("r", EPOCH, loss=None, max_losses=3, explanation=b"release")
    assert await explanation(ledger) == b"release"
    await ledger.dispatch("r", "worker", 2, TERM)
    await ledger.release("r", 2, loss=None, max_losses=3)
    assert await explanation(ledger) == b"release"
    stored = await ledger.take_over("r", "successor", "gateway")
    assert stored.explanation == b"release"
    ended = ("r", State.FAILED, "slug", "message", "successor")
    await ledger.end_request(*ended)
    assert await explanation(ledger) == b"release"
    await ledger.end_request(*ended, b"too late")
    assert await explanation(ledger) == b"release"


@pytest.mark.parametrize("losses", [1, 2])
async def test_explanation_is_stored_by_ending_move(ledger: Ledger, losses: int) -> None:
    await run(ledger)
    await ledger.release("r", EPOCH, loss="why", max_losses=losses, explanation=b"lost")
    assert await explanation(ledger) == b"lost"
    entry = await ledger.end_request("r", State.CANCELLED, "slug", "message", None, b"ended")
    assert await explanation(ledger) == (b"lost" if entry.state is State.FAILED else b"ended")


async def test_explain_is_accepted_only_from_last_owner(ledger: Ledger) -> None:
    await run(ledger)
    entry = await ledger.get("r")
    explained = Explained("r", entry.gateway, entry.arrived, b"delivered")
    await ledger.explain([explained])
    assert await explanation(ledger) == b""
    ended = await ledger.end_request("r", State.CANCELLED, "slug", "message", None, b"ended")
    others = (
        replace(explained, request_id="other"),
        replace(explained, gateway="successor"),
        replace(explained, arrived=explained.arrived + 1),
    )
    await ledger.explain(others)
    assert await explanation(ledger) == b"ended"
    await ledger.explain([*others, explained])
    assert await explanation(ledger) == b"delivered"
    assert await ledger.get("r") == ended
    await ledger.explain([])


async def test_reassert_stores_explanation(ledger: Ledger) -> None:
    before = await run_rich(ledger)
    copy = replace(known_more(before, 5), explanation=b"reported")
    assert (await ledger.reassert(copy))[0] is Reasserted.OK
    assert await explanation(ledger) == b"reported"
    assert (await ledger.reassert(replace(copy, explanation=b"")))[0] is Reasserted.OK
    assert await explanation(ledger) == b"reported"


# erased and expired requests


async def test_erase_removes_whole_request(ledger: Ledger) -> None:
    await run_rich(ledger)
    await ledger.end_request("r", State.CANCELLED, Cancelled.slug, "")
    assert await ledger.erase("r") is None
    opened = await ledger.open(make_request(body=b"other", n=3, logprobs=2), "successor")
    assert (opened.created, opened.entry.moves) == (True, 1)
    stored = await ledger.read("r")
    assert (stored.choices, stored.prompt_logprobs) == ((StoredChoice(),) * 3, ())
    assert await history(ledger) == [("open", "successor")]


async def test_reused_id_outlives_erased_request(expiring: Ledger, tick: Tick) -> None:
    for request_id in ("r", "later"):
        await run(expiring, request_id)
        await expiring.end_request(request_id, State.CANCELLED, "", "")
    # On a busy machine the request may have expired already.
    with suppress(UnknownRequest):
        assert await expiring.erase("r") is None
    await expiring.open(make_request(), "gateway")

    async def other_is_over() -> bool:
        return not await knows(expiring, "later")

    await eventually(other_is_over, tick)
    assert (await expiring.get("r")).state is State.QUEUED


async def test_move_with_lost_answer_is_applied_once(ledger: Ledger) -> None:
    """The retry within a call whose answer is lost is recognised as a repetition."""
    lose_answers(ledger)
    await lead(ledger)
    request = make_request(n=2)
    assert (await ledger.open(request, "gateway")).created
    assert (await ledger.take_over("r", "gateway", "gateway")).entry.moves == 2
    assert (await ledger.dispatch("r", "worker", EPOCH, TERM)).moves == 3
    copy = await ledger.read("r")
    assert (await ledger.release("r", EPOCH, loss="why", max_losses=3)).losses == 1
    known = copy.entry.moves + 4
    copy = replace(copy, entry=replace(copy.entry, moves=known))
    assert await ledger.reassert(copy) == (Reasserted.OK, copy.entry)
    for choice, answer in ((0, Appended.OK), (1, Appended.FINISHED)):
        assert await store(ledger, Append("r", EPOCH, 0, (1,), choice, STOP)) is answer
    assert (await ledger.get("r")).moves == known + 1
    assert len(await ledger.events("r")) == 6
    assert await ledger.erase("r") is None
    assert await content(ledger) is None
    assert (await ledger.open(request, "gateway")).created
    assert (await ledger.end_request("r", State.EXPIRED, "", "")).moves == 2


async def test_reassert_of_erased_request_is_rejected(ledger: Ledger) -> None:
    """The gateway was frozen and taken for dead, so it counts more moves than the ledger."""
    copy = await run_rich(ledger)
    known = replace(copy, entry=replace(copy.entry, moves=copy.entry.moves + 7))
    await ledger.end_request("r", State.CANCELLED, "", "")
    assert await ledger.erase("r") is None
    for _ in range(2):
        assert await ledger.reassert(known) == (Reasserted.FORGOTTEN, known.entry)
        assert await content(ledger) is None
    # A later request with the same id is a different one.
    again = await ledger.open(copy.request, "other")
    assert again.created
    assert await ledger.reassert(known) == (Reasserted.FORGOTTEN, known.entry)
    assert await ledger.get("r") == again.entry


async def erased(ledger: Ledger, *, may_expire: bool = False) -> Stored:
    """Erase the request "r"; return it as it was.

    On a busy machine, it may expire before in a ledger with a short retention (``may_expire``).
    """
    await run(ledger)
    copy = await ledger.read("r")
    await ledger.end_request("r", State.CANCELLED, "", "")
    try:
        assert await ledger.erase("r") is None
    except UnknownRequest:
        assert may_expire
    return copy


async def test_read_distinguishes_forgotten_from_unknown_request(
    ledger: Ledger, expiring: Ledger, tick: Tick
) -> None:
    async def reason(ledger: Ledger, request_id: str) -> set[type[Exception]]:
        with pytest.raises(UnknownRequest) as read:
            await ledger.read(request_id)
        with pytest.raises(UnknownRequest) as got:
            await ledger.get(request_id)
        return {read.type, got.type}

    await erased(ledger)
    assert await reason(ledger, "r") == {ForgottenRequest}
    assert await reason(ledger, "other") == {UnknownRequest}
    assert (await ledger.open(make_request(), "gateway")).created
    assert (await ledger.get("r")).state is State.QUEUED
    await ledger.end_request("r", State.CANCELLED, "", "")
    assert await ledger.erase("r") is None
    assert await reason(ledger, "r") == {ForgottenRequest}
    await erased(expiring, may_expire=True)

    async def is_unknown() -> bool:
        return await reason(expiring, "r") == {UnknownRequest}

    await eventually(is_unknown, tick)


async def test_erased_id_is_remembered_for_retention(
    ledger: Ledger, expiring: Ledger, tick: Tick
) -> None:
    async def is_taken(ledger: Ledger, copy: Stored) -> bool:
        return (await ledger.reassert(copy))[0] is Reasserted.OK

    assert not await is_taken(ledger, await erased(ledger))
    copy = await erased(expiring, may_expire=True)
    await eventually(lambda: is_taken(expiring, copy), tick)


# resync


async def run_rich(ledger: Ledger) -> Stored:
    """Create a request with three choices, log probabilities, a deadline and an earlier loss.

    One of the choices has ended. Return the request as stored.
    """
    request = make_request(n=3, logprobs=2, prompt_logprobs=0)
    await ledger.open(request, "gateway", timeout_s=1000.000001)
    await lead(ledger)
    await ledger.dispatch("r", "first", 1, TERM)
    await ledger.release("r", 1, loss="why", max_losses=3, tally=Tally(1, 2, 3))
    await ledger.dispatch("r", "worker", EPOCH, TERM)
    prompt_logprobs = scored(-3.0, -4.0)
    for choice, reason in ((0, None), (1, STOP)):
        logprobs = scored(-1.0, -2.0 - choice, num_top=2)
        tokens = (2**32 - 1, choice)
        item = Append("r", EPOCH, 0, tokens, choice, reason, logprobs, prompt_logprobs)
        assert await store(ledger, item) is Appended.OK
    return await ledger.read("r")


async def lose(ledger: Ledger, request_id: str = "r") -> None:
    """Remove a request and all traces of it from the ledger."""
    entry = await ledger.end_request(request_id, State.CANCELLED, "", "")
    await ledger.erase(request_id)
    await unbury(ledger, entry)


def known_more(stored: Stored, *tokens: int, **changes: Any) -> Stored:
    """Return the gateway's copy, with two more moves and more ``tokens`` of choice 0."""
    entry = replace(stored.entry, **{"moves": stored.entry.moves + 2} | changes)
    return replace(stored, entry=entry, choices=longer(stored, *tokens))


def longer(stored: Stored, *tokens: int) -> tuple[StoredChoice, ...]:
    first, *others = stored.choices
    logprobs = scored(*[-0.5] * len(tokens), num_top=2) if first.logprobs else ()
    tokens, logprobs = first.tokens + tokens, first.logprobs + logprobs
    return (StoredChoice(tokens, logprobs), *others)


def counts(stored: Stored) -> tuple[int, ...]:
    return tuple(len(choice.tokens) for choice in stored.choices)


@pytest.mark.parametrize("state", State)
async def test_reassert_restores_lost_request(ledger: Ledger, state: State) -> None:
    await run_rich(ledger)
    if state is State.QUEUED:
        await ledger.release("r", EPOCH, loss=None, max_losses=3)
    elif state is State.FINISHED:
        ends = [Append("r", EPOCH, 0, (), choice, LENGTH) for choice in (0, 2)]
        assert await ledger.append(ends) == [Appended.OK, Appended.FINISHED]
    elif state.is_final:
        await ledger.end_request("r", state, "slug", "message, ä")
    copy = await ledger.read("r")
    assert copy.entry.state is state
    await lose(ledger)
    assert await ledger.reassert(copy) == (Reasserted.OK, copy.entry)
    assert await content(ledger) == replace(copy, now=0.0)
    assert await history(ledger) == [("reassert", "gateway")]
    assert await ledger.orphans(10) == ([] if state.is_final else ["r"])
    assert await ledger.reassert(copy) == (Reasserted.OK, copy.entry)
    assert await content(ledger) == replace(copy, now=0.0)
    assert len(await ledger.events("r")) == 1


async def test_reasserted_request_continues(ledger: Ledger) -> None:
    copy = await run_rich(ledger)
    await lose(ledger)
    await ledger.reassert(copy)
    logprobs = scored(-7.0, num_top=2)
    item = Append("r", EPOCH, 2, (7,), logprobs=logprobs, prompt_logprobs=scored(-8.0, -9.0))
    assert await store(ledger, replace(item, epoch=1)) is Appended.FENCED
    assert await store(ledger, item) is Appended.OK
    assert await store(ledger, Append("r", EPOCH, 0, (0,) * 9, 2)) is Appended.LIMIT
    stored = await ledger.read("r")
    assert stored.choices[0] == StoredChoice((2**32 - 1, 0, 7), copy.choices[0].logprobs + logprobs)
    assert stored.prompt_logprobs == copy.prompt_logprobs
    with pytest.raises(RequestConflict):
        await ledger.open(make_request(body=b"other"), "gateway")
    assert not (await ledger.open(make_request(), "gateway")).created


async def test_reasserted_final_request_is_kept_for_retention(expiring: Ledger, tick: Tick) -> None:
    copies = []
    for request_id in ("final", "complete", "unfinished"):
        await run(expiring, request_id)
        copies.append(await expiring.read(request_id))
        await lose(expiring, request_id)
    final, complete, unfinished = copies
    ended = {"state": State.FAILED, "worker": "", "epoch": 0}
    final = replace(final, entry=replace(final.entry, **ended))
    complete = replace(complete, entry=replace(complete.entry, finish_reasons=(STOP,)))
    for copy in (final, complete, unfinished):
        assert (await expiring.reassert(copy))[0] is Reasserted.OK

    async def is_over() -> bool:
        return not await knows(expiring, "final") and not await knows(expiring, "complete")

    assert not await is_over()
    await eventually(is_over, tick)
    assert await tokens_of(expiring, "unfinished") == (10, 11, 12)
    assert await expiring.orphans(10) == ["unfinished"]


@pytest.mark.parametrize("more", [-2, -1, 0])
async def test_reassert_adds_tokens_and_keeps_state(ledger: Ledger, more: int) -> None:
    before = await run_rich(ledger)
    stale = {"state": State.QUEUED, "worker": "", "epoch": 0, "tally": Tally(), "attempts": 1}
    copy = known_more(before, 5, 6, moves=before.entry.moves + more, **stale)
    expected = replace(before, entry=replace(before.entry, num_tokens=(4, 2, 0)), now=0.0)
    expected = replace(expected, choices=copy.choices)
    events = await history(ledger)
    for _ in range(2):
        assert await ledger.reassert(copy) == (Reasserted.OK, expected.entry)
        assert await content(ledger) == expected
    # The ledger also keeps the tokens and ends that a gateway's copy lacks.
    assert await ledger.reassert(before) == (Reasserted.OK, expected.entry)
    assert await content(ledger) == expected
    assert await history(ledger) == events


async def test_reassert_with_more_moves_replaces_state(ledger: Ledger) -> None:
    before = await run_rich(ledger)
    await ledger.heartbeat("successor", "address", AGES_S)
    copy = known_more(
        before,
        5,
        gateway="successor",
        worker="third",
        epoch=NEAR_EPOCH,
        arrived=round(before.entry.arrived - 1.000001, 6),
        attempts=7,
        losses=2,
        tally=Tally(4, 5, 6, 7),
        finish_reasons=(None, None, LENGTH),
    )
    copy = replace(copy, request=replace(copy.request, deadline=round(before.now + 0.000001, 6)))
    # The ledger keeps the end of a choice that the copy lacks.
    reasons = (None, STOP, LENGTH)
    entry = replace(copy.entry, num_tokens=(3, 2, 0), finish_reasons=reasons)
    events = await history(ledger)
    for _ in range(2):
        assert await ledger.reassert(copy) == (Reasserted.OK, entry)
        assert await content(ledger) == replace(copy, entry=entry, now=0.0)
        assert await history(ledger) == [*events, ("reassert", "successor")]
    assert await ledger.orphans(10) == []
    assert await store(ledger, Append("r", EPOCH, 3, (9,))) is Appended.FENCED
    assert await store(ledger, Append("r", NEAR_EPOCH, 3, (9,))) is Appended.OK


async def test_reassert_compares_move_counts_numerically(ledger: Ledger) -> None:
    before = await run_rich(ledger)
    for moves in (9, 10, 9):
        copy = known_more(before, moves=moves, worker=f"w{moves}")
        answer, entry = await ledger.reassert(copy)
        assert answer is Reasserted.OK
    assert (entry.moves, entry.worker) == (10, "w10")


async def test_reasserted_queued_request_fences_its_worker(ledger: Ledger) -> None:
    before = await run_rich(ledger)
    copy = known_more(before, state=State.QUEUED, worker="", epoch=0)
    answer, entry = await ledger.reassert(copy)
    assert (answer, entry.state, entry.worker) == (Reasserted.OK, State.QUEUED, "")
    assert await store(ledger, Append("r", EPOCH, 2, (9,))) is Appended.FENCED
    assert (await ledger.dispatch("r", "worker", 7, TERM)).moves == copy.entry.moves + 1


@pytest.mark.parametrize("more", [-1, 0])
async def test_reassert_by_former_owner_is_rejected(ledger: Ledger, more: int) -> None:
    before = await run_rich(ledger)
    await ledger.take_over("r", "successor", "gateway")
    taken = await ledger.read("r")
    for state in ({}, {"state": State.CANCELLED, "worker": "", "epoch": 0}):
        copy = known_more(before, 5, moves=taken.entry.moves + more, **state)
        assert await ledger.reassert(copy) == (Reasserted.TAKEN, taken.entry)
        assert await content(ledger) == replace(taken, now=0.0)
    assert len(await ledger.events("r")) == taken.entry.moves


async def test_reassert_with_more_moves_overrides_take_over(ledger: Ledger) -> None:
    before = await run_rich(ledger)
    taken = (await ledger.take_over("r", "successor", "gateway")).entry
    await ledger.heartbeat("successor", "address", AGES_S)
    copy = known_more(before, moves=taken.moves + 1)
    assert await ledger.reassert(copy) == (Reasserted.OK, copy.entry)
    assert await ledger.orphans(10) == ["r"]
    assert await ledger.end_request("r", State.FAILED, "", "", owner="successor") == copy.entry
    late = await ledger.take_over("r", "late successor", "successor")
    assert late.entry == copy.entry


def changed(stored: Stored, index: int, tokens: tuple[int, ...], reason: object) -> Stored:
    """Return a gateway's copy with other tokens or another finish reason of one choice."""
    choices, reasons = list(stored.choices), list(stored.entry.finish_reasons)
    choices[index] = StoredChoice(tokens, scored(*[-1.0] * len(tokens), num_top=2))
    reasons[index] = reason  # type: ignore[call-overload]
    entry = replace(stored.entry, finish_reasons=tuple(reasons))
    return replace(stored, entry=entry, choices=tuple(choices))


@pytest.mark.parametrize(
    ("index", "tokens", "reason"),
    [
        pytest.param(0, (1, 0), None, id="first token"),
        pytest.param(0, (2**32 - 1, 2**24, 5), None, id="last byte of the last token"),
        pytest.param(0, (1,), None, id="only token"),
        pytest.param(0, (2**32 - 1,), STOP, id="ended before what is known"),
        pytest.param(1, (2**32 - 1, 1), LENGTH, id="other reason"),
        pytest.param(1, (2**32 - 1, 1, 5), None, id="goes on after its end"),
        pytest.param(1, (2**32 - 1, 1, 5), STOP, id="ended after its end"),
    ],
)
@pytest.mark.parametrize("is_final", [False, True])
async def test_reassert_with_diverged_tokens_is_rejected(
    ledger: Ledger, index: int, tokens: tuple[int, ...], reason: object, is_final: bool
) -> None:
    before = await run_rich(ledger)
    if is_final:
        await ledger.end_request("r", State.CANCELLED, "", "")
    copy = changed(known_more(before), index, tokens, reason)
    before = await ledger.read("r")
    assert await ledger.reassert(copy) == (Reasserted.DIVERGED, before.entry)
    assert await content(ledger) == replace(before, now=0.0)


async def test_reassert_with_other_body_is_rejected(ledger: Ledger) -> None:
    copy = await run_rich(ledger)
    await lose(ledger)
    await ledger.open(make_request(body=b"other"), "gateway")
    opened = await ledger.get("r")
    assert await ledger.reassert(copy) == (Reasserted.DIVERGED, opened)
    assert (await ledger.read("r")).choices == (StoredChoice(),)


async def test_reassert_replaces_newer_request_of_same_body(
    ledger: Ledger,
) -> None:
    copy = await run_rich(ledger)
    await lose(ledger)
    await ledger.open(replace(copy.request, deadline=None), "other gateway", timeout_s=5.0)
    assert await ledger.reassert(copy) == (Reasserted.OK, copy.entry)
    assert await content(ledger) == replace(copy, now=0.0)


async def test_reassert_does_not_change_ended_request(ledger: Ledger) -> None:
    before = await run_rich(ledger)
    await ledger.end_request("r", State.CANCELLED, Cancelled.slug, "")
    ended = await ledger.read("r")
    copy = known_more(before, 5, 6)
    assert await ledger.reassert(copy) == (Reasserted.ENDED, ended.entry)
    failed = known_more(before, 5, state=State.FAILED, worker="", epoch=0, error_slug="other")
    complete = known_more(before, 5, finish_reasons=(LENGTH, STOP, LENGTH))
    for copy in (failed, complete):
        assert await ledger.reassert(copy) == (Reasserted.OK, ended.entry)
    assert await content(ledger) == replace(ended, now=0.0)
    assert len(await ledger.events("r")) == ended.entry.moves
    assert await ledger.orphans(10) == []


async def test_reassert_restores_lost_finish(ledger: Ledger) -> None:
    before = await run_rich(ledger)
    finished = {"state": State.FINISHED, "worker": "", "epoch": 0}
    copy = known_more(before, 5, finish_reasons=(STOP, STOP, LENGTH), **finished)
    entry = replace(copy.entry, num_tokens=(3, 2, 0))
    for _ in range(2):
        assert await ledger.reassert(copy) == (Reasserted.OK, entry)
    assert await store(ledger, Append("r", EPOCH, 3, (5,))) is Appended.ENDED
    assert (await ledger.read("r")).choices == copy.choices
    assert await ledger.orphans(10) == []


@pytest.mark.parametrize("more", [0, 2])
async def test_reassert_of_last_choice_end_finishes_request(ledger: Ledger, more: int) -> None:
    """The gateway did not receive the finish, or its append is still in flight."""
    before = await run_rich(ledger)
    reasons, moves = (STOP, STOP, LENGTH), before.entry.moves + more
    copy = known_more(before, 5, finish_reasons=reasons, moves=moves)
    finished = {"state": State.FINISHED, "worker": "", "epoch": 0, "moves": moves + 1}
    entry = replace(copy.entry, num_tokens=(3, 2, 0), **finished)
    events = await history(ledger)
    for _ in range(2):
        assert await ledger.reassert(copy) == (Reasserted.OK, entry)
        assert await history(ledger) == [*events, ("reassert", "gateway")]
    last = Append("r", EPOCH, 2, (5,), 0, STOP)
    assert await store(ledger, last) is Appended.FINISHED
    assert await store(ledger, replace(last, epoch=1)) is Appended.ENDED
    assert await ledger.orphans(10) == []


async def test_reassert_merges_choice_ends_into_finish(ledger: Ledger) -> None:
    before = await run_rich(ledger)
    copy = known_more(before, 5, finish_reasons=(STOP, None, LENGTH))
    for _ in range(2):
        answer, entry = await ledger.reassert(copy)
        assert (answer, entry.state) == (Reasserted.ENDED, State.FINISHED)
        assert entry.finish_reasons == (STOP, STOP, LENGTH)
        assert entry.moves == copy.entry.moves + 1
    assert (await history(ledger))[-1] == ("reassert", "gateway")
    assert await ledger.orphans(10) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epoch": 0}, "running does not match epoch 0"),
        ({"state": State.QUEUED}, "queued does not match epoch"),
        ({"moves": 0}, "moves must be at least 1"),
        ({"finish_reasons": (None, None)}, "choices must be 3"),
    ],
)
async def test_reassert_rejects_inconsistent_entry(
    ledger: Ledger, changes: dict[str, Any], words: str
) -> None:
    copy = await run_rich(ledger)
    with pytest.raises(ValueError, match=words):
        await ledger.reassert(replace(copy, entry=replace(copy.entry, **changes)))


async def test_reassert_requires_tokens_from_offset_0(ledger: Ledger) -> None:
    await run_rich(ledger)
    with pytest.raises(ValueError, match="offset 0"):
        await ledger.reassert(await ledger.read("r", [1]))


async def test_reassert_accepts_very_long_output(ledger: Ledger) -> None:
    count = 3000
    request = make_request(max_tokens=count, logprobs=2)
    tokens, logprobs = tuple(range(count)), scored(*[-1.0] * count, num_top=2)
    entry = Entry("r", State.RUNNING, "gateway", 1.5, (count,), "worker", EPOCH, 1, moves=2)
    copy = Stored(entry, request, (StoredChoice(tokens, logprobs),), now=0.0)
    assert await ledger.reassert(copy) == (Reasserted.OK, entry)
    assert await content(ledger) == copy


# fences

EPOCHS = [1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("epoch", EPOCHS)
async def test_epochs_are_compared_to_the_last_bit(ledger: Ledger, epoch: int) -> None:
    entry = await run(ledger, epoch=epoch)
    assert entry.epoch == epoch
    for other in {epoch - 1, (epoch + 1) % 2**64, 0}:
        assert await store(ledger, Append("r", other, 3, (13,))) is Appended.FENCED
        assert await ledger.release("r", other, loss="why", max_losses=1) == entry


@pytest.mark.parametrize("term", EPOCHS)
async def test_terms_are_compared_to_the_last_bit(ledger: Ledger, term: int) -> None:
    await ledger.open(make_request(), "gateway")
    await lead(ledger, term)
    for other in {term - 1, (term + 1) % 2**64} - {0}:
        with pytest.raises(StaleTerm):
            await ledger.dispatch("r", "worker", 1, other)
        assert not await ledger.lead("other", "address", other, AGES_S)
    assert (await ledger.heartbeat("gateway", "address", AGES_S)).term == term
    assert (await ledger.dispatch("r", "worker", 1, term)).state is State.RUNNING


@pytest.mark.parametrize("nonce", [0, -1, 2**64])
async def test_invalid_nonce_is_rejected(ledger: Ledger, nonce: int) -> None:
    await ledger.open(make_request(), "gateway")
    await lead(ledger)
    for epoch, term in ((nonce, TERM), (1, nonce)):
        with pytest.raises(ValueError, match="64"):
            await ledger.dispatch("r", "worker", epoch, term)
    with pytest.raises(ValueError, match="64"):
        await ledger.lead("router", "address", nonce, AGES_S)


async def test_released_worker_is_fenced(ledger: Ledger) -> None:
    await run(ledger, epoch=1)
    await ledger.release("r", 1, loss="why", max_losses=3)
    assert await store(ledger, Append("r", 1, 3, (99,))) is Appended.FENCED
    await ledger.dispatch("r", "second worker", 2, TERM)
    late = Append("r", 1, 3, (99,), finish_reason=FinishReason.STOP)
    assert await store(ledger, late) is Appended.FENCED
    entry = await ledger.release("r", 1, loss="why", max_losses=2)
    assert (entry.state, entry.epoch, entry.losses) == (State.RUNNING, 2, 1)
    assert await store(ledger, Append("r", 2, 3, (13,))) is Appended.OK
    assert await tokens_of(ledger, "r") == (10, 11, 12, 13)


async def test_queued_request_fences_epoch_0(ledger: Ledger) -> None:
    await run(ledger)
    before = await ledger.release("r", EPOCH, loss=None, max_losses=3)
    late = Append("r", 0, 3, (99,), finish_reason=FinishReason.STOP)
    assert await store(ledger, late) is Appended.FENCED
    assert await ledger.release("r", 0, loss="why", max_losses=3) == before
    assert await ledger.get("r") == before


async def test_release_counts_losses_until_failure(ledger: Ledger) -> None:
    await ledger.open(make_request(), "gateway")
    await lead(ledger)
    for epoch in (1, 2, 3):
        await ledger.dispatch("r", "worker", epoch, TERM)
        entry = await ledger.release("r", epoch, loss=None if epoch == 2 else "why", max_losses=2)
    assert (entry.state, entry.attempts, entry.losses) == (State.FAILED, 3, 2)
    assert (entry.error_slug, entry.error_message) == (
        AttemptsExhausted.slug,
        attempts_exhausted_message(2, "why"),
    )


async def test_release_without_loss_requeues_despite_earlier_losses(ledger: Ledger) -> None:
    await run(ledger, epoch=1)
    await ledger.release("r", 1, loss="why", max_losses=2)
    await ledger.dispatch("r", "worker", 2, TERM)
    entry = await ledger.release("r", 2, loss=None, max_losses=1)
    assert (entry.state, entry.losses) == (State.QUEUED, 1)


async def test_repeated_dispatch_is_answered_under_old_term(ledger: Ledger) -> None:
    entry = await run(ledger)
    assert await ledger.dispatch("r", "worker", EPOCH, TERM) == entry
    await ledger.resign(TERM)
    await lead(ledger, 5)
    assert await ledger.dispatch("r", "worker", EPOCH, TERM) == entry
    with pytest.raises(StaleTerm):
        await ledger.dispatch("r", "worker", NEAR_EPOCH, TERM)
    with pytest.raises(NotQueued) as error:
        await ledger.dispatch("r", "worker", NEAR_EPOCH, 5)
    assert error.value.entry == entry


async def test_concurrent_dispatches_have_one_winner(ledger: Ledger) -> None:
    await ledger.open(make_request(), "gateway")
    await lead(ledger)
    answers = await asyncio.gather(
        *(ledger.dispatch("r", f"w{n}", n + 1, TERM) for n in range(100)), return_exceptions=True
    )
    [winner] = [answer for answer in answers if isinstance(answer, Entry)]
    losers = [answer for answer in answers if isinstance(answer, NotQueued)]
    assert len(losers) == 99
    assert {loser.entry for loser in losers} == {winner}
    assert await ledger.get("r") == winner


# gateways


async def test_requests_of_gone_gateway_are_orphaned(ledger: Ledger, tick: Tick) -> None:
    await ledger.heartbeat("living", "127.0.0.1:1", AGES_S)
    for request_id, gateway in (("a", "living"), ("b", "leaving"), ("c", "dying"), ("d", "never")):
        await ledger.open(make_request(request_id), gateway)
    await ledger.heartbeat("dying", "127.0.0.1:3", AGES_S)
    await ledger.heartbeat("leaving", "127.0.0.1:2", AGES_S)
    assert await ledger.orphans(10) == ["d"]
    assert set(await ledger.gateways()) == {"living", "leaving", "dying"}
    await ledger.heartbeat("dying", "127.0.0.1:3", LEASE_S)

    async def only_two_live() -> bool:
        return set(await ledger.gateways()) == {"living", "leaving"}

    await eventually(only_two_live, tick)
    await tick()
    await ledger.end_lease("leaving")
    assert await ledger.gateways() == {"living": "127.0.0.1:1"}
    assert await ledger.orphans(10) == ["d", "c", "b"]
    assert await ledger.orphans(2) == ["d", "c"]


async def test_renewed_gateway_lease_does_not_expire(ledger: Ledger, tick: Tick) -> None:
    await ledger.open(make_request("kept"), "kept")
    await ledger.open(make_request("gone"), "gone")
    await ledger.heartbeat("kept", "address", LEASE_S)
    await ledger.heartbeat("gone", "address", LEASE_S)
    await ledger.heartbeat("kept", "address", AGES_S)

    async def is_gone() -> bool:
        return await ledger.orphans(10) == ["gone"]

    await eventually(is_gone, tick)
    assert list(await ledger.gateways()) == ["kept"]
    await ledger.heartbeat("gone", "new address", AGES_S)
    assert (await ledger.gateways())["gone"] == "new address"


async def test_end_lease_accepts_repeated_or_unknown_gateway(ledger: Ledger) -> None:
    await ledger.heartbeat("gateway", "address", AGES_S)
    for _ in range(2):
        await ledger.end_lease("gateway")
        await ledger.end_lease("nobody")
    assert await ledger.gateways() == {}


async def test_orphan_is_listed_until_taken_over_or_ended(ledger: Ledger) -> None:
    await ledger.heartbeat("successor", "address", AGES_S)
    for request_id in ("adopted", "finished", "discarded"):
        await ledger.open(make_request(request_id), "dead")
    await run(ledger, "adopted")
    assert set(await ledger.orphans(10)) == {"adopted", "finished", "discarded"}
    await ledger.end_request("finished", State.EXPIRED, "", "")
    await ledger.discard("discarded", "dead")
    stored = await ledger.take_over("adopted", "successor", "dead")
    assert (stored.entry.gateway, stored.entry.epoch) == ("successor", 0)
    assert stored.choices == (StoredChoice((10, 11, 12)),)
    assert await ledger.orphans(10) == []
    assert await store(ledger, Append("adopted", EPOCH, 3, (13,))) is Appended.FENCED
    await ledger.end_lease("successor")
    assert await ledger.orphans(10) == ["adopted"]


async def test_arrival_time_is_kept_over_every_move(ledger: Ledger, tick: Tick) -> None:
    arrived = (await run(ledger)).arrived
    await tick()
    await ledger.release("r", EPOCH, loss="why", max_losses=3)
    await ledger.take_over("r", "successor", "gateway")
    assert (await ledger.dispatch("r", "worker", 5, TERM)).arrived == arrived
    assert (await ledger.open(make_request("later"), "gateway")).entry.arrived > arrived


async def test_ended_requests_expire_and_running_ones_do_not(
    ledger: Ledger, expiring: Ledger, tick: Tick
) -> None:
    for each in (ledger, expiring):
        for request_id in ("finished", "ended", "failed", "running"):
            await run(each, request_id)
        last = Append("finished", EPOCH, 3, (), finish_reason=FinishReason.STOP)
        assert await store(each, last) is Appended.FINISHED
        await each.end_request("ended", State.CANCELLED, "", "")
        await each.release("failed", EPOCH, loss="why", max_losses=1)
    assert all([await knows(ledger, r) for r in ("finished", "ended", "failed")])

    async def all_forgotten() -> bool:
        known = [await knows(expiring, r) for r in ("finished", "ended", "failed")]
        return not any(known)

    await eventually(all_forgotten, tick)
    assert await tokens_of(expiring, "running") == (10, 11, 12)
    assert (await expiring.open(make_request("ended", body=b"other"), "gateway")).created


async def knows(ledger: Ledger, request_id: str) -> bool:
    try:
        await ledger.get(request_id)
    except UnknownRequest:
        return False
    return True


@pytest.mark.parametrize("state", [State.QUEUED, State.RUNNING])
async def test_take_over_requires_current_owner(ledger: Ledger, state: State) -> None:
    before = replace(await bring(ledger, state), now=0.0)
    for owner in ("successor", "other gateway", ""):
        stored = await ledger.take_over("r", "successor", owner)
        assert replace(stored, now=0.0) == before
        assert await content(ledger) == before
    changes = {"state": State.QUEUED, "gateway": "successor", "worker": "", "epoch": 0}
    entry = replace(before.entry, moves=before.entry.moves + 1, **changes)
    assert (await ledger.take_over("r", "successor", "gateway")).entry == entry
    assert (await ledger.take_over("r", "late successor", "gateway")).entry == entry
    assert await content(ledger) == replace(before, entry=entry)


async def test_take_over_of_own_request_requeues_it(ledger: Ledger) -> None:
    before = await run(ledger)
    entry = replace(before, state=State.QUEUED, worker="", epoch=0, moves=3)
    assert (await ledger.take_over("r", "gateway", "gateway")).entry == entry


async def test_concurrent_take_overs_have_one_winner(ledger: Ledger) -> None:
    await run(ledger)
    successors = [f"successor {n}" for n in range(20)]
    answers = await asyncio.gather(
        *(ledger.take_over("r", successor, "gateway") for successor in successors)
    )
    [winner] = {stored.entry.gateway for stored in answers}
    assert winner in successors
    assert (await ledger.get("r")).gateway == winner


@pytest.mark.parametrize("state", [State.QUEUED, State.RUNNING])
async def test_end_request_requires_current_owner(ledger: Ledger, state: State) -> None:
    before = (await bring(ledger, state)).entry
    for owner in ("other gateway", ""):
        assert await ledger.end_request("r", State.FAILED, "slug", "why", owner) == before
        assert await ledger.get("r") == before
    taken = (await ledger.take_over("r", "successor", "gateway")).entry
    assert await ledger.end_request("r", State.FAILED, "slug", "why", owner="gateway") == taken
    assert await ledger.get("r") == taken
    ended = await ledger.end_request("r", State.FAILED, "slug", "why", owner="successor")
    failed = {"state": State.FAILED, "error_slug": "slug", "error_message": "why"}
    assert ended == replace(taken, moves=taken.moves + 1, **failed)
    for owner in ("successor", "gateway"):
        assert await ledger.end_request("r", State.EXPIRED, "other", "", owner) == ended
    assert await ledger.orphans(10) == []


# leadership


async def test_dispatch_before_any_leader_is_rejected(ledger: Ledger) -> None:
    await ledger.open(make_request(), "gateway")
    with pytest.raises(StaleTerm):
        await ledger.dispatch("r", "worker", EPOCH, TERM)
    membership = await ledger.heartbeat("gateway", "address", AGES_S)
    assert (membership.leader, membership.leader_address, membership.term) == ("", "", 0)


async def test_leader_is_sole_until_lease_expires(ledger: Ledger, tick: Tick) -> None:
    for n in range(10):
        await ledger.open(make_request(f"r{n}"), "gateway")
    assert await ledger.lead("first", "127.0.0.1:1", 1, AGES_S)
    assert not await ledger.lead("second", "127.0.0.1:2", 2, AGES_S)
    assert not await ledger.lead("first", "127.0.0.1:1", 3, AGES_S)
    membership = await ledger.heartbeat("gateway", "address", AGES_S)
    assert (membership.leader, membership.leader_address) == ("first", "127.0.0.1:1")
    assert await ledger.lead("first", "127.0.0.1:1", 1, LEASE_S)

    async def nobody_leads() -> bool:
        return not (await ledger.heartbeat("gateway", "address", AGES_S)).leader

    await eventually(nobody_leads, tick)
    # Dispatches of the last leader are accepted until another router leads.
    await ledger.dispatch("r9", "worker", 9, 1)
    assert await ledger.lead("second", "127.0.0.1:2", 2, AGES_S)
    assert not await ledger.lead("first", "127.0.0.1:1", 1, AGES_S)
    for n in range(9):
        with pytest.raises(StaleTerm):
            await ledger.dispatch(f"r{n}", "worker", n + 1, 1)
        assert (await ledger.dispatch(f"r{n}", "worker", n + 1, 2)).state is State.RUNNING


async def test_leader_renewal_keeps_leadership(ledger: Ledger, tick: Tick) -> None:
    assert await ledger.lead("first", "address", 1, LEASE_S)
    await ledger.heartbeat("watch", "address", LEASE_S)
    assert await ledger.lead("first", "address", 1, AGES_S)

    async def is_first_lease_over() -> bool:
        assert not await ledger.lead("second", "address", 2, LEASE_S)
        return not await ledger.gateways()

    await eventually(is_first_lease_over, tick)
    assert not await ledger.lead("second", "address", 2, LEASE_S)


async def test_resigned_lease_is_free_immediately(ledger: Ledger) -> None:
    await lead(ledger, 1)
    await ledger.resign(2)
    assert not await ledger.lead("second", "address", 2, AGES_S)
    await ledger.resign(1)
    await ledger.resign(1)
    assert (await ledger.heartbeat("gateway", "address", AGES_S)).term == 0
    assert await ledger.lead("second", "address", 2, AGES_S)


@pytest.mark.parametrize("is_over", [True, False])
async def test_stale_leader_cannot_renew(ledger: Ledger, tick: Tick, is_over: bool) -> None:
    """A stale leader's state is outdated even if no router leads; it can acquire the lease anew."""
    assert await ledger.lead("first", "address", 1, AGES_S)
    await ledger.resign(1)
    assert await ledger.lead("second", "address", 2, LEASE_S if is_over else AGES_S)
    if is_over:

        async def nobody_leads() -> bool:
            return not (await ledger.heartbeat("gateway", "address", AGES_S)).leader

        await eventually(nobody_leads, tick)
    else:
        await ledger.resign(2)
    assert not await ledger.lead("first", "address", 1, AGES_S, is_new=False)
    assert await ledger.lead("second", "address", 2, AGES_S, is_new=False)
    await ledger.resign(2)
    assert await ledger.lead("first", "address", 1, AGES_S)
    assert await ledger.lead("first", "address", 1, AGES_S, is_new=False)


async def test_lead_renews_term_on_empty_ledger(ledger: Ledger) -> None:
    """The ledger has lost all state while the leader is alive."""
    await ledger.open(make_request(), "gateway")
    assert await ledger.lead("router", "address", TERM, AGES_S, is_new=False)
    assert (await ledger.heartbeat("gateway", "address", AGES_S)).term == TERM
    assert (await ledger.dispatch("r", "worker", EPOCH, TERM)).state is State.RUNNING


async def test_leadership_moves_to_other_term_and_back(ledger: Ledger) -> None:
    await ledger.open(make_request(), "gateway")
    for term in (1, 2, 1):
        await lead(ledger, term)
        await ledger.resign(term)
    with pytest.raises(StaleTerm):
        await ledger.dispatch("r", "worker", EPOCH, 2)
    assert (await ledger.dispatch("r", "worker", EPOCH, 1)).epoch == EPOCH


# workers


async def test_workers_version_changes_only_with_table(ledger: Ledger) -> None:
    async def version() -> int:
        return (await ledger.heartbeat("gateway", "address", AGES_S)).workers_version

    first = session_pb2.WorkerInfo(worker_id="w1", address="127.0.0.1:1", num_blocks=64)
    second = session_pb2.WorkerInfo(worker_id="w0", address="127.0.0.1:2", pid=7)
    moved = session_pb2.WorkerInfo(worker_id="w1", address="127.0.0.1:3", num_blocks=64)
    versions = [await version()]
    for change, table in (
        (ledger.put_worker(first), [first]),
        (ledger.put_worker(second), [second, first]),
        (ledger.put_worker(moved), [second, moved]),
        (ledger.drop_worker("w1"), [second]),
    ):
        await change
        assert await ledger.workers() == table
        versions.append(await version())
    assert len(set(versions)) == 5
    await ledger.put_worker(second)
    await ledger.drop_worker("w1")
    assert await version() == versions[-1]


async def test_worker_replaces_previous_worker_at_its_address(ledger: Ledger) -> None:
    async def version() -> int:
        return (await ledger.heartbeat("gateway", "address", AGES_S)).workers_version

    def worker(worker_id: str, port: int, pid: int = 1) -> session_pb2.WorkerInfo:
        return session_pb2.WorkerInfo(worker_id=worker_id, address=f"127.0.0.1:{port}", pid=pid)

    async def put(info: session_pb2.WorkerInfo) -> list[session_pb2.WorkerInfo]:
        before = await version()
        await ledger.put_worker(info)
        after = await version()
        assert after != before
        await ledger.put_worker(info)
        assert await version() == after
        return await ledger.workers()

    other = worker("a", 1)
    assert await put(other) == [other]
    assert await put(worker("b", 2)) == [other, worker("b", 2)]
    assert await put(worker("c", 2)) == [other, worker("c", 2)]
    assert await put(worker("c", 2, pid=7)) == [other, worker("c", 2, pid=7)]
    # A worker at an address that another one has left does not replace that one.
    assert await put(worker("c", 3)) == [other, worker("c", 3)]
    assert await put(worker("d", 2)) == [other, worker("c", 3), worker("d", 2)]
    # A worker that moves to another one's address replaces that one.
    assert await put(worker("c", 2)) == [other, worker("c", 2)]
    await ledger.drop_worker("c")
    assert await put(worker("e", 2)) == [other, worker("e", 2)]
    assert await put(worker("b", 2)) == [other, worker("b", 2)]


async def test_last_workers_are_remembered_after_removal(ledger: Ledger) -> None:
    first, second = (
        session_pb2.WorkerInfo(worker_id=name, address=f"127.0.0.1:{port}", model="m")
        for port, name in enumerate(("w1", "w0"), 1)
    )
    other = session_pb2.WorkerInfo(worker_id="w2", address="127.0.0.1:3", model="a")
    assert await ledger.last_workers() == []
    for info in (first, second):
        await ledger.put_worker(info)
        assert await ledger.last_workers() == [info]
    await ledger.put_worker(other)
    for info in (second, first, other):
        await ledger.drop_worker(info.worker_id)
    assert await ledger.workers() == []
    assert await ledger.last_workers() == [other, second]


# load


async def test_load_is_read_with_its_age(ledger: Ledger) -> None:
    await ledger.lead("router", "address", 1, AGES_S)
    await ledger.put_load(session_pb2.ClusterLoad(term=1, queued=7, worker_rate=0.5))
    load = session_pb2.ClusterLoad(term=1, queued=8, queued_tokens=1 << 40, waited_s=1.5)
    await ledger.put_load(load)
    report = await ledger.load()
    assert report is not None
    assert report.load == load
    assert 0.0 <= report.age_s < AGES_S
    # The last load is returned even if no router leads.
    await ledger.resign(1)
    report = await ledger.load()
    assert report is not None
    assert report.load == load


async def test_load_is_accepted_only_from_last_leader(ledger: Ledger) -> None:
    await ledger.lead("router", "address", 1, AGES_S)
    await ledger.resign(1)
    await ledger.lead("other", "address", 2, AGES_S)
    await ledger.put_load(session_pb2.ClusterLoad(term=2, queued=2))
    await ledger.put_load(session_pb2.ClusterLoad(term=1, queued=1))
    report = await ledger.load()
    assert report is not None
    assert report.load.queued == 2


async def test_scaling_is_read_by_model_with_its_age(ledger: Ledger) -> None:
    assert await ledger.scaling() == []
    await ledger.put_scaling(session_pb2.Scaling(workers=2, reason="enough"))
    change = session_pb2.ScalingChange(ago_s=0.5, before=2, workers=3, reason="requests wait")
    scaling = session_pb2.Scaling(workers=3, max_workers=8, need=2.5, wait_s=4.0, changes=[change])
    await ledger.put_scaling(scaling)
    other = session_pb2.Scaling(workers=1, model="org/other model")
    await ledger.put_scaling(other)
    reports = await ledger.scaling()
    assert [report.scaling for report in reports] == [scaling, other]
    assert all(0.0 <= report.age_s < AGES_S for report in reports)


# listings


async def names(
    ledger: Ledger, tenant: str = "", limit: int = MAX_PAGE_SIZE, states: Collection[State] = ()
) -> list[str]:
    """Return the ids of all listed requests, read page by page."""
    found: list[str] = []
    last: Position | None = None
    while True:
        page = await ledger.list_requests(tenant, states=states, limit=limit, before=last)
        assert len(page.entries) <= limit
        found += [entry.request_id for entry in page.entries]
        if (last := page.last) is None:
            return found


async def open_all(ledger: Ledger, tick: Tick, *request_ids: str) -> None:
    for request_id in request_ids:
        await ledger.open(make_request(request_id), "gateway")
        await tick()


@pytest.mark.parametrize("limit", [1, 2, 5, 7, MAX_PAGE_SIZE])
async def test_listing_is_newest_first_in_pages(ledger: Ledger, tick: Tick, limit: int) -> None:
    ids = [f"r{number}" for number in range(7)]
    await open_all(ledger, tick, *ids)
    assert await names(ledger, limit=limit) == ids[::-1]


async def test_listing_spans_several_server_batches(ledger: Ledger) -> None:
    ids = [f"r{number:03}" for number in range(300)]
    for request_id in ids:
        await ledger.open(make_request(request_id), "gateway")
    assert await names(ledger) == ids[::-1]
    assert await names(ledger, limit=200) == ids[::-1]


async def test_listing_has_full_entries(ledger: Ledger) -> None:
    await run(ledger)
    page = await ledger.list_requests("")
    assert page == Page((await ledger.get("r"),), None)


async def test_listing_without_requests_is_empty(ledger: Ledger) -> None:
    assert await ledger.list_requests("") == await ledger.list_requests("t") == Page((), None)


async def test_listing_is_separate_per_tenant(ledger: Ledger, tick: Tick) -> None:
    await open_all(ledger, tick, "r", "acme/r", "acme/s", "acme.b/r")
    assert await names(ledger, "acme", limit=1) == ["acme/s", "acme/r"]
    assert await names(ledger, "acme.b") == ["acme.b/r"]
    assert await names(ledger, "nobody") == []
    assert await names(ledger) == ["acme.b/r", "acme/s", "acme/r", "r"]


async def test_listing_pages_are_stable_under_arrivals(ledger: Ledger, tick: Tick) -> None:
    await open_all(ledger, tick, "a", "b", "c")
    first = await ledger.list_requests("", limit=2)
    await open_all(ledger, tick, "d")
    await ledger.discard("b", "gateway")
    assert first.last is not None
    second = await ledger.list_requests("", limit=2, before=first.last)
    assert [entry.request_id for entry in (*first.entries, *second.entries)] == ["c", "b", "a"]


async def test_ledger_listing_filters_by_state(ledger: Ledger, tick: Tick) -> None:
    await run(ledger, "a")
    await open_all(ledger, tick, "b", "c", "d")
    await ledger.end_request("b", State.EXPIRED, "slug", "")
    await ledger.end_request("d", State.CANCELLED, "slug", "")
    assert await names(ledger, states=[State.RUNNING]) == ["a"]
    assert await names(ledger, states=[State.CANCELLED, State.EXPIRED], limit=1) == ["d", "b"]
    assert await names(ledger, states=[State.FAILED]) == []


async def test_listing_page_examines_bounded_number_of_requests(ledger: Ledger) -> None:
    await run(ledger, "first")
    for number in range(MAX_PAGE_SIZE):
        await ledger.open(make_request(f"r{number:04}"), "gateway")
    page = await ledger.list_requests("", states=[State.RUNNING])
    assert page.entries == () and page.last is not None and page.last.request_id == "r0000"
    rest = await ledger.list_requests("", states=[State.RUNNING], before=page.last)
    assert [entry.request_id for entry in rest.entries] == ["first"] and rest.last is None


@pytest.mark.parametrize("limit", [0, MAX_PAGE_SIZE + 1])
async def test_listing_rejects_invalid_page_size(ledger: Ledger, limit: int) -> None:
    with pytest.raises(ValueError, match="limit must be from 1"):
        await ledger.list_requests("", limit=limit)


async def test_listing_has_simultaneous_arrivals_once_each(ledger: Ledger, tick: Tick) -> None:
    await open_all(ledger, tick, "old")
    ids = [f"t/r{number}" for number in range(5)]
    for request_id in ids:
        await ledger.open(make_request(request_id), "gateway")
        copy = await ledger.read(request_id)
        await ledger.discard(request_id, "gateway")
        copy = replace(copy, entry=replace(copy.entry, arrived=2e9))
        assert (await ledger.reassert(copy))[0] is Reasserted.OK
    for limit in (1, 2, 3):
        assert await names(ledger, limit=limit) == [*ids[::-1], "old"]
        assert await names(ledger, "t", limit=limit) == ids[::-1]


async def test_listing_omits_discarded_and_erased_requests(ledger: Ledger, tick: Tick) -> None:
    await open_all(ledger, tick, "t/a", "t/b", "t/c")
    await ledger.discard("t/a", "gateway")
    await ledger.end_request("t/b", State.CANCELLED, "slug", "")
    await ledger.erase("t/b")
    assert await names(ledger) == await names(ledger, "t") == ["t/c"]


async def test_listing_omits_expired_requests(expiring: Ledger, tick: Tick) -> None:
    await open_all(expiring, tick, "t/a", "t/b")
    await expiring.end_request("t/b", State.CANCELLED, "slug", "")

    async def is_alone() -> bool:
        return await names(expiring) == ["t/a"]

    await eventually(is_alone, tick)
    assert await names(expiring, "t", limit=1) == ["t/a"]


async def test_listing_keeps_position_of_reasserted_request(ledger: Ledger, tick: Tick) -> None:
    await open_all(ledger, tick, "t/a", "t/b", "t/c")
    copy = await ledger.read("t/b")
    await ledger.discard("t/b", "gateway")
    await ledger.reassert(copy)
    assert await names(ledger) == await names(ledger, "t") == ["t/c", "t/b", "t/a"]


async def test_listing_moves_request_reasserted_as_older(ledger: Ledger, tick: Tick) -> None:
    """The id was reused while the first gateway still had the earlier request."""
    await open_all(ledger, tick, "t/a")
    copy = await ledger.read("t/a")
    await ledger.discard("t/a", "gateway")
    await open_all(ledger, tick, "t/b", "t/a")
    copy = replace(copy, entry=replace(copy.entry, moves=copy.entry.moves + 1))
    assert (await ledger.reassert(copy))[0] is Reasserted.OK
    assert await names(ledger) == await names(ledger, "t") == ["t/b", "t/a"]


# runtime policy


async def test_policy_is_set_and_cleared_by_key(ledger: Ledger) -> None:
    assert await ledger.policy() == ClusterPolicy()
    first = await ledger.set_policy({"order": "deadline", "ageing_factor": "0.25"})
    second = await ledger.set_policy({"max_queued": "500", "starvation": "0.0"})
    values = {
        "order": "deadline",
        "ageing_factor": "0.25",
        "max_queued": "500",
        "starvation": "0.0",
    }
    assert second == ClusterPolicy(values, second.version) == await ledger.policy()
    third = await ledger.set_policy(
        {"order": "", "ageing_factor": "", "max_queued": "", "other": ""}
    )
    assert third == ClusterPolicy({"starvation": "0.0"}, third.version) == await ledger.policy()
    last = await ledger.set_policy({"starvation": ""})
    assert last == ClusterPolicy({}, last.version) == await ledger.policy()
    assert 0 < first.version < second.version < third.version < last.version


async def test_policy_keeps_adapters_apart_from_settings(ledger: Ledger) -> None:
    """Adapters are stored in the policy as settings whose values are JSON texts."""
    entry = AdapterEntry("org/model", "sql=/adapters/ä b", "0" * 64)
    name = setting_of("org/sql:v1")
    await ledger.set_policy({"order": "deadline"})
    stored = await ledger.set_policy({name: entry.to_text()})
    assert stored == await ledger.policy()
    assert catalogue_of(stored.values) == {"org/sql:v1": entry}
    assert (await ledger.heartbeat("gateway", "here:1", LEASE_S)).policy_version == stored.version
    removed = await ledger.set_policy({name: ""})
    assert removed.values == {"order": "deadline"} and removed.version > stored.version
    assert await ledger.restore_policy(stored) == removed


async def test_heartbeat_returns_policy_version(ledger: Ledger) -> None:
    assert (await ledger.heartbeat("gateway", "here:1", LEASE_S)).policy_version == 0
    policy = await ledger.set_policy({"max_queued": "500"})
    assert (await ledger.heartbeat("gateway", "here:1", LEASE_S)).policy_version == policy.version
    assert await ledger.set_policy({"max_queued": "500", "order": ""}) == policy
    assert await ledger.set_policy({}) == policy


async def test_restore_policy_does_not_replace_newer_policy(
    ledger: Ledger,
) -> None:
    await ledger.set_policy({"ageing_factor": "0.5"})
    lost = ClusterPolicy({"order": "deadline", "max_queued": "500"}, version=2**52)
    assert await ledger.restore_policy(lost) == await ledger.policy() == lost
    newer = await ledger.set_policy({"order": "fifo"})
    assert newer == ClusterPolicy({"order": "fifo", "max_queued": "500"}, newer.version)
    assert await ledger.restore_policy(lost) == await ledger.policy() == newer


async def test_cluster_id_is_stable(ledger: Ledger) -> None:
    cluster_id = await ledger.cluster_id()
    assert cluster_id
    assert await ledger.cluster_id() == cluster_id
