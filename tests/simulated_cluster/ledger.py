"""Ledger of a simulated cluster: a ledger in memory behind a simulated server and network.

Each process has a view of its own, whose calls take time and fail as those of a server do. Answers
may be late, be lost or never come, and the server may restart without its last moves.

The server checks every fenced move. A fenced-off process generates the same tokens as its
successor, so that a missing fence would otherwise not be noticed.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar, cast

from everlift.errors import LedgerUnavailable, UnknownRequest
from everlift.v1 import inference_pb2 as pb
from router.ledger.base import Ledger, Membership
from router.ledger.config import DEFAULTS
from router.ledger.entry import Append, Appended, Entry, State
from router.ledger.listing import Item
from router.ledger.memory.memory import MemoryLedger
from router.requests.explanation import stored_explanation
from tests.simulated_cluster.clock import Clock, VirtualLoop

T = TypeVar("T")

#: Calls that the product's client gives an id, so that a server recognises a retry.
_NAMED = frozenset({"open", "take_over", "charge"})


class Trouble(Enum):
    """Trouble of a single call."""

    #: the answer was lost, and the client retried
    ASKED_TWICE = "asked twice"
    #: the move was made, but its answer was lost
    ANSWER_LOST = "answer lost"
    #: the move was not made
    CALL_LOST = "call lost"


class LedgerServer:
    """Server with the contents ``memory``; its time differs from the processes' clock."""

    def __init__(self, clock: Clock, latency: float) -> None:
        self._clock = clock
        self._latency = latency
        self.memory = MemoryLedger(lambda: clock.now + 1e9)
        self._generation = 1
        #: additional latency of every call, in seconds
        self.delay = 0.0
        self._away_until = 0.0
        #: returns the trouble of a call of this name
        self.trouble: Callable[[str], Trouble | None] = lambda name: None
        #: changes by fenced-off processes
        self.breaches: list[str] = []

    def view(self, process: VirtualLoop) -> Ledger:
        """Return the ledger as this process sees it."""
        return cast("Ledger", _View(self, process))

    # faults and inspection

    def end_lease(self, seconds: float) -> None:
        """Answer no call for ``seconds``; the contents stay."""
        self._away_until = max(self._away_until, self._clock.now + seconds)

    def snapshot(self) -> MemoryLedger:
        """Return a copy of the present contents, for a later roll-back."""
        return copy.deepcopy(self.memory)

    def restart(self, memory: MemoryLedger) -> None:
        """Restart under a new generation with the contents ``memory``."""
        self.memory = memory
        self._generation += 1

    def peek(self, request_id: str) -> Entry | None:
        """Return the present entry of a request, or None."""
        try:
            return _at_once(self.memory.get(request_id))
        except UnknownRequest:
            return None

    def explained(self, request_id: str) -> pb.Explanation:
        """Return a request's explanation from the stored data."""
        stored = _at_once(self.memory.read(request_id))
        return stored_explanation(stored, _at_once(self.memory.events(request_id)))

    def age_s(self, request_id: str) -> float:
        """Return the seconds from a request's arrival to its last event."""
        entry = _at_once(self.memory.get(request_id))
        return _at_once(self.memory.events(request_id))[-1].time - entry.arrived

    async def audit(self) -> list[Item]:
        """Return all that the ledger holds."""
        return [item async for item in self.memory.audit().items()]

    # interface of the views

    async def call(self, process: VirtualLoop, name: str, *args: Any, **options: Any) -> Any:
        """Make a call of a process; raise LedgerUnavailable, and what the move raises."""
        trouble = self.trouble(name)
        await self._travel(process)
        if trouble is Trouble.CALL_LOST:
            await self._give_up(process)
        answer = await self._answer(name, args, options)
        if trouble is Trouble.ANSWER_LOST:
            await self._give_up(process)
        if trouble is Trouble.ASKED_TWICE:
            await self._travel(process)
            if name not in _NAMED:
                answer = await self._answer(name, args, options)
        await asyncio.sleep(self._latency)
        return answer

    async def _answer(self, name: str, args: Any, options: Any) -> Any:
        move: Callable[..., Awaitable[Any]] = getattr(self.memory, name)
        match name, args:
            case "append", (items,):
                return [await self._append(item) for item in items]
            case "release", (request_id, epoch):
                return await self._under(epoch, request_id, name, move(*args, **options))
            case "dispatch", (request_id, _, _, term):
                making = move(*args, **options)
                return await self._fenced(
                    lambda entry: term == self.memory.term, request_id, name, making
                )
        answer = await move(*args, **options)
        if isinstance(answer, Membership):
            return replace(answer, generation=str(self._generation))
        return answer

    async def _append(self, item: Append) -> Appended:
        making = self.memory.append([item])
        [answer] = await self._under(item.epoch, item.request_id, "append", making)
        return answer

    async def _under(self, epoch: int, request_id: str, name: str, making: Awaitable[T]) -> T:
        """Make a move that only the worker of this epoch may make."""

        def may(entry: Entry) -> bool:
            return entry.state is State.RUNNING and entry.epoch == epoch

        return await self._fenced(may, request_id, name, making)

    async def _fenced(
        self, may: Callable[[Entry], bool], request_id: str, name: str, making: Awaitable[T]
    ) -> T:
        """Make a move; record a breach if it changes an entry that it must not change.

        ``may`` decides by the entry before the move. The move is atomic, because a ledger in memory
        never waits.
        """
        before = self.peek(request_id)
        try:
            return await making
        finally:
            after = self.peek(request_id)
            if before != after and not (before and may(before)):
                self.breaches.append(f"{name} of who was fenced off: {before} -> {after}")

    async def _travel(self, process: VirtualLoop) -> None:
        await asyncio.sleep(self._latency + self.delay)
        away = self._away_until - self._clock.now
        if process.is_dead or away > DEFAULTS.timeout:
            await self._give_up(process)
        while (away := self._away_until - self._clock.now) > 0:
            await asyncio.sleep(away)

    async def _give_up(self, process: VirtualLoop) -> None:
        if not process.is_dead:
            await asyncio.sleep(DEFAULTS.timeout)
        raise LedgerUnavailable("the ledger does not answer")


def _at_once(asked: Coroutine[Any, Any, T]) -> T:
    """Return the answer of a ledger in memory, which never waits."""
    try:
        asked.send(None)
    except StopIteration as answered:
        return cast("T", answered.value)
    raise AssertionError("a ledger in memory waits for nothing")


class _View:
    """Ledger whose methods are calls of the server."""

    def __init__(self, server: LedgerServer, process: VirtualLoop) -> None:
        self._server = server
        self._process = process

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **options: Any) -> Any:
            return await self._server.call(self._process, name, *args, **options)

        return call

    async def close(self) -> None:
        """Do nothing, because no server is called for that."""
