"""Requests of several choices and with log probabilities, through one gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import product

import pytest

from everlift.errors import (
    EngineFailed,
    EverliftError,
    InvalidRequest,
    OffsetOutOfRange,
    OutOfRange,
)
from everlift.messages import FinishReason, Submission
from everlift.sampling import TokenLogprobs
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.ledger.entry import Append, Appended, State
from router.ledger.memory.memory import MemoryLedger
from router.requests.stream import ChoiceReader
from tests.support.ledger.ledgers import scored
from tests.support.router.gateway_support import TERM, Gateway, texts, until

EOS, LENGTH = session_pb2.STOP_CAUSE_EOS, session_pb2.STOP_CAUSE_LENGTH
RETURNED, FAILED = session_pb2.STOP_CAUSE_RETURNED, session_pb2.STOP_CAUSE_FAILED
REFUSED = session_pb2.STOP_CAUSE_REFUSED


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


def by_choice(pieces: list[pb.GenerateResponse], n: int = 3) -> list[str]:
    return [texts([piece for piece in pieces if piece.choice == c]) for c in range(n)]


def logprobs_of(pieces: list[pb.GenerateResponse], choice: int = 0) -> list[TokenLogprobs]:
    found = [it for piece in pieces if piece.choice == choice for it in piece.logprobs]
    return [TokenLogprobs.from_proto(it) for it in found]


def wire(logprobs: tuple[TokenLogprobs, ...]) -> list[pb.TokenLogprobs]:
    return [it.to_proto() for it in logprobs]


# several choices


async def test_choices_share_an_epoch_and_end_independently(gateway: Gateway) -> None:
    live = await gateway.submit(n=3)
    [waiting] = gateway.line.enqueued
    assert (waiting.choices, waiting.prompt_tokens, waiting.max_tokens) == (3, 2, 24)
    epoch = await gateway.dispatch()
    started = gateway.workers.started
    assert [(start.epoch, start.choice) for start in started] == [(epoch, c) for c in range(3)]
    reading = asyncio.create_task(gateway.read(live))
    gateway.make(epoch, 0, "ab", choice=1)
    gateway.make(epoch, 0, "xyz", LENGTH, choice=2)
    gateway.make(epoch, 2, "c", EOS, choice=1)
    await until(lambda: live.choices[1].is_complete)
    assert (await gateway.stored())[0] is State.RUNNING
    gateway.make(epoch, 0, "k", EOS, choice=0)
    pieces = await reading
    assert by_choice(pieces) == ["k", "abc", "xyz"]
    ends = [(p.choice, p.finish_reason) for p in pieces if p.finish_reason]
    assert sorted(ends[:2]) == [(1, pb.FINISH_REASON_STOP), (2, pb.FINISH_REASON_LENGTH)]
    assert ends[2] == (0, pb.FINISH_REASON_STOP)
    assert [p.HasField("usage") for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].usage == pb.Usage(prompt_tokens=2, output_tokens=7)
    assert pieces[-1].HasField("timing")
    stored = await gateway.ledger.read("r")
    assert stored.entry.state is State.FINISHED
    assert [bytes(choice.tokens) for choice in stored.choices] == [b"k", b"abc", b"xyz"]
    assert not gateway.workers.aborted


async def test_stop_string_ends_only_its_choice(gateway: Gateway) -> None:
    live = await gateway.submit(n=2, stop=["#"])
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "ab#cd", choice=1)
    gateway.make(epoch, 5, "ef", choice=1)
    assert gateway.workers.aborted == [(epoch, (1,))] * 2
    gateway.make(epoch, 0, "xy", choice=0)
    gateway.make(epoch, 2, "z", EOS, choice=0)
    assert by_choice(await gateway.read(live), 2) == ["xyz", "ab"]
    assert (await gateway.ledger.get("r")).num_tokens == (3, 3)


async def test_lost_worker_requeues_only_unfinished_choices(
    gateway: Gateway,
) -> None:
    live = await gateway.submit(n=3)
    first = await gateway.dispatch()
    gateway.make(first, 0, "done", EOS, choice=1)
    gateway.make(first, 0, "ab", choice=2)
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: len(gateway.line.enqueued) == 2)
    again = gateway.line.enqueued[-1]
    assert (again.choices, again.prompt_tokens, again.max_tokens) == (2, 2 + 2, 8 + 6)
    second = await gateway.dispatch(worker_id="other")
    resumed = [(start.choice, bytes(start.output_ids)) for start in gateway.workers.started[3:]]
    assert resumed == [(0, b""), (2, b"ab")]
    gateway.make(second, 0, "k", EOS, choice=0)
    gateway.make(second, 2, "c", EOS, choice=2)
    pieces = await gateway.read(live)
    assert by_choice(pieces) == ["k", "done", "abc"]
    epochs = sorted((p.choice, p.epoch) for p in pieces if p.token_ids)
    assert epochs == [(0, second), (1, first), (2, first), (2, second)]
    assert (await gateway.ledger.get("r")).losses == 1


async def test_returned_choices_are_requeued_after_the_last_one_ends(gateway: Gateway) -> None:
    live = await gateway.submit(n=3)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "a", RETURNED, choice=0)
    gateway.make(epoch, 0, "bc", choice=1)
    gateway.make(epoch, 0, "", RETURNED, choice=2)
    await until(lambda: live.choices[1].stored == 2)
    assert live.phase.value == "running"
    gateway.make(epoch, 2, "d", EOS, choice=1)
    await until(lambda: live.phase.value == "waiting")
    entry = await gateway.ledger.get("r")
    assert (entry.state, entry.num_tokens, entry.losses) == (State.QUEUED, (1, 3, 0), 0)
    assert gateway.line.enqueued[-1].choices == 2


async def test_failed_choice_fails_the_whole_attempt(gateway: Gateway) -> None:
    live = await gateway.submit(n=2)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "a", choice=0)
    gateway.make(epoch, 0, "", FAILED, choice=1, error="a step failed")
    assert gateway.workers.aborted == [(epoch, ())]
    await until(lambda: live.phase.value == "waiting")
    assert (await gateway.ledger.get("r")).losses == 1


async def test_choice_index_beyond_n_is_aborted(gateway: Gateway) -> None:
    await gateway.submit()
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "a", choice=1)
    assert gateway.workers.aborted == [(epoch, (1,))]


async def test_choices_are_read_at_separate_offsets_live_and_ended(gateway: Gateway) -> None:
    live = await gateway.submit(n=2)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "ab", choice=0)
    gateway.make(epoch, 0, "xyz", EOS, choice=1)
    await until(lambda: live.choices[0].stored == 2 and live.choices[1].is_complete)
    for offsets in ([3], [0, 4], [0, 0, 0], [-1]):
        with pytest.raises(OffsetOutOfRange):
            await gateway.read(live, *offsets)
    places = list(product(range(3), range(4)))
    running = [asyncio.create_task(gateway.read(live, *offsets)) for offsets in places]
    await asyncio.sleep(0)
    gateway.make(epoch, 2, "c", EOS, choice=0)
    for task, (a, b) in zip(running, places, strict=True):
        assert by_choice(await task, 2) == ["abc"[a:], "xyz"[b:]]
        ended = await gateway.read(await gateway.requests.attach("r"), a, b)
        assert by_choice(ended, 2) == ["abc"[a:], "xyz"[b:]]
        assert sum(bool(piece.finish_reason) for piece in ended) == 2


async def test_early_end_keeps_the_finished_choices(
    gateway: Gateway,
) -> None:
    live = await gateway.submit(n=2)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "ab", EOS, choice=1)
    await until(lambda: live.choices[1].is_complete)
    await gateway.requests.cancel("r")
    assert gateway.workers.aborted == [(epoch, ())]
    again = await gateway.requests.attach("r")
    pieces = []
    with pytest.raises(EverliftError, match="cancelled"):
        async for piece in gateway.requests.stream(again):
            pieces.append(piece)
    assert by_choice(pieces, 2) == ["", "ab"]
    assert pieces[-1].finish_reason == pb.FINISH_REASON_STOP
    assert not pieces[-1].HasField("usage")


async def test_reader_gets_pending_pieces_before_the_error(
    gateway: Gateway,
) -> None:
    live = await gateway.submit(n=2)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "x", choice=1)
    await until(lambda: live.choices[1].stored == 1)
    stream = gateway.requests.stream(live)
    assert [(await anext(stream)).text for _ in range(2)] == ["", "x"]
    gateway.make(epoch, 0, "a", choice=0)
    await until(lambda: live.choices[0].stored == 1)
    await gateway.requests.cancel("r")
    assert (await anext(stream)).text == "a"
    with pytest.raises(EverliftError, match="cancelled"):
        await anext(stream)


class SlowToStore(MemoryLedger):
    """Ledger that stores appends only while ``let`` is set."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.let = asyncio.Event()
        self.let.set()

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        await self.let.wait()
        return await super().append(appends)


