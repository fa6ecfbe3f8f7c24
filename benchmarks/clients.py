"""Clients of a router, or of whatever else has its interface: streams that all go on at once,
requests one after another, and requests that come when they come."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from benchmarks.cores import cpu_seconds, resident_bytes, waited_seconds
from everlift.channels import CLIENT_OPTIONS
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc


class Incomplete(Exception):
    """A stream that ended without all that it should have had, or with something else."""


class Traffic:
    """What came on ``num`` streams: messages with tokens, and tokens."""

    def __init__(self, num: int) -> None:
        self.messages = 0
        self.tokens = 0
        self._silent = num
        #: each stream has its first token
        self.all_began = asyncio.Event()

    def begin(self) -> None:
        self._silent -= 1
        if self._silent == 0:
            self.all_began.set()

    def add(self, tokens: int) -> None:
        self.messages += 1
        self.tokens += tokens


@dataclass(frozen=True, slots=True)
class Window:
    """What came between two moments, and what a process took for it."""

    messages: int
    tokens: int
    cpu_s: float
    wall_s: float
    #: for which others had the process's core
    waited_s: float
    #: of the process, when the streams had begun
    resident_bytes: int

    def figures(self) -> dict[str, float]:
        return {
            "tokens_per_cpu_s": self.tokens / self.cpu_s,
            "messages_per_cpu_s": self.messages / self.cpu_s,
            "tokens_per_message": self.tokens / self.messages,
            "tokens_per_wall_s": self.tokens / self.wall_s,
            "core_share": self.cpu_s / self.wall_s,
            "core_denied": self.waited_s / self.wall_s,
        }


async def watch(pid: int, num: int, read: Callable[[Traffic], Coroutine[Any, Any, None]]) -> Window:
    """``num`` streams, from when each of them has its first token until all have ended."""
    traffic = Traffic(num)
    async with asyncio.TaskGroup() as group:
        for _ in range(num):
            group.create_task(read(traffic))
        await traffic.all_began.wait()
        messages, tokens, resident = traffic.messages, traffic.tokens, resident_bytes(pid)
        cpu, wall, waited = cpu_seconds(pid), time.perf_counter(), waited_seconds(pid)
    return Window(
        traffic.messages - messages,
        traffic.tokens - tokens,
        cpu_seconds(pid) - cpu,
        time.perf_counter() - wall,
        waited_seconds(pid) - waited,
        resident,
    )


class Clients:
    """Take the connections in turn."""

    def __init__(self, stubs: list[inference_pb2_grpc.InferenceAsyncStub]) -> None:
        self._stubs = itertools.cycle(stubs)
        #: requests that were read to their end
        self.answered = 0

    async def read(self, request: pb.GenerateRequest, traffic: Traffic | None = None) -> None:
        """A request from its begin to its end. Raises Incomplete."""
        came = 0
        reason = pb.FINISH_REASON_UNSPECIFIED
        async for piece in next(self._stubs).Generate(request):
            if piece.offset != came:
                raise Incomplete(f"offset {piece.offset} after {came} tokens")
            if traffic is not None and piece.token_ids:
                if not came:
                    traffic.begin()
                traffic.add(len(piece.token_ids))
            came += len(piece.token_ids)
            reason = piece.finish_reason
        if came != request.max_tokens or reason != pb.FINISH_REASON_LENGTH:
            raise Incomplete(f"{came} of {request.max_tokens} tokens, {reason=}")
        self.answered += 1

    async def first_token(self, request: pb.GenerateRequest) -> float:
        """When it came; the rest is read too."""
        at = 0.0
        async for piece in next(self._stubs).Generate(request):
            if piece.token_ids and not at:
                at = time.perf_counter()
        if not at:
            raise Incomplete("a stream without a token")
        return at

    async def ask_again(self, request: pb.GenerateRequest, until: float) -> None:
        """One request after another (closed loop)."""
        while time.perf_counter() < until:
            await self.read(request)

    async def arrive(
        self, request: pb.GenerateRequest, rate: float, seconds: float, chance: random.Random
    ) -> list[float]:
        """Requests that come at random, ``rate`` in a second on average, whether the earlier ones
        have been answered or not (open loop). For each of them the seconds until its first token
        from when it was to come: what held it up before it left counts."""
        begin = time.perf_counter()
        waits: list[float] = []

        async def one(due: float) -> None:
            waits.append(await self.first_token(request) - due)

        async with asyncio.TaskGroup() as group:
            at = chance.expovariate(rate)
            while at < seconds:
                await asyncio.sleep(begin + at - time.perf_counter())
                group.create_task(one(begin + at))
                at += chance.expovariate(rate)
        return waits


@asynccontextmanager
async def connected(address: str, connections: int) -> AsyncIterator[Clients]:
    async with AsyncExitStack() as stack:
        stubs = []
        for _ in range(connections):
            channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
            await stack.enter_async_context(channel)
            stubs.append(inference_pb2_grpc.InferenceStub(channel))
        yield Clients(stubs)
