"""Requests that are in the ledger and in no living gateway's hands: taken over, or read again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from everlift import logs
from everlift.errors import Moved, RouterStopping, UnknownModel
from router.ledger.entry import State, Stored
from router.requests.attempts import Attempts
from router.requests.registry import Custody, Elsewhere
from router.requests.request import LiveRequest
from router.requests.revival import revived
from router.requests.timeouts import Patience
from router.requests.tokenizer import ServedModel

log = logs.get(__name__)

#: Each replays its tokens, which takes the event loop's time.
_AT_ONCE = 4


class Adoption:
    def __init__(
        self, custody: Custody, model: ServedModel, attempts: Attempts, patience: Patience
    ) -> None:
        self._custody = custody
        self._ledger = custody.ledger
        self._model = model
        self._attempts = attempts
        self._patience = patience
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def find(self, request_id: str) -> LiveRequest:
        """Raises UnknownRequest, UnknownModel, Elsewhere, LedgerUnavailable."""
        stored = await self._ledger.read(request_id)
        if stored.entry.state.is_final:
            return await self._ended(stored)
        return await self.adopt(request_id)

    async def adopt(self, request_id: str) -> LiveRequest:
        """Goes on with a request whose gateway is gone. It has the grace until a client comes.

        Raises UnknownRequest, UnknownModel, Elsewhere.
        """
        return await asyncio.shield(self._custody.spawn(self._adopt(request_id)))

    async def check_ownerless(self, owner: str) -> None:
        """Raises Elsewhere when another living gateway has the request."""
        if owner != self._custody.router_id:
            address = (await self._custody.persist(self._ledger.gateways)).get(owner)
            if address is not None:
                raise Elsewhere(address)

    async def _adopt(self, request_id: str) -> LiveRequest:
        async with self._custody.moving.hold(request_id):
            if (live := self._custody.get(request_id)) is not None:
                return live
            owner = (await self._custody.persist(lambda: self._ledger.get(request_id))).gateway
            await self.check_ownerless(owner)
            # Who waits for a part of the ledger that is away keeps no turn from others.
            async with self._turns:
                return await self._take_up(request_id, owner)

    async def _take_up(self, request_id: str, owner: str) -> LiveRequest:
        if self._custody.is_closing:
            raise RouterStopping("this router is stopping: attach through another one")
        stored = await self._take_over(request_id, owner)
        if stored.entry.state.is_final:
            return await self._ended(stored)
        if stored.entry.gateway != self._custody.router_id:
            await self.check_ownerless(stored.entry.gateway)
            raise Moved("another router goes on with this request: attach again")
        return await self._go_on(stored)

    async def _take_over(self, request_id: str, owner: str) -> Stored:
        me = self._custody.router_id
        return await self._custody.persist(lambda: self._ledger.take_over(request_id, me, owner))

    async def _go_on(self, stored: Stored) -> LiveRequest:
        try:
            self._model.begun(stored.request, has_begun=any(stored.entry.num_tokens))
        except UnknownModel as error:
            return await self._give_up(stored, error)
        entry = stored.entry
        log.info("request adopted", request_id=entry.request_id, tokens=sum(entry.num_tokens))
        live = await revived(stored, self._model.tokenizer)
        live.accepted = True
        self._custody.take(live)
        self._attempts.enqueue(live)
        if stored.request.deadline is not None:
            self._patience.expire_in(live, stored.request.deadline - stored.now)
        self._patience.wait_for_reader(live)
        return live

    async def _give_up(self, stored: Stored, error: UnknownModel) -> LiveRequest:
        """What another model began no model here can go on with."""
        entry = await self._custody.persist(
            lambda: self._ledger.end(
                stored.entry.request_id,
                State.FAILED,
                error.slug,
                str(error),
                self._custody.router_id,
            )
        )
        self._custody.quotas.settle(entry.request_id, sum(entry.num_tokens))
        return await self._closed(replace(stored, entry=entry))

    async def _ended(self, stored: Stored) -> LiveRequest:
        """As it ended. To another tokenizer its tokens would be other text."""
        self._model.check_name(stored.request)
        return await self._closed(stored)

    async def _closed(self, stored: Stored) -> LiveRequest:
        live = await revived(stored, self._model.tokenizer)
        self._custody.close_as(live, stored.entry)
        return live