async def test_choice_end_is_stored_before_siblings_are_requeued() -> None:
    ledger = SlowToStore()
    await ledger.lead("leader", "", TERM, 1000.0)
    gateway = Gateway(ledger)
    run = asyncio.create_task(gateway.requests.attempts.run())
    live = await gateway.submit(n=2)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "done", choice=1)
    await until(lambda: live.choices[1].stored == 4)
    ledger.let.clear()
    gateway.make(epoch, 4, "", EOS, choice=1)
    gateway.requests.attempts.worker_lost("w")
    for _ in range(10):
        await asyncio.sleep(0)
    assert (await ledger.get("r")).state is State.RUNNING
    ledger.let.set()
    await until(lambda: len(gateway.line.enqueued) == 2)
    assert (await ledger.get("r")).finish_reasons == (None, FinishReason.STOP)
    await gateway.requests.stop(0.0)
    run.cancel()


async def test_choice_end_lost_by_the_ledger_is_stored_again(
    gateway: Gateway, ledger: MemoryLedger
) -> None:
    live = await gateway.submit(n=2, sampling=pb.Sampling(logprobs=0))
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "ab", EOS, choice=1, logprobs=wire(scored(-1.0, -2.0)))
    await until(lambda: live.choices[1].is_complete)
    record = ledger._records["r"]
    forgotten = record.choices[1]
    del forgotten.tokens[1:], forgotten.logprobs[1:]
    forgotten.finish_reason = None
    record.entry = replace(record.entry, num_tokens=(0, 1), finish_reasons=(None, None))
    gateway.make(epoch, 0, "x", EOS, choice=0, logprobs=wire(scored(-3.0)))
    assert by_choice(await gateway.read(live), 2) == ["x", "ab"]
    stored = await ledger.read("r")
    assert stored.entry.state is State.FINISHED
    assert bytes(stored.choices[1].tokens) == b"ab"
    assert stored.choices[1].logprobs == scored(-1.0, -2.0)
    assert gateway.requests.counters.output_tokens == 3


