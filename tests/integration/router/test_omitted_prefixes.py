"""Start messages that omit cached prefixes of prompts, over real gRPC with fake workers."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from everlift.client.client import AsyncClient
from everlift.hashes import CHUNK_SIZE
from everlift.v1 import session_pb2
from router.worker_sessions import WorkerLink
from tests.support.in_process import (
    ROUTER,
    WORKER,
    cluster,
    paced_cluster,
    receive,
    right_tokens,
    until,
)
from worker.config import FakeModel
from worker.serving.rank import Rank

PROMPT = [1 + i % 900 for i in range(3 * CHUNK_SIZE + 20)]
FAKE = replace(WORKER, num_blocks=400, fake=FakeModel(step_time=0.002, max_model_len=8192))


class Wire:
    """Start messages that routers sent, and the reports of missing prefixes that they got."""

    def __init__(self) -> None:
        self.starts: list[session_pb2.Start] = []
        self.incomplete: list[session_pb2.IncompleteStart] = []

    def take(self) -> list[session_pb2.Start]:
        starts, self.starts = self.starts, []
        return starts


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    wire, start, on_frame = Wire(), WorkerLink.start, WorkerLink._on_frame

    def recorded(link: WorkerLink, starts: Sequence[session_pb2.Start]) -> None:
        # The link takes the prompts out of the messages.
        wire.starts.extend(map(copy.deepcopy, starts))
        start(link, starts)

    async def record_frame(link: WorkerLink, frame: session_pb2.WorkerFrame) -> None:
        wire.incomplete.extend(frame.incomplete_starts)
        await on_frame(link, frame)

    monkeypatch.setattr(WorkerLink, "start", recorded)
    monkeypatch.setattr(WorkerLink, "_on_frame", record_frame)
    yield wire


def forget_prompts(rank: Rank) -> None:
    """Delete a worker's stored prompt tokens, but not its KV cache."""
    assert rank._sessions is not None
    rank._sessions._chunks._chunks.clear()


async def turn(client: AsyncClient, prompt: list[int], count: int = 300, **options: object) -> None:
    received = await receive(client, prompt, count, **options)
    assert received.is_contiguous
    assert received.tokens == right_tokens(prompt, count, FAKE)


def chunks_in(num_tokens: int) -> int:
    return num_tokens // CHUNK_SIZE * CHUNK_SIZE


@pytest.mark.parametrize("num_routers", [1, 2])
async def test_second_turn_sends_only_the_tail(wire: Wire, num_routers: int) -> None:
    async with cluster(num_routers, 2, worker_config=FAKE) as parts:
        async with AsyncClient(parts.address) as client:
            await turn(client, PROMPT)
            (first,) = wire.take()
            assert not first.HasField("omitted_prefix")
            # The answer to the first turn is a part of the second prompt. The KV of its last token
            # was never computed.
            history = [*PROMPT, *right_tokens(PROMPT, 300, FAKE)]
            await turn(client, [*history, 5, 6, 7])
            (second,) = wire.take()
        kept = chunks_in(len(history) - 1)
        assert second.omitted_prefix.num_prompt == kept > len(PROMPT)
        assert list(second.prompt_ids) == [*history, 5, 6, 7][kept:]
        assert not wire.incomplete


async def test_worker_without_the_prefix_receives_it_whole(wire: Wire) -> None:
    async with cluster(1, 2, worker_config=FAKE) as parts, AsyncClient(parts.address) as client:
        await turn(client, PROMPT)
        for rank in parts.workers:
            forget_prompts(rank)
        wire.take()
        stream = client.generate([*PROMPT, 5], request_id="r", max_tokens=300, temperature=0.0)
        tokens = [token async for piece in stream for token in piece.token_ids]
        assert tokens == right_tokens([*PROMPT, 5], 300, FAKE)
        part, whole = wire.take()
        assert part.HasField("omitted_prefix") and not whole.HasField("omitted_prefix")
        assert (part.epoch, part.choice) == (whole.epoch, whole.choice)
        assert list(whole.prompt_ids) == [*PROMPT, 5] and len(wire.incomplete) == 1
        # No loss, no second attempt, and no unacknowledged start at the leader.
        (attempt,) = (await client.explain("r")).attempts
        assert attempt.cached_tokens >= 3 * CHUNK_SIZE
        assert parts.routers[0]._requests.counters.failed == 0
        views = parts.routers[0].leader.views.values()
        await until(lambda: not any(view.unacknowledged.choices for view in views))
        # The worker has stored the prompt that it received whole.
        await turn(client, [*PROMPT, 8])
        assert [it.HasField("omitted_prefix") for it in wire.take()] == [True]


