"""The requests of clients: submitted, attached to, read, cancelled; and adopted from dead gateways.

What a request goes through:

    submit/adopt -> ledger, admission queue -> dispatched -> worker -> progress -> ledger -> readers
                          ^                                   |
                          +------- lost, or given back -------+      (attempts.py)
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace

from everlift import logs
from everlift.errors import (
    Cancelled,
    DeadlineExceeded,
    LedgerUnavailable,
    Moved,
    OffsetOutOfRange,
    QueueFull,
    RequestConflict,
    RouterStopping,
    UnknownModel,
    UnknownRequest,
)
from everlift.messages import OnDisconnect, Request, Submission
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.config import RouterConfig
from router.gateway.attempts import Attempts, Line, Workers
from router.gateway.custody import Custody, Elsewhere, now
from router.gateway.live import LiveRequest, Phase
from router.gateway.model import ServedModel
from router.gateway.output import Output
from router.gateway.reading import Reading
from router.ledger.base import Ledger
from router.ledger.entry import Entry, State, Stored, StoredChoice

log = logs.get(__name__)

#: Each replays its tokens, which takes the event loop's time.
_ADOPTIONS_AT_ONCE = 4
#: Replayed before others have their turn.
_TOKENS_AT_ONCE = 1024


class Requests:
    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        ledger: Ledger,
        model: ServedModel,
        workers: Workers,
        line: Line,
    ) -> None:
        self._config = config
        self._router_id = router_id
        self._ledger = ledger
        self._model = model
        self._line = line
        self._custody = Custody(router_id, ledger)
        self._adoptions = asyncio.Semaphore(_ADOPTIONS_AT_ONCE)
        self.attempts = Attempts(config, self._custody, workers, line, self.adopt_soon)
        self.counters = self._custody.counters
        self.stopping = False

    def __len__(self) -> int:
        return len(self._custody)

    # a client comes

    async def submit(self, submission: Submission, timeout_s: float | None) -> LiveRequest:
        """The request of a new submission, or the one that its id already names.

        Raises InvalidRequest, UnknownModel, RequestConflict, QueueFull, RouterStopping,
        LedgerUnavailable, Elsewhere.
        """
        request = self._model.resolve(submission)
        opening = self._custody.spawn(self._open(request, timeout_s))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # Its client is gone, but the ledger may have the request by now.
            self._custody.spawn(self._nobody_reads(opening))
            raise

    async def _open(self, request: Request, timeout_s: float | None) -> LiveRequest:
        async with self._custody.moving.hold(request.request_id):
            if (known := self._custody.get(request.request_id)) is not None:
                return _same(known, request)
            self._check_room()
            try:
                opened = await self._ledger.open(request, self._router_id, timeout_s)
            except LedgerUnavailable:
                self._custody.spawn(self._recover(request.request_id))
                raise
            if opened.created:
                live = self._take(self._new(request, opened.entry))
                self._expire_in(live, timeout_s)
                return live
        return await self.attach(request.request_id)

    async def _nobody_reads(self, opening: asyncio.Future[LiveRequest]) -> None:
        self._reader_left(await opening)

    async def _recover(self, request_id: str) -> None:
        """It may have been opened although the answer was lost: then it must not lie about."""
        with suppress(UnknownRequest, Elsewhere):
            await self.adopt(request_id)

    def _check_room(self) -> None:
        if self.stopping:
            raise RouterStopping("this router is stopping: send the request to another one")
        if self._line.queued >= self._config.max_queued:
            raise QueueFull(f"{self._line.queued} requests wait already", retry_after_s=1.0)

    async def attach(self, request_id: str, offsets: Sequence[int] = ()) -> LiveRequest:
        """A known request, live or ended. One whose gateway is gone goes on here. ``offsets`` are
        by choice.

        Raises UnknownRequest, OffsetOutOfRange, Elsewhere, LedgerUnavailable.
        """
        live = self._custody.get(request_id)
        if live is None:
            live = await self._attach_stored(request_id)
        if len(offsets) > len(live.choices):
            raise OffsetOutOfRange(f"{len(offsets)} offsets of {len(live.choices)} choices")
        for choice, offset in zip(live.choices, offsets, strict=False):
            if not 0 <= offset <= choice.readable:
                raise OffsetOutOfRange(f"offset {offset} of {choice.readable} tokens")
        return live

    async def _attach_stored(self, request_id: str) -> LiveRequest:
        stored = await self._ledger.read(request_id)
        if stored.entry.state.is_final:
            return await self._replayed(stored)
        return await self.adopt(request_id)

    async def adopt(self, request_id: str) -> LiveRequest:
        """Goes on with a request whose gateway is gone. It has the grace until a client comes.

        Raises UnknownRequest, Elsewhere.
        """
        return await asyncio.shield(self._custody.spawn(self._adopting(request_id)))

    async def _adopting(self, request_id: str) -> LiveRequest:
        async with self._adoptions, self._custody.moving.hold(request_id):
            if (live := self._custody.get(request_id)) is not None:
                return live
            if self.stopping:
                raise RouterStopping("this router is stopping: attach through another one")
            owner = (await self._custody.persist(lambda: self._ledger.get(request_id))).gateway
            await self._check_ownerless(owner)
            stored = await self._custody.persist(
                lambda: self._ledger.take_over(request_id, self._router_id, owner)
            )
            if not stored.entry.state.is_final and stored.entry.gateway != self._router_id:
                raise Moved("another router goes on with this request: attach again")
            if stored.request.model != self._model.name:
                return await self._give_up(stored)
            if stored.entry.state.is_final:
                return await self._replayed(stored)
            return await self._resume(stored)

    async def _check_ownerless(self, owner: str) -> None:
        """Raises Elsewhere when another living gateway has the request."""
        if owner != self._router_id:
            address = (await self._custody.persist(self._ledger.gateways)).get(owner)
            if address is not None:
                raise Elsewhere(address)

    async def _give_up(self, stored: Stored) -> LiveRequest:
        """What another model began no model here can go on with."""
        error = UnknownModel(f"the model {stored.request.model!r} is not served any more")
        entry = await self._custody.persist(
            lambda: self._ledger.end(
                stored.entry.request_id, State.FAILED, error.slug, str(error), self._router_id
            )
        )
        return await self._replayed(replace(stored, entry=entry))

    async def _resume(self, stored: Stored) -> LiveRequest:
        entry = stored.entry
        log.info("request adopted", request_id=entry.request_id, tokens=sum(entry.num_tokens))
        live = await self._restored(stored)
        live.accepted = True
        self._take(live)
        if stored.request.deadline is not None:
            self._expire_in(live, stored.request.deadline - stored.now)
        self._wait_for_reader(live)
        return live

    def _take(self, live: LiveRequest) -> LiveRequest:
        self._custody.take(live)
        self._line.enqueue(live.waiting())
        return live

    def _new(self, request: Request, entry: Entry) -> LiveRequest:
        outputs = [Output.of(request, self._model.tokenizer) for _ in range(request.n)]
        return LiveRequest(request, entry, outputs, now())

    async def _restored(self, stored: Stored) -> LiveRequest:
        """As it was when the ledger heard of it last."""
        outputs = [await self._output(stored.request, choice) for choice in stored.choices]
        return LiveRequest(stored.request, stored.entry, outputs, now(), stored.prompt_logprobs)

    async def _output(self, request: Request, choice: StoredChoice) -> Output:
        output = Output.of(request, self._model.tokenizer)
        for start in range(0, len(choice.tokens), _TOKENS_AT_ONCE):
            part = slice(start, start + _TOKENS_AT_ONCE)
            output.extend(choice.tokens[part], choice.logprobs[part])
            await asyncio.sleep(0)
        return output

    async def _replayed(self, stored: Stored) -> LiveRequest:
        """An ended request, as it ended."""
        live = await self._restored(stored)
        self._custody.close_as(live, stored.entry)
        return live

    # a client reads, and goes

    async def stream(
        self, live: LiveRequest, offsets: Sequence[int] = ()
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The pieces of a stream, of each choice from its offset on; raises the request's error at
        its end."""
        reading = Reading(live, offsets)
        try:
            with live.reader() as wake:
                yield reading.head()
                while True:
                    wake.clear()
                    for piece in reading.pieces():
                        yield piece
                    if reading.is_at_end:
                        return
                    # While a piece was on its way, more may have come before the error.
                    if live.error is not None and not wake.is_set():
                        raise live.error.with_traceback(None)
                    await wake.wait()
        finally:
            self._reader_left(live)

    def _reader_left(self, live: LiveRequest) -> None:
        if live.is_over or live.has_readers or self.stopping:
            return
        if live.on_disconnect is OnDisconnect.CANCEL:
            self.attempts.end(live, State.CANCELLED, Cancelled("its client disconnected"))
        else:
            self._wait_for_reader(live)

    def _wait_for_reader(self, live: LiveRequest) -> None:
        if live.on_disconnect is OnDisconnect.CONTINUE:
            return

        def give_up() -> None:
            if not live.has_readers:
                error = Cancelled(f"no client came back within {self._config.grace:g} s")
                self.attempts.end(live, State.CANCELLED, error)

        live.end_grace()
        live.grace = asyncio.get_running_loop().call_later(self._config.grace, give_up)

    def _expire_in(self, live: LiveRequest, timeout_s: float | None) -> None:
        if timeout_s is None:
            return

        def expire() -> None:
            self.expire(live)

        live.deadline = asyncio.get_running_loop().call_later(max(0.0, timeout_s), expire)

    def expire(self, live: LiveRequest) -> None:
        """Its deadline is there."""
        if not live.is_over:
            self.attempts.end(live, State.EXPIRED, DeadlineExceeded("the deadline passed"))

    async def cancel(self, request_id: str) -> Entry:
        """Ends a request; a final one stays as it is. Raises UnknownRequest, Elsewhere."""
        live = self._custody.get(request_id)
        if live is None:
            entry = await self._ledger.get(request_id)
            if entry.state.is_final:
                return entry
            await self._check_ownerless(entry.gateway)
            return await self._ledger.end(
                request_id, State.CANCELLED, Cancelled.slug, "cancelled by a client", entry.gateway
            )
        error = Cancelled("cancelled by a client")
        return await asyncio.shield(self.attempts.end(live, State.CANCELLED, error))

    async def get(self, request_id: str) -> Stored:
        """What the ledger knows of a request, less its tokens. Raises UnknownRequest."""
        entry = await self._ledger.get(request_id)
        return await self._ledger.read(request_id, entry.num_tokens)

    # the leader speaks

    def dispatched(self, message: session_pb2.Dispatched) -> None:
        self.attempts.dispatched(message)

    def stale(self, request_id: str) -> None:
        self.attempts.stale(request_id)

    def refused(self, request_id: str) -> None:
        """The queue is full: it is as if the request had never come."""
        live = self._custody.get(request_id)
        if live is not None and live.phase is Phase.WAITING:
            self._custody.spawn(self._discard(live))

    async def _discard(self, live: LiveRequest) -> None:
        live.phase = Phase.ENDING
        async with self._custody.moving.hold(live.request_id):
            self._custody.forget(live)
            await self._custody.persist(lambda: self._ledger.discard(live.request_id))
        live.settle(now(), QueueFull("too many requests wait", retry_after_s=1.0))

    def adopt_soon(self, request_id: str) -> None:
        """The leader found it without a living gateway."""
        self._custody.spawn(self._recover(request_id))

    def waiting(self) -> list[session_pb2.Waiting]:
        """What a new leader has to know. Nothing of it may be refused any more."""
        waiting = [live for live in self._custody if live.phase is Phase.WAITING]
        for live in waiting:
            live.accepted = True
        return [live.waiting() for live in waiting]

    # the router stops

    async def stop(self, drain_s: float) -> None:
        """Takes no more; lets streams finish for ``drain_s``, then sends their clients
        elsewhere."""
        self.stopping = True
        deadline = now() + drain_s
        while len(self._custody) and now() < deadline:
            await asyncio.sleep(0.02)
        for live in self._custody:
            self.attempts.drop(live)
            live.settle(now(), RouterStopping("this router stops: attach through another one"))
        await self._custody.cancel_work()


def new_request_id() -> str:
    return secrets.token_hex(16)


def _same(live: LiveRequest, request: Request) -> LiveRequest:
    if live.request.body_hash != request.body_hash:
        raise RequestConflict("this request_id belongs to a request with another body")
    return live