def forget_dispatch(ledger: MemoryLedger) -> None:
    """Undo the dispatch, as a server does that restarts without its last second of data."""
    record = ledger._records["r"]
    record.entry = replace(record.entry, state=State.QUEUED, worker="", epoch=0)


@pytest.mark.parametrize("n", [1, 2])
async def test_choice_ends_are_stored_under_the_next_dispatch(
    gateway: Gateway, ledger: MemoryLedger, n: int
) -> None:
    live = await gateway.submit(n=n)
    epoch = await gateway.dispatch()
    forget_dispatch(ledger)
    for index in range(n):
        gateway.make(epoch, 0, "abc", EOS, choice=index)
    await until(lambda: len(gateway.line.enqueued) == 2)
    started = len(gateway.workers.started)
    await gateway.dispatch()
    await until(lambda: live.is_over)
    assert by_choice(await gateway.read(live), n) == ["abc"] * n
    assert len(gateway.workers.started) == started
    assert (await ledger.get("r")).num_tokens == (3,) * n


async def test_choice_end_is_stored_after_the_ledger_lost_the_dispatch(
    gateway: Gateway, ledger: MemoryLedger
) -> None:
    live = await gateway.submit(n=2)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "ab", choice=0)
    gateway.make(epoch, 0, "xy", choice=1)
    await until(lambda: all(choice.stored == 2 for choice in live.choices))
    forget_dispatch(ledger)
    gateway.make(epoch, 2, "c", EOS, choice=0)
    await until(lambda: len(gateway.line.enqueued) == 2)
    epoch = await gateway.dispatch()
    assert [start.choice for start in gateway.workers.started[2:]] == [1]
    gateway.make(epoch, 2, "z", EOS, choice=1)
    await until(lambda: live.is_over)
    assert by_choice(await gateway.read(live), 2) == ["abc", "xyz"]


