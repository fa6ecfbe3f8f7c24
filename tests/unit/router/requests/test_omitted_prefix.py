"""Tokens that a gateway leaves out of the Start messages to a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from everlift.hashes import CHUNK_SIZE, chunk_hashes
from everlift.v1 import session_pb2
from router.requests.request import LiveRequest, Phase
from tests.support.router.gateway_support import CONFIG, TERM, Gateway, started_gateway, until

LENGTH = session_pb2.STOP_CAUSE_LENGTH
TEXT = "".join(chr(97 + i % 23) for i in range(2 * CHUNK_SIZE + 30))
PROMPT = tuple(TEXT.encode())


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with started_gateway() as gateway:
        yield gateway


async def submit(gateway: Gateway, **fields: object) -> LiveRequest:
    return await gateway.submit(text=TEXT, max_tokens=600, **fields)


async def dispatch(gateway: Gateway, cached_tokens: int) -> list[session_pb2.Start]:
    """Dispatch the request to a worker that is expected to have ``cached_tokens`` cached."""
    gateway.workers.started.clear()
    epoch = next(gateway.epochs)
    entry = await gateway.ledger.dispatch("r", "w", epoch, TERM)
    gateway.requests.dispatched(
        session_pb2.Dispatched(
            request_id="r",
            worker_id="w",
            epoch=epoch,
            attempt=entry.attempts,
            moves=entry.moves,
            cached_tokens=cached_tokens,
        )
    )
    return gateway.workers.started


def report_incomplete(gateway: Gateway, epoch: int, *choices: int) -> list[session_pb2.Start]:
    gateway.workers.started.clear()
    starts = [session_pb2.IncompleteStart(epoch=epoch, choice=choice) for choice in choices]
    gateway.requests.attempts.incomplete_starts("w", starts)
    return list(gateway.workers.started)


def is_whole(start: session_pb2.Start) -> bool:
    return not start.HasField("omitted_prefix") and tuple(start.prompt_ids) == PROMPT


@pytest.mark.parametrize("chunks", [1, 2])
async def test_start_leaves_out_the_expected_chunks(gateway: Gateway, chunks: int) -> None:
    live = await submit(gateway)
    (start,) = await dispatch(gateway, chunks * CHUNK_SIZE)
    assert tuple(start.prompt_ids) == PROMPT[chunks * CHUNK_SIZE :]
    omitted = start.omitted_prefix
    assert omitted.hash == chunk_hashes(PROMPT, live.request.salt)[chunks - 1]
    assert (omitted.num_prompt, omitted.num_output) == (chunks * CHUNK_SIZE, 0)
    assert start.expected_cached_tokens == chunks * CHUNK_SIZE


async def test_omitted_prefix_has_the_salt_of_the_new_adapter(gateway: Gateway) -> None:
    gateway.serve("f", "old")
    live = await submit(gateway, model="sql")
    before = live.request.salt
    gateway.serve("f", "new")
    (start,) = await dispatch(gateway, 2 * CHUNK_SIZE)
    assert start.salt != before
    assert start.omitted_prefix.hash == chunk_hashes(PROMPT, start.salt)[1]


async def test_start_is_whole_unless_a_prefix_is_expected(gateway: Gateway) -> None:
    await submit(gateway)
    (start,) = await dispatch(gateway, 0)
    assert is_whole(start)


async def test_start_is_whole_without_locality() -> None:
    async with started_gateway(config=replace(CONFIG, locality=False)) as gateway:
        await submit(gateway, n=2)
        starts = await dispatch(gateway, CHUNK_SIZE)
        assert len(starts) == 2 and all(map(is_whole, starts))


async def test_prompt_of_whole_chunks_is_left_out(gateway: Gateway) -> None:
    """The leader never expects the last token to be cached."""
    await gateway.submit(text="a" * 2 * CHUNK_SIZE)
    (start,) = await dispatch(gateway, 2 * CHUNK_SIZE - 1)
    assert not start.prompt_ids and start.omitted_prefix.num_prompt == 2 * CHUNK_SIZE


async def test_further_choices_leave_out_the_common_prompt(gateway: Gateway) -> None:
    await submit(gateway, n=3)
    first, *others = await dispatch(gateway, CHUNK_SIZE)
    assert first.omitted_prefix.num_prompt == CHUNK_SIZE
    for start in others:
        assert start.omitted_prefix.num_prompt == 2 * CHUNK_SIZE
        assert tuple(start.prompt_ids) == PROMPT[2 * CHUNK_SIZE :]


async def test_long_choices_count_only_the_tokens_sent(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.requests.attempt_runner._TOKENS_PER_TURN", len(PROMPT) + 60)
    await submit(gateway, n=5)
    starts = await dispatch(gateway, 0)
    assert [start.choice for start in starts] == [0, 1, 2]
    await until(lambda: len(starts) == 5)
    assert [len(start.prompt_ids) for start in starts] == [len(PROMPT), 30, 30, 30, 30]


async def test_resumed_start_leaves_out_output(gateway: Gateway) -> None:
    live = await submit(gateway)
    (start,) = await dispatch(gateway, 0)
    output = "o" * 300
    gateway.make(start.epoch, 0, output)
    await until(lambda: live.choices[0].stored == 300)
    gateway.requests.attempts.worker_lost("w")
    await until(lambda: len(gateway.line.enqueued) == 2)
    known = (*PROMPT, *output.encode())
    assert len(gateway.line.enqueued[1].chunks) == 3
    (start,) = await dispatch(gateway, 3 * CHUNK_SIZE)
    assert not start.prompt_ids and tuple(start.output_ids) == known[3 * CHUNK_SIZE :]
    omitted = start.omitted_prefix
    assert (omitted.num_prompt, omitted.num_output) == (len(PROMPT), 3 * CHUNK_SIZE - len(PROMPT))
    assert omitted.hash == chunk_hashes(known, live.request.salt)[2]
    (start,) = report_incomplete(gateway, start.epoch, 0)
    assert is_whole(start) and bytes(start.output_ids) == output.encode()


async def test_incomplete_start_is_sent_again_whole(gateway: Gateway) -> None:
    live = await submit(gateway)
    (start,) = await dispatch(gateway, 2 * CHUNK_SIZE)
    (again,) = report_incomplete(gateway, start.epoch, 0)
    assert is_whole(again) and (again.epoch, again.choice) == (start.epoch, 0)
    assert again.expected_cached_tokens == 0
    assert not gateway.workers.aborted and live.phase is Phase.RUNNING
    assert (live.attempts, live.migrations, live.losses.in_a_row) == (1, 0, 0)
    gateway.make(start.epoch, 0, "abc", LENGTH)
    await until(lambda: live.is_over)
    assert (await gateway.stored())[1] == b"abc"


async def test_incomplete_choices_share_a_whole_prompt(gateway: Gateway) -> None:
    await submit(gateway, n=3)
    epoch = (await dispatch(gateway, CHUNK_SIZE))[0].epoch
    first, second = report_incomplete(gateway, epoch, 0, 2)
    assert is_whole(first) and not is_whole(second) and second.choice == 2
    (second,) = report_incomplete(gateway, epoch, 2)
    assert is_whole(second) and second.choice == 2


async def test_incomplete_start_of_an_ended_attempt_is_ignored(gateway: Gateway) -> None:
    await submit(gateway, n=2)
    epoch = (await dispatch(gateway, CHUNK_SIZE))[0].epoch
    gateway.make(epoch, 0, "a", LENGTH, choice=0)
    assert not report_incomplete(gateway, epoch, 0)
    assert not report_incomplete(gateway, epoch, 7)
    assert not report_incomplete(gateway, epoch + 1, 0)
    gateway.requests.attempts.worker_lost("w")
    assert not report_incomplete(gateway, epoch, 1)


async def test_incomplete_start_without_a_stream_is_released(gateway: Gateway) -> None:
    live = await submit(gateway)
    (start,) = await dispatch(gateway, CHUNK_SIZE)
    gateway.workers.reachable = False
    report_incomplete(gateway, start.epoch, 0)
    await until(lambda: live.phase is Phase.WAITING)
    assert live.avoid == "w" and live.losses.in_a_row == 0
