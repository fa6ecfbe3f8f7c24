"""Health of the ledger as this router sees it: availability, memory, clock and losses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from operator import ge
from typing import TypeVar

from everlift import logs
from everlift.errors import (
    Cancelled,
    DataLoss,
    EverliftError,
    LedgerFull,
    LedgerUnavailable,
    UnknownRequest,
)
from router.event_loop import now
from router.ledger.base import Ledger, Membership
from router.ledger.entry import Entry, Reasserted, State
from router.requests.registry import RequestRegistry
from router.requests.request import Elsewhere, LiveRequest


class LedgerHealth:
    """Updated with each heartbeat of this router."""

    def __init__(self, memory_limit: float) -> None:
        """Create the client; requests are rejected above ``memory_limit`` of the memory."""
        self._memory_limit = memory_limit
        self._generation = ""
        #: this generation lacks acknowledged state; and that was found since the last heartbeat
        self._has_lost = self._has_just_lost = False
        self._unfit = ""
        self.memory_used = 0.0
        self.is_away = False
        #: times that the ledger came back without acknowledged state
        self.rollbacks = 0
        #: ledger time less the router's clock, in seconds
        self.clock_offset_s = 0.0

    def answered(self, membership: Membership, now: float) -> None:
        self.clock_offset_s = membership.now - now
        self.is_away = False
        self.memory_used = membership.memory_used
        self._unfit = membership.unfit
        if membership.generation != self._generation:
            # A loss that was found before the first heartbeat of the new generation is its loss.
            self._generation, self._has_lost = membership.generation, self._has_just_lost
        self._has_just_lost = False

    def failed(self) -> None:
        self.is_away = True

    def lost(self) -> None:
        """Note that the ledger lacks acknowledged state."""
        if not self._has_lost:
            self.rollbacks += 1
            self._has_lost = self._has_just_lost = True

    @property
    def is_fit(self) -> bool:
        """Return whether the ledger answers and has the required durability."""
        return not self.is_away and not self._unfit

    def check_room(self) -> None:
        """Raise LedgerUnavailable or LedgerFull if no request can be opened."""
        if self.is_away:
            raise LedgerUnavailable("the ledger does not answer")
        if self._unfit:
            raise LedgerUnavailable(self._unfit)
        if self.memory_used > self._memory_limit:
            raise LedgerFull(
                f"the ledger uses {self.memory_used:.0%} of its memory", retry_after_s=1.0
            )


log = logs.get_logger(__name__)

T = TypeVar("T")

#: Seconds between two tries while the ledger is unavailable.
_RETRY_S = 0.1
#: A number of losses that no request reaches.
_NEVER = 1 << 30


class LedgerClient:
    """Client of the ledger; ``ledger`` is for single calls whose failure the caller reports."""

    def __init__(self, ledger: Ledger, registry: RequestRegistry, health: LedgerHealth) -> None:
        self.ledger = ledger
        self._router_id = registry.router_id
        self._registry = registry
        self._health = health

    async def retry(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Repeat an idempotent operation until the ledger answers."""
        while True:
            try:
                return await operation()
            except LedgerUnavailable:
                await asyncio.sleep(_RETRY_S)

    async def check_ownerless(self, owner: str) -> None:
        """Raise Elsewhere if another living router owns the request."""
        if owner != self._router_id:
            address = (await self.retry(self.ledger.gateways)).get(owner)
            if address is not None:
                raise Elsewhere(address)

    # operations on an owned request

    async def get(self, live: LiveRequest) -> Entry:
        return await self._move(live, lambda: self.ledger.get(live.request_id))

    async def release(
        self, live: LiveRequest, epoch: int, loss: str | None, max_losses: int | None
    ) -> Entry:
        """Queue a request again that ran under ``epoch``.

        ``loss`` is the cause if a worker lost it; the request ends as failed if that is its loss
        number ``max_losses``.
        """
        return await self._move(
            live,
            lambda: self.ledger.release(
                live.request_id,
                epoch,
                loss=loss,
                max_losses=_NEVER if max_losses is None else max_losses,
                tally=live.tally,
                explanation=live.packed_explanation(now()),
            ),
        )

    async def end(self, live: LiveRequest, state: State, error: EverliftError) -> Entry:
        return await self._move(live, lambda: self._end(live, state, error))

    async def requeue(self, live: LiveRequest) -> Entry:
        """Fence the attempt that the ledger knows, by a takeover from this router itself."""
        return await self._move(live, lambda: self._take_over_own(live))

    async def fail(self, live: LiveRequest, error: EverliftError) -> None:
        """End a request as failed, here at once and in the ledger when it answers."""
        self._registry.fail(live, error)
        await self._end_as_failed(live, error)
        self._registry.trace_end(live)

    async def _take_over_own(self, live: LiveRequest) -> Entry:
        me = self._router_id
        return (await self.ledger.take_over(live.request_id, me, me)).entry

    async def _end(self, live: LiveRequest, state: State, error: EverliftError) -> Entry:
        return await self.ledger.end_request(
            live.request_id,
            state,
            error.slug,
            str(error),
            self._router_id,
            live.packed_explanation(now()),
        )

    async def _move(self, live: LiveRequest, operation: Callable[[], Awaitable[Entry]]) -> Entry:
        """Return the ledger's answer, after a restore if the ledger lost what it acknowledged.

        The request is over if the ledger contradicts what was streamed. Raises UnknownRequest for
        a request that this router has released.
        """
        while True:
            acknowledged = _acknowledged(live)
            try:
                entry = await self.retry(operation)
            except UnknownRequest:
                if not (self._registry.has(live) or self._registry.recent.has(live)):
                    # The request was rejected or erased meanwhile, not lost.
                    raise
            else:
                if _has_all(entry, acknowledged):
                    return entry
            answer, entry = await self._restore(live)
            # A final state stays, also one that contradicts ours: it cannot be restored over.
            if answer is not Reasserted.OK or entry.state.is_final:
                return entry

    async def _restore(self, live: LiveRequest) -> tuple[Reasserted, Entry]:
        """Send the ledger the state of a request again.

        End the request if the ledger has other tokens than were streamed, or if it was erased.
        """
        answer, entry = await self.retry(lambda: self.ledger.reassert(live.held()))
        if answer is Reasserted.FORGOTTEN:
            return answer, _erased(entry)
        self._health.lost()
        log.warning(
            "state re-sent to the ledger", request_id=live.request_id, tokens=live.num_tokens
        )
        if answer is Reasserted.DIVERGED:
            error = DataLoss("the ledger has other tokens than were streamed")
            entry = await self._end_as_failed(live, error) or entry
            self._registry.fail(live, error)
            self._registry.trace_end(live)
        return answer, entry

    async def _end_as_failed(self, live: LiveRequest, error: EverliftError) -> Entry | None:
        """Return the ledger's entry; None for a request that was erased meanwhile."""
        with suppress(UnknownRequest):
            return await self.retry(lambda: self._end(live, State.FAILED, error))
        return None


def _acknowledged(live: LiveRequest) -> tuple[int, ...]:
    """Return the counts of moves, tokens and ends that the ledger has acknowledged."""
    tokens = (choice.stored for choice in live.choices)
    return live.entry.moves, *tokens, *(choice.is_complete for choice in live.choices)


def _has_all(entry: Entry, acknowledged: tuple[int, ...]) -> bool:
    """Return whether ``entry`` has all of it.

    It can be the entry of an older request of the same id, with another number of choices.
    """
    has = (entry.moves, *entry.num_tokens, *map(bool, entry.finish_reasons))
    return len(has) == len(acknowledged) and all(map(ge, has, acknowledged))


def _erased(entry: Entry) -> Entry:
    """Return the end of an erased request, of which the ledger has no entry."""
    error = Cancelled("it was forgotten")
    return replace(
        entry,
        state=State.CANCELLED,
        gateway="",
        worker="",
        epoch=0,
        error_slug=error.slug,
        error_message=str(error),
    )