# long requests


async def test_long_choices_start_in_batches_until_dropped(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.requests.attempt_runner._TOKENS_PER_TURN", 12)
    live = await gateway.submit(n=6, text="four")
    started = gateway.workers.started
    await gateway.dispatch()
    assert [start.choice for start in started] == [0, 1, 2]
    await until(lambda: len(started) == 6)
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: len(gateway.line.enqueued) == 2)
    await gateway.dispatch()
    gateway.requests.attempts.drop(live)
    for _ in range(3):
        await asyncio.sleep(0)
    assert [start.choice for start in started] == [*range(6), 0, 1, 2]


async def test_piece_size_is_limited_in_tokens(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.requests.request._TOKENS_A_PIECE", 3)
    live = await gateway.submit(n=2)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "abcdef", EOS, choice=0)
    gateway.make(epoch, 0, "ghijk", EOS, choice=1)
    pieces = await gateway.read(live)
    assert by_choice(pieces, 2) == ["abcdef", "ghijk"]
    sizes = [(p.choice, len(p.token_ids), bool(p.finish_reason)) for p in pieces if p.token_ids]
    assert sizes == [(0, 3, False), (0, 3, True), (1, 3, False), (1, 2, True)]


async def test_piece_size_shrinks_with_logprobs_per_token(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.requests.request._LOGPROBS_A_PIECE", 6)
    live = await gateway.submit(sampling=pb.Sampling(logprobs=1))
    epoch = await gateway.dispatch()
    scores = scored(*[-1.0] * 7, num_top=1)
    gateway.make(epoch, 0, "abcdefg", EOS, logprobs=wire(scores))
    pieces = await gateway.read(live)
    assert [len(p.token_ids) for p in pieces if p.token_ids] == [3, 3, 1]
    assert logprobs_of(pieces) == list(scores)


async def test_replay_of_an_ended_request_yields_to_other_tasks(gateway: Gateway) -> None:
    await gateway.submit(n=3, max_tokens=2048)
    epoch = await gateway.dispatch()
    for index in range(3):
        gateway.make(epoch, 0, "a" * 2048, LENGTH, choice=index)
    await until(lambda: not len(gateway.requests))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    # The router at which it ended need not replay it.
    await Gateway(gateway.ledger, "other").requests.attach("r")
    task.cancel()
    assert turns >= 6


async def test_get_returns_a_request_without_its_tokens(gateway: Gateway) -> None:
    await gateway.submit(n=2, sampling=pb.Sampling(logprobs=0))
    epoch = await gateway.dispatch()
    for index in range(2):
        gateway.make(epoch, 0, "a", EOS, choice=index, logprobs=wire(scored(-1.0)))
    await until(lambda: not len(gateway.requests))
    known, _ = await gateway.requests.get("r")
    assert known.entry.num_tokens == (1, 1)
    assert [(choice.tokens, choice.logprobs) for choice in known.choices] == [((), ())] * 2


# log probabilities


async def test_logprobs_are_repeated_with_tokens_at_any_offset(gateway: Gateway) -> None:
    live = await gateway.submit(sampling=pb.Sampling(logprobs=2))
    epoch = await gateway.dispatch()
    all_of_them = scored(-0.5, -1.0, -1.5, -2.0, num_top=2)
    gateway.make(epoch, 0, "abc", logprobs=wire(all_of_them[:3]))
    gateway.make(epoch, 1, "bcd", EOS, logprobs=wire(all_of_them[1:]))
    for again in (live, await gateway.requests.attach("r")):
        for offset in range(5):
            pieces = await gateway.read(again, offset)
            assert logprobs_of(pieces) == list(all_of_them[offset:])
            assert all(len(p.logprobs) == len(p.token_ids) for p in pieces)


async def test_logprobs_are_truncated_at_a_stop_string(gateway: Gateway) -> None:
    live = await gateway.submit(stop=["b"], sampling=pb.Sampling(logprobs=0))
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "abc", logprobs=wire(scored(-1.0, -2.0, -3.0)))
    assert logprobs_of(await gateway.read(live)) == list(scored(-1.0, -2.0))


