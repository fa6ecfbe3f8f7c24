"""The requests that this gateway has in its hands, and what the ledger is asked about them.

Every move is the ledger's. An answer that says that somebody else has a request ends it here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from everlift import logs
from everlift.errors import (
    DataLoss,
    EverliftError,
    LedgerUnavailable,
    Moved,
    UnknownRequest,
    from_slug,
)
from router.gateway.keyed_lock import KeyedLock
from router.gateway.live import LiveRequest
from router.ledger.base import Ledger
from router.ledger.entry import Entry, State

log = logs.get(__name__)

T = TypeVar("T")

#: Between two tries while the ledger is away.
_RETRY_S = 0.1


class Counters:
    """Since this router started."""

    def __init__(self) -> None:
        self.completed = self.failed = self.migrated = self.output_tokens = 0


class Custody:
    def __init__(self, router_id: str, ledger: Ledger) -> None:
        self.router_id = router_id
        self.ledger = ledger
        self.counters = Counters()
        #: held by whoever moves a request in or out of here
        self.moving = KeyedLock()
        self._live: dict[str, LiveRequest] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._live.values()))

    def get(self, request_id: str) -> LiveRequest | None:
        return self._live.get(request_id)

    def take(self, live: LiveRequest) -> None:
        self._live[live.request_id] = live

    def forget(self, live: LiveRequest) -> None:
        if self._live.get(live.request_id) is live:
            del self._live[live.request_id]

    # a request leaves

    def settle_as(self, live: LiveRequest, entry: Entry) -> None:
        """Ends it here as the ledger says."""
        if live.is_over:
            return
        self.forget(live)
        self.counters.failed += entry.state is State.FAILED
        if entry.state is State.FINISHED and not self._is_ours_to_the_end(live, entry):
            live.settle(now(), Moved("it finished on another router: attach again"))
        else:
            self.close_as(live, entry)

    def _is_ours_to_the_end(self, live: LiveRequest, entry: Entry) -> bool:
        """What finished is what was streamed here."""
        tokens = tuple(len(choice.output) for choice in live.choices)
        return entry.gateway == self.router_id and entry.num_tokens == tokens

    def close_as(self, live: LiveRequest, entry: Entry) -> None:
        if entry.state is State.FINISHED:
            for choice, reason in zip(live.choices, entry.finish_reasons, strict=True):
                choice.finish_reason = reason
            live.complete(now())
        else:
            live.settle(now(), _error_of(entry))

    # asking the ledger

    async def ask(self, live: LiveRequest, move: Callable[[], Awaitable[T]]) -> T:
        """A move of a live request; one that the ledger does not know any more ends as DataLoss."""
        try:
            return await self.persist(move)
        except UnknownRequest:
            self.forget(live)
            live.settle(now(), DataLoss("the ledger does not know this request any more"))
            raise

    async def persist(self, move: Callable[[], Awaitable[T]]) -> T:
        """Asks for a move until the ledger answers. Moves may be repeated without harm."""
        while True:
            try:
                return await move()
            except LedgerUnavailable:
                await asyncio.sleep(_RETRY_S)

    # work that outlives its caller

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Goes on whatever becomes of the caller; an error that nobody awaits is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        try:
            task.result()
        except (EverliftError, Elsewhere) as error:
            log.info("not done", cause=str(error))
        except Exception:
            log.exception("request work failed")

    async def cancel_work(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Elsewhere(Exception):
    """A living gateway answers for this request: ``address`` is its internal one."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


def now() -> float:
    """The router's monotonic clock, in seconds."""
    return time.monotonic()


def _error_of(entry: Entry) -> EverliftError:
    if entry.state.is_final:
        return from_slug(entry.error_slug, entry.error_message)
    return Moved("another router goes on with this request: attach again")
