"""The reported context length, and values of max_tokens that exceed it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest

from cluster.llm.llm import LLM
from everlift.client.client import AsyncClient
from everlift.errors import ContextLengthExceeded
from tests.support.in_process import ROUTER, WORKER, Cluster, cluster, receive, until
from tests.support.router.front_answers import FRONTS, Answer, chat, many
from tests.support.router.http_client import JSON, ask, get
from tests.support.worker.grammar_support import DEMO_MODEL
from worker.config import WorkerConfig

CONTEXT = 64
SMALL = replace(WORKER, max_model_len=CONTEXT)
NUMBERS = re.compile(
    r"maximum context length is (\d+) tokens\. However, you requested (\d+) tokens "
    r"\((\d+) in the messages, (\d+) in the completion\)"
)


def numbers(message: str) -> list[int]:
    found = NUMBERS.search(message)
    assert found is not None, message
    return [int(number) for number in found.groups()]


async def models(parts: Cluster) -> dict[str, Any]:
    [model] = (await get(parts.routers[0].http_address, "/v1/models")).json["data"]
    return dict(model)


# reported context length


async def test_max_model_len_is_unknown_until_a_worker_joins() -> None:
    async with (
        cluster(workers=0, worker_config=SMALL) as parts,
        AsyncClient(parts.address) as client,
    ):
        model = await models(parts)
        assert (model["id"], model["max_model_len"]) == ("fake", None)
        answer = await ask(parts.routers[0].http_address, "/tokenize", {"prompt": "abc"}, JSON)
        assert (answer.json["count"], answer.json["max_model_len"]) == (3, None)
        assert (await client.models()).models[0].max_model_len == 0
        assert (await client.tokenize("abc")).max_model_len == 0
        await parts.add_worker()
        assert (await models(parts))["max_model_len"] == CONTEXT
        answer = await ask(parts.routers[0].http_address, "/tokenize", {"prompt": "abc"}, JSON)
        assert answer.json["max_model_len"] == CONTEXT
        assert (await client.models()).models[0].max_model_len == CONTEXT
        assert (await client.tokenize("abc")).max_model_len == CONTEXT


async def test_max_model_len_is_restored_from_the_ledger() -> None:
    async with cluster(workers=1, worker_config=SMALL) as parts:
        await parts.kill_router(parts.routers[0])
        await parts.add_router()
        assert (await models(parts))["max_model_len"] == CONTEXT


# requests accepted before a worker has joined


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "slug"),
    [
        ([7] * 10, CONTEXT - 10, ""),
        ([7] * 10, CONTEXT - 9, "context_length_exceeded"),
        ([7] * CONTEXT, 1, "context_length_exceeded"),
        ([7] * CONTEXT, None, "prompt_too_long"),
    ],
)
async def test_requests_queued_before_the_first_worker_end_cleanly(
    prompt: list[int], max_tokens: int | None, slug: str
) -> None:
    async with cluster(workers=0, worker_config=SMALL) as parts:
        fields = {"tokens": prompt, "max_tokens": max_tokens}
        asked = {
            name: asyncio.create_task(front(parts, fields, {})) for name, front in FRONTS.items()
        }
        await until(lambda: len(parts.routers[0]._requests) == len(FRONTS))
        await parts.add_worker()
        async with asyncio.timeout(20):
            answers = {name: await task for name, task in asked.items()}
    assert {name: answer.slug for name, answer in answers.items()} == dict.fromkeys(FRONTS, slug)
    if slug == "context_length_exceeded":
        assert max_tokens is not None
        total = len(prompt) + max_tokens
        for answer in answers.values():
            assert numbers(answer.message) == [CONTEXT, total, len(prompt), max_tokens]


async def test_queued_request_without_max_tokens_fills_the_context() -> None:
    async with (
        cluster(workers=0, worker_config=SMALL) as parts,
        AsyncClient(parts.address) as client,
    ):
        stream = client.generate([7] * 10, temperature=0, ignore_eos=True)
        text = asyncio.create_task(stream.text())
        await until(lambda: len(parts.routers[0]._requests) == 1)
        await parts.add_worker()
        await text
        assert stream.usage is not None and stream.usage.output_tokens == CONTEXT - 10


# max_tokens beyond the context


@pytest.mark.parametrize("front", [*FRONTS, "GenerateMany"])
async def test_max_tokens_beyond_the_context_is_rejected(front: str) -> None:
    send = {**FRONTS, "GenerateMany": many}[front]
    async with cluster(workers=1, worker_config=SMALL) as parts:
        for prompt in ({"tokens": [7] * 10}, {"text": "a" * 10}):
            fits = {**prompt, "max_tokens": CONTEXT - 10}
            assert await send(parts, fits, {}) == Answer()
            refused = await send(parts, {**prompt, "max_tokens": CONTEXT - 9}, {})
            assert refused.slug == "context_length_exceeded"
            assert refused.status in (400, "INVALID_ARGUMENT")
            assert numbers(refused.message) == [CONTEXT, CONTEXT + 1, 10, CONTEXT - 9]
            assert await send(parts, {**prompt, "max_tokens": None}, {}) == Answer()


@pytest.mark.parametrize("front", [*FRONTS, "GenerateMany"])
async def test_router_setting_clamps_max_tokens(front: str) -> None:
    send = {**FRONTS, "GenerateMany": many}[front]
    config = replace(ROUTER, clamp_max_tokens=True)
    async with cluster(workers=1, router_config=config, worker_config=SMALL) as parts:
        assert await send(parts, {"text": "a" * 10, "max_tokens": 1 << 30}, {}) == Answer()
        async with AsyncClient(parts.address) as client:
            assert len((await receive(client, [7] * 10, 4000)).tokens) == CONTEXT - 10


async def test_request_option_clamps_max_tokens() -> None:
    async with (
        cluster(workers=1, worker_config=SMALL) as parts,
        AsyncClient(parts.address) as client,
    ):
        with pytest.raises(ContextLengthExceeded) as caught:
            await receive(client, [7] * 10, 4000)
        assert caught.value.field == "max_tokens"
        received = await receive(client, [7] * 10, 4000, clamp_max_tokens=True)
        assert len(received.tokens) == CONTEXT - 10


async def test_client_truncates_a_prompt_to_its_end() -> None:
    async with (
        cluster(workers=1, worker_config=SMALL) as parts,
        AsyncClient(parts.address) as client,
    ):
        long = [7] * CONTEXT + [8, 9]
        expected = await receive(client, long[-10:], 4)
        assert (await receive(client, long, 4, truncate_prompt_tokens=10)).tokens == expected.tokens
        request = client.generate(long, max_tokens=4, truncate_prompt_tokens=-1, request_id="r")
        await request.text()
        stored = await parts.ledger.read("r")
        assert stored.request.prompt_ids == tuple(long[4 - CONTEXT :])


async def test_completions_default_max_tokens_is_clamped() -> None:
    """The output of a request that sets no max_tokens fills the rest of the context."""
    async with cluster(workers=1, worker_config=SMALL) as parts:
        body = {"prompt": [7] * (CONTEXT - 5)}
        answer = await ask(parts.routers[0].http_address, "/v1/completions", body, JSON)
        assert answer.json["usage"]["completion_tokens"] == 5


async def test_chat_error_names_the_field_its_client_set() -> None:
    worker = WorkerConfig(model=str(DEMO_MODEL), device="cpu", num_blocks=2, num_threads=1)
    router = replace(ROUTER, model=str(DEMO_MODEL))
    async with cluster(workers=1, router_config=router, worker_config=worker) as parts:
        for name in ("max_tokens", "max_completion_tokens"):
            fields = {"text": "hi", "max_tokens": None, name: 64}
            refused = await chat(parts, fields, {})
            assert refused.slug == "context_length_exceeded"
            context, total, prompt, completion = numbers(refused.message)
            assert (context, total, completion) == (64, 64 + prompt, 64)
            body = {"messages": [{"role": "user", "content": "hi"}], name: 64}
            answer = await ask(parts.routers[0].http_address, "/v1/chat/completions", body, JSON)
            assert answer.json["error"]["param"] == name
        assert await chat(parts, {"text": "hi", "max_tokens": None}, {}) == Answer()


async def test_long_chat_is_rejected_before_full_tokenisation() -> None:
    worker = WorkerConfig(model=str(DEMO_MODEL), device="cpu", num_blocks=2, num_threads=1)
    router = replace(ROUTER, model=str(DEMO_MODEL))
    async with cluster(workers=1, router_config=router, worker_config=worker) as parts:
        # The number of characters alone does not reject these texts.
        for front, text in ((chat, "count " * 500), (FRONTS["HTTP"], "count " * 500)):
            refused = await front(parts, {"text": text}, {})
            assert refused.slug == "prompt_too_long"
            assert re.search(r"characters have about \d+ tokens", refused.message)


def test_llm_rejects_or_clamps_excess_max_tokens() -> None:
    with LLM("fake", max_model_len=CONTEXT) as llm:
        with pytest.raises(ContextLengthExceeded, match=f"is {CONTEXT} tokens"):
            llm.generate([[7] * 10], max_tokens=CONTEXT)
        [clamped] = llm.generate([[7] * 10], max_tokens=CONTEXT, clamp_max_tokens=True)
        [unset] = llm.generate([[7] * 10], ignore_eos=True)
        assert clamped.num_output_tokens == unset.num_output_tokens == CONTEXT - 10