@pytest.mark.parametrize("logprobs", [(), scored(-1.0), scored(-1.0, -2.0, num_top=1)])
async def test_tokens_without_requested_logprobs_fail_the_attempt(
    gateway: Gateway, logprobs: tuple[TokenLogprobs, ...]
) -> None:
    live = await gateway.submit(sampling=pb.Sampling(logprobs=0))
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "ab", logprobs=wire(logprobs))
    await until(lambda: live.phase.value == "waiting")
    assert await gateway.stored() == (State.QUEUED, b"")
    assert gateway.workers.aborted == [(epoch, ())]


async def test_prompt_logprobs_are_computed_once_across_attempts(gateway: Gateway) -> None:
    """The first worker sends the first piece; the next worker begins anew and sends the rest."""
    live = await gateway.submit(n=2, text="prompt", sampling=pb.Sampling(prompt_logprobs=1))
    all_of_them = scored(-1.0, -2.0, -3.0, -4.0, -5.0, num_top=1)
    first = await gateway.dispatch()
    gateway.make(first, 0, "", prompt_offset=1, prompt_logprobs=wire(all_of_them[:2]))
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: len(gateway.line.enqueued) == 2)
    second = await gateway.dispatch()
    other = scored(*[-9.0] * 5, num_top=1)
    gateway.make(second, 0, "", prompt_offset=1, prompt_logprobs=wire(other[:1]))
    gateway.make(second, 0, "x", choice=1)
    gateway.make(
        second, 0, "a", prompt_offset=2, prompt_logprobs=wire((*other[:1], *all_of_them[2:]))
    )
    for choice in range(2):
        gateway.make(second, 1, "", RETURNED, choice=choice)
    await until(lambda: len(gateway.line.enqueued) == 3)
    third = await gateway.dispatch()
    asks = [start.sampling.HasField("prompt_logprobs") for start in gateway.workers.started]
    assert asks == [True, False, True, False, False, False]
    gateway.make(third, 1, "b", EOS)
    gateway.make(third, 1, "y", EOS, choice=1)
    assert (await gateway.ledger.read("r")).prompt_logprobs == all_of_them
    for again in (live, await gateway.requests.attach("r")):
        pieces = await gateway.read(again)
        positions = [(p.choice, p.offset) for p in pieces if p.prompt_logprobs]
        assert positions == [(0, 0)]
        [piece] = [p for p in pieces if p.prompt_logprobs]
        assert tuple(map(TokenLogprobs.from_proto, piece.prompt_logprobs)) == all_of_them
        assert not [p for p in await gateway.read(again, 1) if p.prompt_logprobs]


@pytest.mark.parametrize("is_scored", [False, True])
async def test_prompt_logprobs_precede_other_choices(gateway: Gateway, is_scored: bool) -> None:
    sampling = pb.Sampling(prompt_logprobs=0) if is_scored else None
    live = await gateway.submit(n=3, text="ab", sampling=sampling)
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "x", choice=1)
    gateway.make(epoch, 0, "y", EOS, choice=2)
    await until(lambda: live.choices[1].readable and live.choices[2].is_complete)
    reader = ChoiceReader(live)
    others = [] if is_scored else [1, 2]
    assert choices_read(reader) == others
    fields = {"prompt_offset": 1, "prompt_logprobs": wire(scored(-1.0))} if is_scored else {}
    gateway.make(epoch, 0, "z", **fields)
    await until(lambda: live.choices[0].readable)
    assert choices_read(reader) == ([0, 1, 2] if is_scored else [0])
    # A client that has the beginning of the first choice already has them.
    assert choices_read(ChoiceReader(live, (1, 0, 0))) == [1, 2]


def choices_read(reader: ChoiceReader) -> list[int]:
    read = []
    while (piece := reader.next()) is not None:
        read.append(piece.choice)
    return sorted(read) if 0 not in read else [read[0], *sorted(read[1:])]


