"""Client of the ledger, and the health of the ledger as this router sees it."""

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
    """Availability, memory, clock and lost writes of the ledger, updated with each heartbeat."""

    def __init__(self, memory_limit: float) -> None:
        """Create the record; ``memory_limit`` is a fraction of the ledger's memory.

        New requests are rejected while the ledger uses more memory than this.
        """
        self._memory_limit = memory_limit
        self._generation = ""
        #: whether this generation of the ledger lacks acknowledged state, and whether that was
        #: found since the last heartbeat
        self._is_rolled_back = self._is_newly_rolled_back = False
        #: why the ledger lacks the required durability; empty if it does not lack it
        self._unfit = ""
        #: used fraction of the ledger's memory
        self.memory_used = 0.0
        self.is_away = False
        #: number of times that the ledger restarted without state that it had acknowledged
        self.rollbacks = 0
        #: ledger time minus the router's clock, in seconds
        self.clock_offset_s = 0.0

    def record_heartbeat(self, membership: Membership, now: float) -> None:
        self.clock_offset_s = membership.now - now
        self.is_away = False
        self.memory_used = membership.memory_used
        self._unfit = membership.unfit
        if membership.generation != self._generation:
            # A loss that was found since the last heartbeat belongs to the new generation.
            self._generation, self._is_rolled_back = (
                membership.generation,
                self._is_newly_rolled_back,
            )
        self._is_newly_rolled_back = False

    def record_failure(self) -> None:
        self.is_away = True

    def record_rollback(self) -> None:
        """Record that the ledger lacks state that it had acknowledged.

        Further calls have no effect until the ledger's next generation (restart or failover).
        """
        if not self._is_rolled_back:
            self.rollbacks += 1
            self._is_rolled_back = self._is_newly_rolled_back = True

    @property
    def is_fit(self) -> bool:
        """Return whether the ledger answers and has the required durability."""
        return not self.is_away and not self._unfit

    def check_writable(self) -> None:
        """Check that the ledger can store a new request.

        Raises LedgerUnavailable if it does not answer or lacks the required durability, and
        LedgerFull if it uses more memory than the limit.
        """
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

#: Seconds between two attempts of a call while the ledger is unavailable.
_RETRY_S = 0.1
#: Limit of losses that no request reaches.
_NO_LIMIT = 1 << 30


class LedgerClient:
    """Client of the ledger that retries calls and restores state that the ledger lost.

    The attribute ``ledger`` is for calls without retries, whose failure the caller handles.
    """

    def __init__(self, ledger: Ledger, registry: RequestRegistry, health: LedgerHealth) -> None:
        self.ledger = ledger
        self._router_id = registry.router_id
        self._registry = registry
        self._health = health

    async def retry(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Return the result of an idempotent operation, repeated until the ledger answers."""
        while True:
            try:
                return await operation()
            except LedgerUnavailable:
                await asyncio.sleep(_RETRY_S)

    async def check_ownerless(self, owner: str) -> None:
        """Check that the router ``owner`` is this router or is not alive.

        Raises Elsewhere, with the owner's address, if it is another living router.
        """
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
        """End the attempt ``epoch`` of a request in the ledger; return its ledger entry after that.

        The request is queued again. ``loss`` is the cause if a worker lost the request, else None.
        A loss is counted, and at ``max_losses`` the request ends as failed; None sets no limit.
        """
        return await self._move(
            live,
            lambda: self.ledger.release(
                live.request_id,
                epoch,
                loss=loss,
                max_losses=_NO_LIMIT if max_losses is None else max_losses,
                tally=live.tally,
                explanation=live.packed_explanation(now()),
            ),
        )

    async def end(self, live: LiveRequest, state: State, error: EverliftError) -> Entry:
        return await self._move(live, lambda: self._end(live, state, error))

    async def requeue(self, live: LiveRequest) -> Entry:
        """Queue a request again in the ledger; return the request's entry after that.

        Call this if this router and the ledger disagree on the request's attempt. The request is
        taken over in the ledger with this router as both the previous and the new owner. The ledger
        thereby ends the current attempt, if there is one, and refuses later tokens of that attempt.
        """
        return await self._move(live, lambda: self._take_over_own(live))

    async def fail(self, live: LiveRequest, error: EverliftError) -> None:
        """End a request as failed, for its clients at once and in the ledger when it answers."""
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
        """Run ``operation`` until the ledger answers; return the entry that the operation returns.

        Restore state of the request that the ledger lost, and repeat the operation. Return the
        ledger's entry without repeating the operation if the request is final in the ledger after
        the restoration, or could not be restored. End the request with DataLoss if the ledger
        contradicts what was streamed.

        Raises UnknownRequest if the ledger lacks the request, and this router neither owns the
        request nor has ended it recently.
        """
        while True:
            acknowledged = _acknowledged(live)
            try:
                entry = await self.retry(operation)
            except UnknownRequest:
                if not (self._registry.has(live) or self._registry.recent.has(live)):
                    # The ledger did not lose the request: the request was rejected or erased.
                    raise
            else:
                if _has_all(entry, acknowledged):
                    return entry
            answer, entry = await self._restore(live)
            # A final state in the ledger cannot be overwritten, even if it contradicts this
            # router's.
            if answer is not Reasserted.OK or entry.state.is_final:
                return entry

    async def _restore(self, live: LiveRequest) -> tuple[Reasserted, Entry]:
        """Send the ledger the state of a request again; return the result and the ledger's entry.

        If the ledger has other tokens than those that were streamed, the request ends with
        DataLoss. If the request was erased, the returned entry has the state CANCELLED.
        """
        answer, entry = await self.retry(lambda: self.ledger.reassert(live.as_stored()))
        if answer is Reasserted.FORGOTTEN:
            return answer, _erased(entry)
        self._health.record_rollback()
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
        """End a request as failed in the ledger; return its entry, or None if it is unknown."""
        with suppress(UnknownRequest):
            return await self.retry(lambda: self._end(live, State.FAILED, error))
        return None


def _acknowledged(live: LiveRequest) -> tuple[int, ...]:
    """Return the counts that the ledger has acknowledged, in the order that ``_has_all`` compares.

    First the number of moves (state changes in the ledger), then the number of tokens of each
    choice, then for each choice whether it has ended.
    """
    tokens = (choice.stored for choice in live.choices)
    return live.entry.moves, *tokens, *(choice.is_complete for choice in live.choices)


def _has_all(entry: Entry, acknowledged: tuple[int, ...]) -> bool:
    """Return whether each count of ``entry`` is at least the one in ``acknowledged``.

    ``acknowledged`` is a result of ``_acknowledged``: the number of moves (state changes), then the
    tokens of each choice, then for each choice whether it has ended. Return False for another
    number of choices: the entry then belongs to an older request that had the same id.
    """
    has = (entry.moves, *entry.num_tokens, *map(bool, entry.finish_reasons))
    return len(has) == len(acknowledged) and all(map(ge, has, acknowledged))


def _erased(entry: Entry) -> Entry:
    """Return ``entry`` with the state CANCELLED, because the ledger has erased the request."""
    error = Cancelled("erased by Forget")
    return replace(
        entry,
        state=State.CANCELLED,
        gateway="",
        worker="",
        epoch=0,
        error_slug=error.slug,
        error_message=str(error),
    )
