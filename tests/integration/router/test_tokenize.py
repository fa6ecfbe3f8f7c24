"""Tokenize and Detokenize over the wire; long texts do not block other requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import grpc
import pytest

from cluster.config import DEMO_MODEL
from everlift import wire
from everlift.client.client import AsyncClient
from everlift.errors import EverliftError, OutOfRange, PromptTooLong, UnknownModel
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.requests.tokenizer import ByteTokenizer, ServedModel
from tests.support.in_process import ROUTER, cluster, receive, right_tokens, until

TEXTS = ["", " ", "count from 17 to 30:", "héllo 👩🏽‍🚀\n", "</s>", "x" * 10_000]


@asynccontextmanager
async def stub() -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
    """Yield a stub of a router with the demo model; no worker is needed."""
    config = replace(ROUTER, model=str(DEMO_MODEL))
    async with (
        cluster(workers=0, router_config=config) as parts,
        grpc.aio.insecure_channel(parts.address) as channel,
    ):
        yield inference_pb2_grpc.InferenceStub(channel)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel.load(str(DEMO_MODEL))


async def test_tokenize_matches_prompt_encoding(model: ServedModel) -> None:
    async with stub() as router:
        for text in TEXTS:
            answer = await router.Tokenize(pb.TokenizeRequest(text=text))
            assert tuple(answer.token_ids) == model.encode(text)
            assert answer.max_model_len == 0  # no worker has announced it


async def test_detokenize_matches_tokenizer_decode(model: ServedModel) -> None:
    async with stub() as router:
        for text in TEXTS:
            ids = model.encode(text)[: model.context]
            answer = await router.Detokenize(pb.DetokenizeRequest(token_ids=ids))
            assert answer.text == model.tokenizer.decode(ids)
        plain = model.encode("count from 17 to 30:")
        answer = await router.Detokenize(pb.DetokenizeRequest(token_ids=plain))
        assert answer.text.strip() == "count from 17 to 30:"


async def test_list_models_returns_served_model(model: ServedModel) -> None:
    async with stub() as router:
        [only] = (await router.ListModels(pb.ListModelsRequest())).models
    assert only == pb.Model(
        name=model.name,
        max_model_len=0,
        vocab_size=model.vocab_size,
        sampling_defaults=pb.Sampling(),
        root=model.name,
    )


async def test_tokenize_and_detokenize_errors_name_field(model: ServedModel) -> None:
    length, size = model.context, model.vocab_size
    cases: list[tuple[pb.TokenizeRequest | pb.DetokenizeRequest, type[EverliftError], str]] = [
        (pb.TokenizeRequest(text="a", model="gpt-9"), UnknownModel, "model"),
        (pb.DetokenizeRequest(token_ids=[1], model="gpt-9"), UnknownModel, "model"),
        (pb.TokenizeRequest(text="a" * (128 * length + 1)), PromptTooLong, "text"),
        (pb.DetokenizeRequest(token_ids=[1] * (length + 1)), OutOfRange, "token_ids"),
        (pb.DetokenizeRequest(token_ids=[size]), OutOfRange, "token_ids"),
    ]
    async with stub() as router:
        for request, error, field in cases:
            if isinstance(request, pb.TokenizeRequest):
                call = router.Tokenize(request)
            else:
                call = router.Detokenize(request)
            with pytest.raises(error) as caught:
                await wire.answer(call, call)
            assert caught.value.field == field


class HeldTokenizer(ByteTokenizer):
    """Tokenizer that waits for ``may_read`` before it encodes."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.reads = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.reads.set()
        assert self.may_read.wait(20)
        return super().encode(text, add_special_tokens=add_special_tokens)


async def test_long_prompt_tokenization_does_not_block_other_requests() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as client:
        model = parts.routers[0]._models.first
        model.tokenizer = held = HeldTokenizer()
        model.max_model_len = 10_000
        long = asyncio.create_task(client.generate("x" * 5000, max_tokens=1).text())
        await until(held.reads.is_set)
        assert (await receive(client, [5, 6], 3)).tokens == right_tokens([5, 6], 3)
        assert not long.done()
        held.may_read.set()
        with suppress(EverliftError):
            await long


async def test_tokenizer_releases_gil_for_long_text(model: ServedModel) -> None:
    """The event loop would stall if the tokenizer's thread held the GIL."""
    text = "the quick brown fox counts from 17 to 30 and again, " * 20_000
    turns = 0
    reading = asyncio.create_task(asyncio.to_thread(model.tokenizer.encode, text))
    while not reading.done():
        await asyncio.sleep(0.001)
        turns += 1
    ids = await reading
    back = asyncio.create_task(asyncio.to_thread(model.tokenizer.decode, ids))
    while not back.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert await back
    assert turns > 20
