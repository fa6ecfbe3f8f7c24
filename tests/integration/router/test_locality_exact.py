"""Prefix-cache hits through dispatch yield the tokens of cold runs: the demo model in fp32."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cluster.config import DEMO_MODEL
from everlift.client.client import AsyncClient
from everlift.hashes import BLOCK_SIZE, CHUNK_SIZE
from everlift.v1 import inference_pb2 as pb
from tests.support.in_process import ROUTER, cluster
from worker.config import WorkerConfig

CONFIG = replace(ROUTER, model=str(DEMO_MODEL))
WORKERS = WorkerConfig(
    model=str(DEMO_MODEL), device="cpu", dtype="float32", num_threads=1, num_blocks=256
)
DICE = random.Random(1)
PREFIX = tuple(DICE.choices(range(1, 512), k=600))
#: Prompts with this prefix. The tails end in the prefix's last block, at its end and behind it.
PROMPTS = [PREFIX + tuple(DICE.choices(range(1, 512), k=length)) for length in (3, 8, 40, 120)]
#: Tokens of the prefix that a hit does not compute, and those that dispatch expects to be cached.
HIT_TOKENS = len(PREFIX) // BLOCK_SIZE * BLOCK_SIZE
EXPECTED_TOKENS = len(PREFIX) // CHUNK_SIZE * CHUNK_SIZE


async def generate(
    client: AsyncClient, prompt: tuple[int, ...], salt: str, **options: object
) -> tuple[list[int], pb.ExplainedAttempt]:
    """Return the output tokens of a request and its only attempt."""
    stream = client.generate(prompt, cache_salt=salt, ignore_eos=True, **options)  # type: ignore[arg-type]
    tokens = [token async for chunk in stream for token in chunk.token_ids]
    (attempt,) = (await client.explain(stream.request_id)).attempts
    return tokens, attempt


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 7}])
async def test_dispatch_to_cached_prefix_keeps_every_token(sampling: dict[str, object]) -> None:
    options = {"max_tokens": 40, **sampling}
    async with cluster(1, 2, CONFIG, WORKERS) as parts, AsyncClient(parts.address) as client:
        cold = []
        for number, prompt in enumerate(PROMPTS):
            tokens, attempt = await generate(client, prompt, f"cold {number}", **options)
            assert (attempt.expected_cached_tokens, attempt.cached_tokens) == (0, 0)
            assert len(tokens) == 40
            cold.append(tokens)
        _, warm = await generate(client, PREFIX, "warm", max_tokens=1)
        for prompt, tokens in zip(PROMPTS, cold, strict=True):
            hit_tokens, attempt = await generate(client, prompt, "warm", **options)
            assert attempt.cached_tokens == HIT_TOKENS
            assert hit_tokens == tokens
            assert attempt.expected_cached_tokens == EXPECTED_TOKENS
            assert attempt.worker_id == warm.worker_id
