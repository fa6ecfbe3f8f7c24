"""Recovery of a dead router's requests, and of recent state that the ledger lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from everlift import logs
from everlift.errors import Cancelled, Moved, RouterStopping, UnknownModel, UnknownRequest
from everlift.messages import Request
from everlift.request_id import is_named
from everlift.text import Tokenizer
from router.event_loop import now
from router.ledger.entry import State, Stored, StoredChoice
from router.requests.attempt_runner import AttemptRunner
from router.requests.explanation import resumed_journal
from router.requests.ledger_client import LedgerClient
from router.requests.registry import RequestRegistry
from router.requests.request import LiveRequest, Output, Phase
from router.requests.served_models import ServedModels
from router.requests.tasks import TaskGroup
from router.requests.timeouts import Timeouts

log = logs.get_logger(__name__)

#: Number of tokens of stored output that are replayed without yielding to the event loop.
_TOKENS_PER_TURN = 1024
#: Maximum number of requests whose state is sent to the ledger again at the same time. More would
#: delay the ledger's answers to other requests.
_MAX_CONCURRENT_RESYNCS = 8
#: Maximum number of concurrent takeovers, each of which replays its tokens in the event loop.
_MAX_CONCURRENT_TAKEOVERS = 4


async def restored_request(stored: Stored, tokenizer: Tokenizer) -> LiveRequest:
    """Return a live request with the state in ``stored``, which was read from the ledger.

    The text of its output is decoded again from the stored tokens.
    """
    outputs = [await _replayed(stored.request, choice, tokenizer) for choice in stored.choices]
    return LiveRequest(
        stored.request,
        stored.entry,
        outputs,
        now(),
        stored.prompt_logprobs,
        resumed_journal(stored, now()),
    )


async def _replayed(request: Request, choice: StoredChoice, tokenizer: Tokenizer) -> Output:
    output = Output.of(request, tokenizer)
    for start in range(0, len(choice.tokens), _TOKENS_PER_TURN):
        part = slice(start, start + _TOKENS_PER_TURN)
        output.extend(choice.tokens[part], choice.logprobs[part])
        await asyncio.sleep(0)
    return output


class Resync:
    """Restores, in the ledger, the state of this router's requests that the ledger has lost.

    ``reconcile`` brings one live request and its ledger entry into the same state.
    """

    def __init__(
        self,
        registry: RequestRegistry,
        ledger: LedgerClient,
        reconcile: Callable[[LiveRequest], Awaitable[None]],
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._reconcile = reconcile
        self._generation = ""
        self._lock = asyncio.Lock()

    async def run(self, generation: str) -> None:
        """Restore all state of this router that the ledger lacks if ``generation`` is new.

        The ledger's generation changes with each restart or failover of a ledger server. Nothing
        is restored at the first call, because the ledger cannot have lost any state of this router
        yet. Return when all requests have been restored, or their errors logged.
        """
        async with self._lock:
            if self._generation and generation != self._generation:
                log.warning("ledger has a new generation", requests=len(self._registry))
                recent, work = self._registry.recent, self._work()
                recent.hold()
                try:
                    await asyncio.gather(*(_run(work) for _ in range(_MAX_CONCURRENT_RESYNCS)))
                finally:
                    recent.release()
            self._generation = generation

    def _work(self) -> Iterator[Coroutine[Any, Any, None]]:
        # Running requests come first because their clients are waiting for tokens.
        live = list(self._registry)
        for request in sorted(live, key=lambda request: request.phase is Phase.WAITING):
            yield self._reconcile_owned(request)
        for ended in self._registry.recent.ended:
            yield self.resend_end(ended)
        for request_id in self._registry.recent.rejected:
            yield self._resend_rejection(request_id)
        for request_id in self._registry.recent.erased:
            yield self._resend_erasure(request_id)

    async def _reconcile_owned(self, live: LiveRequest) -> None:
        if self._registry.has(live):
            await self._reconcile(live)

    async def resend_end(self, live: LiveRequest) -> None:
        """Send the ledger the end of a recently ended request, if the ledger lacks it."""
        async with self._registry.locks.hold(live.request_id):
            if self._registry.recent.has(live):
                await self._ledger.get(live)

    async def _resend_rejection(self, request_id: str) -> None:
        async with self._registry.locks.hold(request_id):
            if self._registry.recent.was_rejected(request_id):
                ledger, me = self._ledger.ledger, self._registry.router_id
                await self._ledger.retry(lambda: ledger.discard(request_id, me))

    async def _resend_erasure(self, request_id: str) -> None:
        async with self._registry.locks.hold(request_id):
            arrived = self._registry.recent.erased_arrival(request_id)
            if arrived is not None:
                with suppress(UnknownRequest):
                    await self._ledger.retry(lambda: self._erase(request_id, arrived))

    async def _erase(self, request_id: str, arrived: float) -> None:
        ledger = self._ledger.ledger
        entry = await ledger.get(request_id)
        if entry.arrived != arrived:
            return
        # The request may belong to a router that was not alive when the client erased it.
        await self._ledger.check_ownerless(entry.gateway)
        error = Cancelled("erased by Forget")
        await ledger.end_request(request_id, State.CANCELLED, error.slug, str(error), entry.gateway)
        if await ledger.erase(request_id) is not None:
            raise Moved("another router has taken over this request, which was erased")


async def _run(work: Iterator[Coroutine[Any, Any, None]]) -> None:
    for resync in work:
        try:
            await resync
        except Exception:
            log.exception("state not re-sent to the ledger")


class Takeover:
    """Takes over requests whose router is gone, and restores ended requests from the ledger."""

    def __init__(
        self,
        registry: RequestRegistry,
        ledger: LedgerClient,
        tasks: TaskGroup,
        models: ServedModels,
        attempts: AttemptRunner,
        timeouts: Timeouts,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._tasks = tasks
        self._models = models
        self._attempts = attempts
        self._timeouts = timeouts
        self._semaphore = asyncio.Semaphore(_MAX_CONCURRENT_TAKEOVERS)

    async def attach(self, request_id: str) -> LiveRequest:
        """Return an unfinished or ended request; take it over if it is unfinished and ownerless.

        An unfinished request is ownerless if the router that owned it is gone.

        Raises UnknownRequest, UnknownModel if an ended request is for a model that is not served,
        and Elsewhere if another living router owns the request. Raises Moved if another router took
        it over meanwhile and is not known to be alive. Also raises RouterStopping and
        LedgerUnavailable.
        """
        if (live := self._registry.known(request_id)) is not None:
            return live
        stored = await self._ledger.ledger.read(request_id)
        if stored.entry.state.is_final:
            return await self._restore_ended(stored)
        return await self.take_over(request_id)

    def schedule_takeover(self, request_id: str) -> None:
        """Take over a request in the background, if the ledger has it and its router is gone."""
        self._tasks.spawn(self._take_over_if_known(request_id))

    def schedule_takeover_of_unanswered(self, request_id: str, is_charged: bool) -> None:
        """Take over, in the background, a request whose submission failed, if the ledger has it.

        A client that chose the request's id may submit it again, so the request is treated as if
        its last reader had left. A request with a generated id is cancelled: nobody knows the id.
        If the ledger lacks the request, and the submission was charged to its tenant
        (``is_charged``), the charge is cancelled.
        """
        self._tasks.spawn(self._take_over_unanswered(request_id, is_charged))

    async def _take_over_unanswered(self, request_id: str, is_charged: bool) -> None:
        try:
            live = await self.take_over(request_id)
        except UnknownRequest:
            # The client may have submitted the request again, which did not charge it again.
            async with self._registry.locks.hold(request_id):
                if is_charged and self._registry.known(request_id) is None:
                    self._registry.quotas.settle(request_id, None)
            return
        if is_named(request_id):
            self._timeouts.on_reader_left(live, has_grace=True)
        else:
            self._timeouts.cancel_unread(live, "its client was told that it was not accepted")

    async def _take_over_if_known(self, request_id: str) -> None:
        with suppress(UnknownRequest):
            await self.take_over(request_id)

    async def take_over(self, request_id: str) -> LiveRequest:
        """Take over a request whose router is gone, continue it, and return it.

        The request is cancelled if no client attaches within the grace period, unless its
        on_disconnect is CONTINUE. If the request has ended, or cannot continue with the served
        model, return it as ended. Raises UnknownRequest, UnknownModel if an ended request is for
        another model, and RouterStopping. Raises Elsewhere and Moved as ``attach`` does.
        """
        return await asyncio.shield(self._tasks.spawn(self._take_over(request_id)))

    async def _take_over(self, request_id: str) -> LiveRequest:
        async with self._registry.locks.hold(request_id):
            if (live := self._registry.get(request_id)) is not None:
                return live
            entry = await self._ledger.retry(lambda: self._ledger.ledger.get(request_id))
            await self._ledger.check_ownerless(entry.gateway)
            # The semaphore is acquired only now, so that the waits for the ledger above do not
            # block other takeovers.
            async with self._semaphore:
                return await self._take_from(request_id, entry.gateway)

    async def _take_from(self, request_id: str, owner: str) -> LiveRequest:
        if self._registry.is_closing:
            raise RouterStopping("this router is stopping: attach through another router")
        ledger, me = self._ledger.ledger, self._registry.router_id
        stored = await self._ledger.retry(lambda: ledger.take_over(request_id, me, owner))
        if stored.entry.state.is_final:
            return await self._restore_ended(stored)
        if stored.entry.gateway != me:
            await self._ledger.check_ownerless(stored.entry.gateway)
            raise Moved("another router owns this request: attach again")
        return await self._continue(stored)

    async def _continue(self, stored: Stored) -> LiveRequest:
        try:
            model = self._models.of(stored.request)
            model.with_fingerprint(stored.request, has_output=any(stored.entry.num_tokens))
        except UnknownModel as error:
            return await self._fail(stored, error)
        entry = stored.entry
        log.info("request taken over", request_id=entry.request_id, tokens=sum(entry.num_tokens))
        live = await restored_request(stored, model.tokenizer)
        live.accepted = True
        self._registry.add(live)
        self._attempts.enqueue(live)
        if stored.request.deadline is not None:
            self._timeouts.set_deadline(live, stored.request.deadline - stored.now)
        self._timeouts.start_grace(live)
        return live

    async def _fail(self, stored: Stored, error: UnknownModel) -> LiveRequest:
        entry = await self._ledger.retry(
            lambda: self._ledger.ledger.end_request(
                stored.entry.request_id,
                State.FAILED,
                error.slug,
                str(error),
                self._registry.router_id,
            )
        )
        self._registry.quotas.settle(entry.request_id, sum(entry.num_tokens))
        return await self._restore_closed(replace(stored, entry=entry))

    async def _restore_ended(self, stored: Stored) -> LiveRequest:
        # Another model's tokenizer would decode the tokens to another text.
        self._models.of(stored.request)
        return await self._restore_closed(stored)

    async def _restore_closed(self, stored: Stored) -> LiveRequest:
        model = self._models.find(stored.request) or self._models.first
        live = await restored_request(stored, model.tokenizer)
        self._registry.close(live, stored.entry)
        return live
