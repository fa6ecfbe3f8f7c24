"""Clients of a router, or of another server with its interface.

They read many streams at a time, send requests in a closed loop, or in an open loop.
"""

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
    """Raised if a stream ended early, or with another content than expected."""


class Traffic:
    """Counters over ``num`` streams: messages with tokens, and tokens."""

    def __init__(self, num: int) -> None:
        self.messages = 0
        self.tokens = 0
        self._silent = num
        #: set when each stream has its first token
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
    """Traffic of an interval, and the CPU time and memory of the process that delivered it."""

    messages: int
    tokens: int
    cpu_s: float
    wall_s: float
    #: seconds in which the process was ready, but others had its core
    waited_s: float
    #: resident memory of the process at the begin of the interval
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
    """Run ``read`` for ``num`` streams, and measure them and the process ``pid``.

    The interval is from the time when each stream has its first token until all have ended.
    """
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
    """Client with several connections, which it uses in turn."""

    def __init__(self, stubs: list[inference_pb2_grpc.InferenceAsyncStub]) -> None:
        self._stubs = itertools.cycle(stubs)
        #: number of requests that were read to their end
        self.answered = 0

    async def read(self, request: pb.GenerateRequest, traffic: Traffic | None = None) -> None:
        """Send a request and read its stream to the end; count it in ``traffic``.

        Raises Incomplete if the stream does not have exactly ``max_tokens`` tokens.
        """
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
        """Return the time.perf_counter() of the first token, after the whole stream was read.

        Raises Incomplete if there is no token.
        """
        at = 0.0
        async for piece in next(self._stubs).Generate(request):
            if piece.token_ids and not at:
                at = time.perf_counter()
        if not at:
            raise Incomplete("a stream without a token")
        return at

    async def closed_loop(self, request: pb.GenerateRequest, until: float) -> None:
        """Send one request after another until the time.perf_counter() ``until``."""
        while time.perf_counter() < until:
            await self.read(request)

    async def open_loop(
        self, request: pb.GenerateRequest, rate: float, seconds: float, chance: random.Random
    ) -> list[float]:
        """Send requests for ``seconds`` with Poisson arrivals, ``rate`` per second.

        Return the time to first token of each request, in seconds from its due time, even if it was
        sent late.
        """
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
