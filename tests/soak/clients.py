"""Clients of a soak, some of which disconnect and attach again, and records of their outputs."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from cluster.llm.completion import Gathering
from everlift import AsyncClient, OnDisconnect, Stream
from everlift.client.received_output import Chunk
from everlift.errors import EverliftError
from tests.soak.pool import Answer, Pool, Task
from tests.support.router import retrying

#: Limit of the time until all requests have ended after the last one was sent.
_TIMEOUT_S = 180.0
#: One in this many requests loses its client, and another client attaches to it.
_LEAVER_ONE_IN = 8
_AWAY_S = 0.5


@dataclass
class Seen:
    """Request as its client saw it.

    ``arrivals`` are pairs (seconds since 1970, epoch) of chunks with tokens.
    """

    request_id: str
    expected: Answer
    answer: Answer | None = None
    error: str = ""
    repeated: int = 0
    missing: int = 0
    #: tokens that were marked as not in the ledger
    unledgered: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    #: token ids by choice
    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _next: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, chunk: Chunk) -> None:
        following = self._next[chunk.choice]
        self.repeated += max(0, following - chunk.offset)
        self.missing += max(0, chunk.offset - following)
        self._next[chunk.choice] = chunk.offset + len(chunk.token_ids)
        self.unledgered += len(chunk.token_ids) * chunk.unledgered
        # Repeated tokens are counted, and stored once.
        self.tokens[chunk.choice][chunk.offset :] = chunk.token_ids
        if chunk.token_ids:
            self.arrivals.append((time.time(), chunk.epoch))

    @property
    def received(self) -> list[list[int]]:
        return [self.tokens[choice] for choice in range(max(self.tokens, default=-1) + 1)]

    @property
    def is_lost(self) -> bool:
        return self.answer is None or self.missing > 0

    @property
    def is_wrong(self) -> bool:
        return self.answer is not None and self.answer != self.expected

    @property
    def num_tokens(self) -> int:
        return sum(self._next.values())


class Crowd:
    """Open-loop clients that send random requests of the pool."""

    def __init__(self, routers: Sequence[str], pool: Pool, seed: int) -> None:
        self._routers = routers
        self._pool = pool
        self._rng = Random(seed)
        self._prefix = f"soak-{seed}"
        self.seen: list[Seen] = []
        self.under_way: set[asyncio.Task[None]] = set()

    async def run(self, rate: float, seconds: float) -> None:
        """Send ``rate`` requests per second for ``seconds``, and wait until all have ended.

        A request that does not end in time is cancelled and counts as lost.
        """
        clients = [retrying.client(self._turned(n)) for n in range(4)]
        end = time.monotonic() + seconds
        due = time.monotonic()
        while (due := due + self._rng.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._begin(self._rng.choice(clients))
        if self.under_way:
            _, hanging = await asyncio.wait(self.under_way, timeout=_TIMEOUT_S)
            for task in hanging:
                task.cancel()
        for client in clients:
            await client.close()

    def _turned(self, by: int) -> list[str]:
        """Return the routers, rotated by ``by``."""
        by %= len(self._routers)
        return [*self._routers[by:], *self._routers[:by]]

    def _begin(self, client: AsyncClient) -> None:
        task, expected = self._rng.choice(self._pool)
        seen = Seen(f"{self._prefix}-{len(self.seen)}", expected)
        self.seen.append(seen)
        leaves = self._rng.randrange(_LEAVER_ONE_IN) == 0
        after = self._rng.randrange(1, 20)
        ask = (
            self._leave_and_come_back(task, seen, after)
            if leaves
            else self._ask(client, task, seen)
        )
        running = asyncio.create_task(ask)
        self.under_way.add(running)
        running.add_done_callback(self.under_way.discard)

    async def _ask(self, client: AsyncClient, task: Task, seen: Seen) -> None:
        stream = client.generate(task.prompt, request_id=seen.request_id, **task.options)
        with _noting(seen):
            gathering = Gathering()
            await _read(stream, seen, gathering)
            seen.answer = Answer.of(gathering.completion(stream))

    async def _leave_and_come_back(self, task: Task, seen: Seen, after: int) -> None:
        """Break the connection after some tokens, and attach with another client."""
        gathering = Gathering()
        with _noting(seen):
            first = retrying.client(self._routers)
            stream = first.generate(
                task.prompt,
                request_id=seen.request_id,
                on_disconnect=OnDisconnect.CONTINUE,
                **task.options,
            )
            try:
                await _read(stream, seen, gathering, after)
            finally:
                await first.close()
            if stream.usage is None:
                await asyncio.sleep(_AWAY_S)
                async with retrying.client(self._routers) as second:
                    ended = stream.finish_reasons.keys()
                    stream = second.attach(seen.request_id, received=seen.received)
                    await _read_on(stream, seen, gathering, ended)
            seen.answer = Answer.of(gathering.completion(stream))


class _noting(suppress):
    """Context manager that records an EverliftError of the request and suppresses it."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(EverliftError)
        self._seen = seen

    def __exit__(self, kind, error, traceback):  # type: ignore[no-untyped-def]
        if isinstance(error, EverliftError):
            self._seen.error = f"{error.slug}: {error}"
        return super().__exit__(kind, error, traceback)


async def _read(stream: Stream, seen: Seen, gathering: Gathering, most: int | None = None) -> None:
    """Read a stream to its end, or until ``most`` tokens have arrived."""
    async for chunk in stream:
        seen.add(chunk)
        gathering.add(chunk)
        if most is not None and seen.num_tokens >= most:
            return


async def _read_on(stream: Stream, seen: Seen, gathering: Gathering, ended: Set[int]) -> None:
    """Read the rest of a stream after attaching again, without the choices that had ended.

    The stream repeats the last text of such a choice, which may have arrived without a token.
    """
    async for chunk in stream:
        if chunk.choice not in ended:
            seen.add(chunk)
            gathering.add(chunk)
