"""Retention of sessions between turns: a client, a router, a fake worker and a ledger over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc as pb_grpc
from tests.support.in_process import ROUTER, WORKER, cluster
from worker.config import WorkerConfig

#: tokens of the full blocks of a prompt
CACHED = 256
SMALL = replace(WORKER, num_blocks=32, session_retention_s=600.0, session_share=0.5)


def prompt(first: int) -> list[int]:
    """Return a prompt of eight full blocks; prompts with different first tokens share no block."""
    return [first, *range(1, CACHED + 8)]


class Client:
    """Client that runs one request after another, to their ends."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = pb_grpc.InferenceStub(channel)

    async def hits(self, tokens: list[int], session_id: str = "", **fields: object) -> int:
        """Run a request, and return how many tokens of its prompt are prefix-cache hits."""
        return (await self._run(tokens, session_id, fields))[-1].usage.cached_tokens

    async def text(self, tokens: list[int], session_id: str = "", **fields: object) -> str:
        return "".join(piece.text for piece in await self._run(tokens, session_id, fields))

    async def _run(
        self, tokens: list[int], session_id: str, fields: dict[str, object]
    ) -> list[pb.GenerateResponse]:
        request = pb.GenerateRequest(
            tokens=pb.TokenIds(ids=tokens),
            session_id=session_id,
            sampling=pb.Sampling(temperature=0.0),
            **{"max_tokens": 4, "ignore_eos": True, **fields},  # type: ignore[arg-type]
        )
        pieces = [piece async for piece in self._stub.Generate(request)]
        assert pieces[-1].finish_reason
        return pieces

    async def fill_cache(self) -> None:
        """Run requests without a session that need more blocks than the worker has."""
        for number in range(6):
            assert await self.hits(prompt(100 + number)) == 0


@asynccontextmanager
async def client(config: WorkerConfig) -> AsyncIterator[Client]:
    async with cluster(1, 1, ROUTER, config) as parts:
        async with grpc.aio.insecure_channel(parts.address) as channel:
            yield Client(channel)


async def second_turn_hits(config: WorkerConfig) -> tuple[int, int]:
    """Return the hits of the second turns of a session and of a conversation without a session.

    Their first turns have the same age, and requests that fill the KV cache follow.
    """
    async with client(config) as this:
        await this.hits(prompt(1), "s")
        await this.hits(prompt(2))
        await this.fill_cache()
        again = await this.hits([*prompt(1), 5, 6, 7], "s")
        return again, await this.hits([*prompt(2), 5, 6, 7])


async def test_session_survives_traffic_that_evicts_others() -> None:
    assert await second_turn_hits(SMALL) == (CACHED, 0)


async def test_session_without_share_is_evicted_like_others() -> None:
    assert await second_turn_hits(replace(SMALL, session_share=0.0)) == (0, 0)


async def test_session_is_evicted_after_its_retention_time() -> None:
    assert await second_turn_hits(replace(SMALL, session_retention_s=0.0)) == (0, 0)


async def test_turn_ended_by_a_stop_string_is_retained() -> None:
    async with client(SMALL) as this:
        text = await this.text(prompt(1), max_tokens=60)
        before = text.split("<")[0]
        assert await this.text(prompt(1), "s", max_tokens=600, stop=["<"]) == before != text
        await this.fill_cache()
        assert await this.hits([*prompt(1), 5, 6, 7], "s") == CACHED