@pytest.mark.parametrize(("offset", "count", "text"), [(2, 1, ""), (1, 2, "a")])
async def test_prompt_logprobs_gap_fails_the_attempt(
    gateway: Gateway, offset: int, count: int, text: str
) -> None:
    live = await gateway.submit(text="four", sampling=pb.Sampling(prompt_logprobs=0))
    epoch = await gateway.dispatch()
    scores = wire(scored(*[-1.0] * count))
    gateway.make(epoch, 0, text, prompt_offset=offset, prompt_logprobs=scores)
    await until(lambda: live.phase.value == "waiting")
    assert not live.prompt_logprobs


async def test_prompt_logprobs_are_skipped_for_one_token(gateway: Gateway) -> None:
    live = await gateway.submit(text="x", sampling=pb.Sampling(prompt_logprobs=0))
    epoch = await gateway.dispatch()
    assert not gateway.workers.started[0].sampling.HasField("prompt_logprobs")
    gateway.make(epoch, 0, "a", EOS)
    assert texts(await gateway.read(live)) == "a"


async def test_next_gateway_continues_all_choices(gateway: Gateway, ledger: MemoryLedger) -> None:
    sampling = pb.Sampling(logprobs=1, prompt_logprobs=1)
    live = await gateway.submit(n=3, sampling=sampling)
    epoch = await gateway.dispatch()
    before, prompt = scored(-1.0, -2.0, num_top=1), scored(-7.0, num_top=1)
    fields = {"prompt_offset": 1, "prompt_logprobs": wire(prompt)}
    gateway.make(epoch, 0, "ab", choice=0, logprobs=wire(before), **fields)
    gateway.make(epoch, 0, "d", EOS, choice=1, logprobs=wire(before[:1]))
    await until(lambda: live.choices[0].stored == 2 and live.choices[1].is_complete)
    await ledger.end_lease("gateway")
    other = Gateway(ledger, "other")
    run = asyncio.create_task(other.requests.attempts.run())
    adopted = await other.requests.attach("r")
    assert [waiting.choices for waiting in other.line.enqueued] == [2]
    other.epochs = iter([7])
    await other.dispatch()
    starts = {start.choice: start for start in other.workers.started}
    assert {choice: bytes(start.output_ids) for choice, start in starts.items()} == {
        0: b"ab",
        2: b"",
    }
    assert not any(start.sampling.HasField("prompt_logprobs") for start in starts.values())
    later = scored(-3.0, num_top=1)
    other.make(7, 2, "c", EOS, choice=0, logprobs=wire(later))
    other.make(7, 0, "e", EOS, choice=2, logprobs=wire(later))
    pieces = await other.read(adopted)
    assert by_choice(pieces) == ["abc", "d", "e"]
    assert logprobs_of(pieces) == [*before, *later]
    assert [wire(prompt)] == [list(p.prompt_logprobs) for p in pieces if p.prompt_logprobs]
    run.cancel()


# fields of requests, and refusals


async def test_worker_refusal_fails_the_request_with_its_cause(
    gateway: Gateway,
) -> None:
    for number, (stop, slug, expected) in enumerate(
        [
            (REFUSED, OutOfRange.slug, OutOfRange),
            (REFUSED, "", EngineFailed),
            (REFUSED, "queue_full", EngineFailed),
            (FAILED, InvalidRequest.slug, InvalidRequest),
        ]
    ):
        request_id = f"r{number}"
        live = await gateway.submit(request_id=request_id, n=2)
        epoch = await gateway.dispatch(request_id)
        for choice in range(2):
            gateway.make(epoch, 0, "", stop, choice=choice, error="no such", error_slug=slug)
        with pytest.raises(expected, match="no such") as caught:
            await gateway.read(live)
        assert type(caught.value) is expected
        entry = await gateway.ledger.get(request_id)
        assert (entry.state, entry.error_slug) == (State.FAILED, expected.slug)


