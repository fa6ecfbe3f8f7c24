"""Several choices and their log probabilities are unchanged by lost workers and routers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from everlift.client.client import AsyncClient
from everlift.client.stream import Stream
from everlift.errors import InvalidRequest
from everlift.messages import FinishReason
from everlift.sampling import SamplingParams, TokenLogprobs
from everlift.v1 import inference_pb2 as pb
from tests.support.in_process import WORKER, Cluster, cluster, until
from worker.runner.fake_runner import expected_logprobs, expected_tokens

N, COUNT, NUM_TOP = 3, 90, 2
PROMPTS = [[seed + 1, *range(seed, seed + 40)] for seed in range(6)]


@dataclass
class Received:
    """Received tokens and log probabilities, by choice."""

    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: defaultdict[int, list[TokenLogprobs]] = field(
        default_factory=lambda: defaultdict(list)
    )
    epochs: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))


def submit(client: AsyncClient, prompt: list[int]) -> Stream:
    return client.generate(
        prompt, n=N, max_tokens=COUNT, seed=prompt[0], logprobs=NUM_TOP, prompt_logprobs=0
    )


async def receive(stream: Stream) -> Received:
    received = Received()
    async for chunk in stream:
        assert chunk.offset == len(received.tokens[chunk.choice])
        received.tokens[chunk.choice] += chunk.token_ids
        received.logprobs[chunk.choice] += chunk.logprobs
        received.epochs[chunk.choice].add(chunk.epoch)
    return received


def check(stream: Stream, received: Received, prompt: list[int]) -> None:
    sampling = SamplingParams(seed=prompt[0])
    assert received.tokens.keys() == set(range(N))
    for choice, tokens in received.tokens.items():
        assert tokens == expected_tokens(prompt, COUNT, WORKER.fake, sampling, choice)
        expected = expected_logprobs(prompt + tokens, len(prompt), NUM_TOP, WORKER.fake)
        assert received.logprobs[choice] == expected
    assert list(stream.prompt_logprobs) == expected_logprobs(prompt, 1, 0, WORKER.fake)
    assert stream.finish_reasons == dict.fromkeys(range(N), FinishReason.LENGTH)
    assert stream.usage == pb.Usage(prompt_tokens=len(prompt), output_tokens=N * COUNT)


@pytest.mark.parametrize("tokens_before", [0, 1, 25, 80])
async def test_choices_migrate_from_killed_worker(tokens_before: int) -> None:
    async with cluster() as parts, AsyncClient(parts.address) as client:
        held, other = parts.hold()
        other.release()
        streams = [submit(client, prompt) for prompt in PROMPTS]
        work = [asyncio.create_task(receive(stream)) for stream in streams]
        victim = parts.workers[0]
        link = parts.routers[0]._sessions._links[victim.worker_id]
        await until(lambda: held.num_requests)
        # Too few steps to finish a request, however late the test reacts.
        held.let(tokens_before + 4)
        await until(lambda: link.state.num_running >= N)
        await until(lambda: link.state.output_tokens >= N * tokens_before)
        kill = asyncio.create_task(parts.kill_worker(victim))
        await until(lambda: not link.is_up)
        held.release()
        await kill
        received = await asyncio.gather(*work)
        for stream, one, prompt in zip(streams, received, PROMPTS, strict=True):
            check(stream, one, prompt)
            # The ledger returns the same.
            again = client.attach(stream.request_id)
            check(again, await receive(again), prompt)
        if tokens_before:
            assert any(len(one.epochs[0]) > 1 for one in received)


async def test_choices_migrate_from_drained_worker_without_loss() -> None:
    async with cluster() as parts, AsyncClient(parts.address) as client:
        streams = [submit(client, prompt) for prompt in PROMPTS]
        work = [asyncio.create_task(receive(stream)) for stream in streams]
        leaving = parts.workers[0]
        link = parts.routers[0]._sessions._links[leaving.worker_id]
        await until(lambda: link.state.output_tokens > 100)
        await parts.drain_worker(leaving)
        for stream, one, prompt in zip(streams, await asyncio.gather(*work), PROMPTS, strict=True):
            check(stream, one, prompt)
        assert await losses(parts, streams) == 0


async def losses(parts: Cluster, streams: list[Stream]) -> int:
    entries = [await parts.ledger.get(stream.request_id) for stream in streams]
    return sum(entry.losses for entry in entries)


async def test_choices_resume_after_router_death() -> None:
    async with cluster(routers=2, workers=2) as parts:
        first, second = parts.routers
        async with AsyncClient([first.address, second.address]) as client:
            streams = [submit(client, prompt) for prompt in PROMPTS]
            work = [asyncio.create_task(receive(stream)) for stream in streams]
            await until(lambda: first._requests.counters.output_tokens > 300)
            await parts.kill_router(first)
            for stream, one, prompt in zip(
                streams, await asyncio.gather(*work), PROMPTS, strict=True
            ):
                check(stream, one, prompt)


async def test_choices_beyond_slots_are_all_generated() -> None:
    async with cluster(workers=0) as parts, AsyncClient(parts.address) as client:
        await parts.add_worker(max_num_seqs=4)
        stream = client.generate([1, 2, 3], n=10, max_tokens=9, seed=5)
        received = await receive(stream)
        sampling = SamplingParams(seed=5)
        assert len(received.tokens) == 10
        for choice, tokens in received.tokens.items():
            assert tokens == expected_tokens([1, 2, 3], 9, WORKER.fake, sampling, choice)
        assert parts.routers[0]._sessions.links[0].state.num_running == 0


async def test_unsupported_grammar_is_an_invalid_request() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as client:
        stream = client.generate("x", n=2, max_tokens=4, regex="a")
        with pytest.raises(InvalidRequest, match="supports no grammar") as caught:
            await stream.texts()
        assert caught.value.grpc_status == "INVALID_ARGUMENT"
        known = await client.get_request(stream.request_id)
        assert (known.state, known.attempts) == (pb.REQUEST_STATE_FAILED, 1)
