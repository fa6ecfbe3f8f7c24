"""A ledger whose server began anew, or whose replica took over, is told what this gateway knows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

from everlift import logs
from everlift.errors import Cancelled, UnknownRequest
from router.ledger.entry import State
from router.requests.registry import Custody
from router.requests.request import LiveRequest, Phase

log = logs.get(__name__)

#: A request is long at times, and others speak with the ledger too.
_AT_ONCE = 8


class Reassertion:
    """``agree`` finds out what the ledger has of a request, and settles the difference."""

    def __init__(self, custody: Custody, agree: Callable[[LiveRequest], Awaitable[None]]) -> None:
        self._custody = custody
        self._agree = agree
        self._generation = ""
        self._telling = asyncio.Lock()

    async def hear(self, generation: str) -> None:
        """Returns when the ledger of this generation has been told all; of the first one, which
        cannot have lost anything of ours, at once."""
        async with self._telling:
            if self._generation and generation != self._generation:
                await self._tell()
            self._generation = generation

    async def _tell(self) -> None:
        log.warning("ledger began anew", requests=len(self._custody))
        work = self._work()
        await asyncio.gather(*(_do(work) for _ in range(_AT_ONCE)))

    def _work(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Clients read what runs, so that comes first."""
        live = list(self._custody)
        for each in sorted(live, key=lambda each: each.phase is Phase.WAITING):
            yield self._agree_on(each)
        for ended in self._custody.recent.ended:
            yield self.tell_end(ended)
        for request_id in self._custody.recent.refused:
            yield self._discard_again(request_id)
        for request_id in self._custody.recent.forgotten:
            yield self._forget_again(request_id)

    async def _agree_on(self, live: LiveRequest) -> None:
        if self._custody.has(live):
            await self._agree(live)

    async def tell_end(self, live: LiveRequest) -> None:
        """Of one that ended a moment ago, if the ledger does not have it."""
        async with self._custody.moving.hold(live.request_id):
            if self._custody.recent.has(live):
                ledger = self._custody.ledger
                await self._custody.move(live, lambda: ledger.get(live.request_id))

    async def _discard_again(self, request_id: str) -> None:
        async with self._custody.moving.hold(request_id):
            if self._custody.recent.was_refused(request_id):
                ledger, me = self._custody.ledger, self._custody.router_id
                await self._custody.persist(lambda: ledger.discard(request_id, me))

    async def _forget_again(self, request_id: str) -> None:
        async with self._custody.moving.hold(request_id):
            arrived = self._custody.recent.arrival_of_forgotten(request_id)
            if arrived is not None:
                with suppress(UnknownRequest):
                    await self._custody.persist(lambda: self._erase(request_id, arrived))

    async def _erase(self, request_id: str, arrived: float) -> None:
        """As it was before it was forgotten it may be unfinished, and then it is ours."""
        ledger, me = self._custody.ledger, self._custody.router_id
        if (await ledger.get(request_id)).arrived != arrived:
            return
        error = Cancelled("it was forgotten")
        await ledger.end(request_id, State.CANCELLED, error.slug, str(error), me)
        await ledger.forget(request_id)


async def _do(work: Iterator[Coroutine[Any, Any, None]]) -> None:
    for each in work:
        try:
            await each
        except Exception:
            log.exception("not told again")