async def test_choices_share_a_prompt(wire: Wire) -> None:
    async with cluster(1, 1, worker_config=FAKE) as parts, AsyncClient(parts.address) as client:
        for lost in (False, True):
            if lost:
                forget_prompts(parts.workers[0])
            stream = client.generate(PROMPT, max_tokens=40, temperature=0.0, n=3)
            tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
            async for piece in stream:
                tokens[piece.choice] += piece.token_ids
            assert [*tokens.values()] == 3 * [right_tokens(PROMPT, 40, FAKE)]
            starts = wire.take()
            lengths = [len(it.prompt_ids) for it in starts]
            assert lengths == ([20, 20, 20] if lost else []) + [len(PROMPT), 20, 20]


async def test_request_of_a_lost_worker_continues_exactly(wire: Wire) -> None:
    async with (
        paced_cluster(1, 2, step_s=0.002, worker_config=FAKE) as parts,
        AsyncClient(parts.address) as client,
    ):
        await turn(client, PROMPT)
        for round_ in range(2):
            prompt = [*PROMPT, *range(1, 40 + round_)]
            reading = asyncio.create_task(receive(client, prompt, 400))
            running = parts.routers[0]._requests.attempts._attempts.running
            await until(lambda running=running: any(it.num_tokens > 20 for it in running))
            (live,) = running
            (warm,) = (it for it in parts.workers if it.worker_id == live.worker_id)
            await parts.kill_worker(warm)
            received = await reading
            assert received.is_contiguous and received.migrations == 1
            assert received.tokens == right_tokens(prompt, 400, FAKE)
            resumed = wire.take()[-1]
            assert resumed.output_ids and not resumed.HasField("omitted_prefix")
            await parts.add_worker()


async def test_request_returns_to_a_worker_that_has_it(wire: Wire) -> None:
    """The request's generated tokens are omitted as well."""
    async with cluster(1, 1, worker_config=FAKE) as parts, AsyncClient(parts.address) as client:
        [held] = parts.hold()
        reading = asyncio.create_task(receive(client, PROMPT, 600))
        await until(lambda: held.num_requests)
        held.let(530)
        attempts = parts.routers[0]._requests.attempts
        await until(lambda: any(live.num_tokens > 520 for live in attempts._attempts.running))
        (live,) = attempts._attempts.running
        attempts.move(live.epoch)
        held.release()
        received = await reading
        assert received.is_contiguous
        assert received.tokens == right_tokens(PROMPT, 600, FAKE)
        _, again = wire.take()
        assert again.omitted_prefix.num_output > CHUNK_SIZE and not again.prompt_ids


async def test_evicted_prompt_is_sent_whole(wire: Wire) -> None:
    small = replace(FAKE, num_blocks=60)
    async with cluster(1, 1, worker_config=small) as parts, AsyncClient(parts.address) as client:
        await turn(client, PROMPT, 8)
        await turn(client, [7, *PROMPT, *PROMPT[:600]], 8)
        wire.take()
        await turn(client, PROMPT, 8)
        (start,) = wire.take()
        assert start.omitted_prefix.num_prompt < 3 * CHUNK_SIZE
        sessions = parts.workers[0]._sessions
        assert sessions is not None and len(sessions._chunks) <= 60 * 32 // CHUNK_SIZE


async def test_salts_do_not_share_prompts(wire: Wire) -> None:
    async with cluster(1, 1, worker_config=FAKE) as parts, AsyncClient(parts.address) as client:
        for salt in ("a", "b"):
            await turn(client, PROMPT, 8, cache_salt=salt)
            assert [it.HasField("omitted_prefix") for it in wire.take()] == [False]
        await turn(client, PROMPT, 8, cache_salt="a")
        assert [it.HasField("omitted_prefix") for it in wire.take()] == [True]


async def test_wrong_salt_does_not_reach_other_prompts(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router wrongly expects that the worker has the prefix for this salt."""
    async with cluster(1, 1, worker_config=FAKE) as parts, AsyncClient(parts.address) as client:
        await turn(client, PROMPT, 8, cache_salt="a")
        index = parts.routers[0].leader._placements["fake"].index
        monkeypatch.setattr(index, "depths", lambda chain: [(3, index.bit(worker_id))])
        worker_id = parts.workers[0].worker_id
        await turn(client, PROMPT, 8, cache_salt="b")
        assert len(wire.incomplete) == 1


async def test_prompts_are_whole_without_locality(wire: Wire) -> None:
    config = replace(ROUTER, locality=False)
    async with cluster(1, 1, config, FAKE) as parts, AsyncClient(parts.address) as client:
        await turn(client, PROMPT, 8)
        await turn(client, PROMPT, 8, n=1)
        stream = client.generate(PROMPT, max_tokens=4, n=2)
        await stream.text()
        assert not any(it.HasField("omitted_prefix") for it in wire.starts)
