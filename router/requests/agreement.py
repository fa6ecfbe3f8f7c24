"""The ledger and this gateway have a request in different states: who knows of more moves is right.

The ledger knows less than we do when its server came back without its last second; it knows more
when somebody else moved the request, or when it did what was asked of it and the answer was lost.
"""

from __future__ import annotations

from typing import Protocol

from router.ledger.entry import Entry
from router.requests.registry import RequestRegistry
from router.requests.request import LiveRequest, Phase
from router.requests.token_writer import TokenWriter


class Attempts(Protocol):
    """What happens to a request that goes on otherwise than it was thought."""

    def enqueue(self, live: LiveRequest) -> None: ...

    def queue_again(self, live: LiveRequest, entry: Entry) -> None: ...

    def drop(self, live: LiveRequest) -> None: ...


class Agreement:
    def __init__(self, registry: RequestRegistry, keeping: TokenWriter, attempts: Attempts) -> None:
        self._registry = registry
        self._keeping = keeping
        self._attempts = attempts

    async def find(self, live: LiveRequest, *, is_queued: bool = True) -> None:
        """Asks the ledger, tells it what it has lost, and goes on from what it says then. A request
        that waits is in the leader's queue, unless that ``is_queued`` no more."""
        ledger = self._registry.ledger
        async with self._registry.moving.hold(live.request_id):
            if live.is_ending:
                return
            entry = await self._registry.move(live, lambda: ledger.get(live.request_id))
            if not live.is_ending and (entry.state.is_final or entry.moves >= live.entry.moves):
                await self._take_up(live, entry, is_queued)
            if live.is_over:
                self._attempts.drop(live)

    async def _take_up(self, live: LiveRequest, entry: Entry, is_queued: bool) -> None:
        if entry.state.is_final or not self._registry.is_ours(live, entry):
            self._registry.settle_as(live, entry)
        elif entry.epoch == live.epoch:
            self._keeping.mark_as(live, entry)
            if live.phase is not Phase.WAITING:
                self._keeping.put_rest(live)
            elif not is_queued:
                self._attempts.enqueue(live)
        elif live.phase is not Phase.WAITING or not is_queued:
            await self._begin_anew(live)
        # Else its dispatch is on its way here.

    async def _begin_anew(self, live: LiveRequest) -> None:
        """Takes the request from whoever runs it by what the ledger says."""
        self._attempts.drop(live)
        entry = await self._registry.move(live, lambda: self._taken(live))
        if not live.is_ending:
            # And from whom it was given to meanwhile, by a leader whose word was late.
            self._attempts.drop(live)
            self._attempts.queue_again(live, entry)

    async def _taken(self, live: LiveRequest) -> Entry:
        me = self._registry.router_id
        return (await self._registry.ledger.take_over(live.request_id, me, me)).entry
