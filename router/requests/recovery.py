"""Requests that are in the ledger and in no living gateway's hands: taken over, or read again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from everlift import logs
from everlift.errors import Cancelled, Moved, RouterStopping, UnknownModel, UnknownRequest
from everlift.messages import Request
from everlift.text import Tokenizer
from router.event_loop import now
from router.ledger.entry import Entry, State, Stored, StoredChoice
from router.requests.attempts import Attempts
from router.requests.explanation import resumed
from router.requests.registry import Elsewhere, RequestRegistry
from router.requests.request import LiveRequest, Output, Phase
from router.requests.timeouts import Patience
from router.requests.timing import Journal
from router.requests.tokenizer import ServedModel

#: Replayed before others have their turn.
_TOKENS_AT_ONCE = 1024


def begun(request: Request, entry: Entry, tokenizer: Tokenizer, journal: Journal) -> LiveRequest:
    """Before its first token, and before its dispatch: the entry may tell of that already."""
    outputs = [Output.of(request, tokenizer) for _ in range(request.n)]
    return LiveRequest(request, _before_dispatch(entry), outputs, now(), journal=journal)


def _before_dispatch(entry: Entry) -> Entry:
    if entry.state is not State.RUNNING:
        return entry
    return replace(
        entry,
        state=State.QUEUED,
        worker="",
        epoch=0,
        attempts=entry.attempts - 1,
        moves=entry.moves - 1,
    )


async def revived(stored: Stored, tokenizer: Tokenizer) -> LiveRequest:
    """As it was when the ledger heard of it last."""
    outputs = [await _replayed(stored.request, choice, tokenizer) for choice in stored.choices]
    return LiveRequest(
        stored.request,
        stored.entry,
        outputs,
        now(),
        stored.prompt_logprobs,
        resumed(stored, now()),
    )


async def _replayed(request: Request, choice: StoredChoice, tokenizer: Tokenizer) -> Output:
    output = Output.of(request, tokenizer)
    for start in range(0, len(choice.tokens), _TOKENS_AT_ONCE):
        part = slice(start, start + _TOKENS_AT_ONCE)
        output.extend(choice.tokens[part], choice.logprobs[part])
        await asyncio.sleep(0)
    return output


log = logs.get(__name__)

#: A request is long at times, and others speak with the ledger too.
_REASSERTION_AT_ONCE = 8


class Resync:
    """``agree`` finds out what the ledger has of a request, and settles the difference."""

    def __init__(
        self, registry: RequestRegistry, agree: Callable[[LiveRequest], Awaitable[None]]
    ) -> None:
        self._registry = registry
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
        log.warning("ledger began anew", requests=len(self._registry))
        work = self._work()
        await asyncio.gather(*(_do(work) for _ in range(_REASSERTION_AT_ONCE)))

    def _work(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Clients read what runs, so that comes first."""
        live = list(self._registry)
        for each in sorted(live, key=lambda each: each.phase is Phase.WAITING):
            yield self._agree_on(each)
        for ended in self._registry.recent.ended:
            yield self.tell_end(ended)
        for request_id in self._registry.recent.refused:
            yield self._discard_again(request_id)
        for request_id in self._registry.recent.forgotten:
            yield self._forget_again(request_id)

    async def _agree_on(self, live: LiveRequest) -> None:
        if self._registry.has(live):
            await self._agree(live)

    async def tell_end(self, live: LiveRequest) -> None:
        """Of one that ended a moment ago, if the ledger does not have it."""
        async with self._registry.moving.hold(live.request_id):
            if self._registry.recent.has(live):
                ledger = self._registry.ledger
                await self._registry.move(live, lambda: ledger.get(live.request_id))

    async def _discard_again(self, request_id: str) -> None:
        async with self._registry.moving.hold(request_id):
            if self._registry.recent.was_refused(request_id):
                ledger, me = self._registry.ledger, self._registry.router_id
                await self._registry.persist(lambda: ledger.discard(request_id, me))

    async def _forget_again(self, request_id: str) -> None:
        async with self._registry.moving.hold(request_id):
            arrived = self._registry.recent.arrival_of_forgotten(request_id)
            if arrived is not None:
                with suppress(UnknownRequest):
                    await self._registry.persist(lambda: self._erase(request_id, arrived))

    async def _erase(self, request_id: str, arrived: float) -> None:
        """As it was before it was forgotten it may be unfinished, and then it is ours."""
        ledger, me = self._registry.ledger, self._registry.router_id
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