async def test_include_stop_controls_the_stop_text(gateway: Gateway) -> None:
    for number, (included, expected) in enumerate([(False, ["a", "b"]), (True, ["a#", "b!"])]):
        live = await gateway.submit(
            request_id=f"r{number}", n=2, stop=["#"], stop_token_ids=[33], include_stop=included
        )
        epoch = await gateway.dispatch(f"r{number}")
        gateway.make(epoch, 0, "a#x", choice=0)
        gateway.make(epoch, 0, "b!", EOS, choice=1)
        assert by_choice(await gateway.read(live), 2) == expected


async def test_min_tokens_delay_stop_strings(gateway: Gateway) -> None:
    live = await gateway.submit(stop=["#"], sampling=pb.Sampling(min_tokens=3))
    epoch = await gateway.dispatch()
    gateway.make(epoch, 0, "a#b#cd")
    assert texts(await gateway.read(live)) == "a#b"
    assert gateway.workers.started[0].sampling.min_tokens == 3


@pytest.mark.parametrize(
    ("asked", "n", "prompt", "max_tokens"),
    [("logprobs", 64, 1, 3121), ("prompt_logprobs", 1, 12484, 1)],
)
async def test_logprobs_beyond_gateway_capacity_are_rejected(
    gateway: Gateway, asked: str, n: int, prompt: int, max_tokens: int
) -> None:
    gateway.model.max_model_len = 20_000
    fields = {"n": n, "text": "x" * prompt}
    sampling = pb.Sampling(**{asked: 20})  # type: ignore[arg-type]
    with pytest.raises(OutOfRange, match="are too many"):
        await gateway.submit(**fields, max_tokens=max_tokens, sampling=sampling)
    less = {"text": "x" * (prompt - 1)} if prompt > 1 else {"max_tokens": max_tokens - 1}
    await gateway.submit(**fields | {"max_tokens": max_tokens} | less, sampling=sampling)


async def test_cache_salt_limits_block_sharing(gateway: Gateway) -> None:
    salts = []
    for number, salt in enumerate(["", "a", "a", "b"]):
        live = await gateway.submit(request_id=f"r{number}", cache_salt=salt)
        await gateway.dispatch(f"r{number}")
        assert gateway.workers.started[-1].salt == live.request.salt
        salts.append(live.request.salt)
    assert salts[0] == b""
    assert salts[1] == salts[2] != salts[3]


def test_best_of_is_refused_with_the_reason() -> None:
    message = pb.GenerateRequest(text="hi", n=2, best_of=4)
    with pytest.raises(OutOfRange, match="could not be streamed"):
        Submission.from_proto(message, "r", seed=1)
    message.best_of = 2
    assert Submission.from_proto(message, "r", seed=1).n == 2


def test_body_hash_covers_output_shaping_fields() -> None:
    changes = [
        {},
        {"n": 2},
        {"include_stop": True},
        {"keep_special_tokens": True},
        {"cache_salt": "a"},
        *(
            {"sampling": pb.Sampling(**field)}  # type: ignore[arg-type]
            for field in (
                {"repetition_penalty": 2.0},
                {"presence_penalty": 2.0},
                {"frequency_penalty": 2.0},
                {"logit_bias": {1: 1.0}},
                {"logit_bias": {1: 2.0}},
                {"min_tokens": 1},
                {"logprobs": 0},
                {"logprobs": 1},
                {"prompt_logprobs": 0},
                {"grammar": pb.Grammar(regex="a")},
                {"grammar": pb.Grammar(ebnf="a")},
            )
        ),
    ]
    messages = [pb.GenerateRequest(text="hi", **change) for change in changes]  # type: ignore[arg-type]
    hashes = [Submission.from_proto(message, "r", seed=1).body_hash for message in messages]
    assert len(set(hashes)) == len(changes)


def test_body_hash_ignores_fields_that_retries_may_change() -> None:
    tries = (
        pb.GenerateRequest(text="hi"),
        pb.GenerateRequest(
            text="hi",
            request_id="r",
            timeout_ms=1000,
            on_disconnect=pb.ON_DISCONNECT_GRACE,
            priority=1,
            ttft_target_ms=100,
            session_id="s",
            fairness_id="f",
            application="a",
            explain=True,
        ),
    )
    first, again = (Submission.from_proto(message, "r", seed=1) for message in tries)
    assert first.body_hash == again.body_hash