#: Each replays its tokens, which takes the event loop's time.
_AT_ONCE = 4


class Takeover:
    def __init__(
        self, registry: RequestRegistry, model: ServedModel, attempts: Attempts, patience: Patience
    ) -> None:
        self._registry = registry
        self._ledger = registry.ledger
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
        return await asyncio.shield(self._registry.spawn(self._adopt(request_id)))

    async def check_ownerless(self, owner: str) -> None:
        """Raises Elsewhere when another living gateway has the request."""
        if owner != self._registry.router_id:
            address = (await self._registry.persist(self._ledger.gateways)).get(owner)
            if address is not None:
                raise Elsewhere(address)

    async def _adopt(self, request_id: str) -> LiveRequest:
        async with self._registry.moving.hold(request_id):
            if (live := self._registry.get(request_id)) is not None:
                return live
            owner = (await self._registry.persist(lambda: self._ledger.get(request_id))).gateway
            await self.check_ownerless(owner)
            # Who waits for a part of the ledger that is away keeps no turn from others.
            async with self._turns:
                return await self._take_up(request_id, owner)

    async def _take_up(self, request_id: str, owner: str) -> LiveRequest:
        if self._registry.is_closing:
            raise RouterStopping("this router is stopping: attach through another one")
        stored = await self._take_over(request_id, owner)
        if stored.entry.state.is_final:
            return await self._ended(stored)
        if stored.entry.gateway != self._registry.router_id:
            await self.check_ownerless(stored.entry.gateway)
            raise Moved("another router goes on with this request: attach again")
        return await self._go_on(stored)

    async def _take_over(self, request_id: str, owner: str) -> Stored:
        me = self._registry.router_id
        return await self._registry.persist(lambda: self._ledger.take_over(request_id, me, owner))

    async def _go_on(self, stored: Stored) -> LiveRequest:
        try:
            self._model.begun(stored.request, has_begun=any(stored.entry.num_tokens))
        except UnknownModel as error:
            return await self._give_up(stored, error)
        entry = stored.entry
        log.info("request adopted", request_id=entry.request_id, tokens=sum(entry.num_tokens))
        live = await revived(stored, self._model.tokenizer)
        live.accepted = True
        self._registry.take(live)
        self._attempts.enqueue(live)
        if stored.request.deadline is not None:
            self._patience.expire_in(live, stored.request.deadline - stored.now)
        self._patience.wait_for_reader(live)
        return live

    async def _give_up(self, stored: Stored, error: UnknownModel) -> LiveRequest:
        """What another model began no model here can go on with."""
        entry = await self._registry.persist(
            lambda: self._ledger.end(
                stored.entry.request_id,
                State.FAILED,
                error.slug,
                str(error),
                self._registry.router_id,
            )
        )
        self._registry.quotas.settle(entry.request_id, sum(entry.num_tokens))
        return await self._closed(replace(stored, entry=entry))

    async def _ended(self, stored: Stored) -> LiveRequest:
        """As it ended. To another tokenizer its tokens would be other text."""
        self._model.check_name(stored.request)
        return await self._closed(stored)

    async def _closed(self, stored: Stored) -> LiveRequest:
        live = await revived(stored, self._model.tokenizer)
        self._registry.close_as(live, stored.entry)
        return live
