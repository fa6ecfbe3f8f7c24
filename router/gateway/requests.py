"""The requests of this gateway: submitted, queued, given to workers, streamed, ended.

What a request goes through here:

    submit/adopt -> ledger, admission queue -> dispatched -> worker -> progress -> ledger -> readers
                          ^                                   |
                          +------- lost, or given back -------+

Every move is the ledger's; this class only asks for it and acts on the answer. An answer that says
that somebody else has the request ends it here without a trace.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from everlift import logs
from everlift.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    EngineFailed,
    EverliftError,
    LedgerUnavailable,
    Moved,
    OffsetOutOfRange,
    QueueFull,
    RequestConflict,
    RouterStopping,
    UnknownModel,
    UnknownRequest,
    from_slug,
)
from everlift.messages import FinishReason, OnDisconnect, Request, Submission
from everlift.text import TextState
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.config import RouterConfig
from router.gateway.appender import Appender
from router.gateway.keyed_lock import KeyedLock
from router.gateway.live import LiveRequest, Phase
from router.gateway.model import ServedModel
from router.gateway.output import Output
from router.ledger.base import Ledger
from router.ledger.entry import Append, Appended, Entry, State, Stored

log = logs.get(__name__)

T = TypeVar("T")

_FINISHED_BY = {
    session_pb2.STOP_CAUSE_EOS: FinishReason.STOP,
    session_pb2.STOP_CAUSE_LENGTH: FinishReason.LENGTH,
}
#: Between two tries while the ledger is away, and before a request that found no worker queues
#: again.
_RETRY_S = 0.1
#: Each replays its tokens, which takes the event loop's time.
_ADOPTIONS_AT_ONCE = 4


class Workers(Protocol):
    """The streams to the workers, as far as requests need them."""

    def start(self, worker_id: str, start: session_pb2.Start) -> bool:
        """False when there is no stream to this worker."""
        ...

    def abort(self, worker_id: str, epoch: int) -> None: ...


class Line(Protocol):
    """The line to whoever leads the admission queue."""

    @property
    def queued(self) -> int:
        """Requests that waited in the whole cluster when the leader last said so."""
        ...

    def enqueue(self, waiting: session_pb2.Waiting) -> None: ...

    def withdraw(self, request_id: str) -> None: ...


class Counters:
    """Since this router started."""

    def __init__(self) -> None:
        self.completed = self.failed = self.migrated = self.output_tokens = 0


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
        self._workers = workers
        self._line = line
        self._live: dict[str, LiveRequest] = {}
        self._by_epoch: dict[int, LiveRequest] = {}
        self._moving = KeyedLock()
        self._adoptions = asyncio.Semaphore(_ADOPTIONS_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ledger_away_since: float | None = None
        self._appender = Appender(ledger, self._stored, self._away)
        self.counters = Counters()
        self.stopping = False

    async def run(self) -> None:
        """Carries tokens into the ledger until cancelled."""
        await self._appender.run()

    def __len__(self) -> int:
        return len(self._live)

    # a client comes

    async def submit(self, submission: Submission, timeout_s: float | None) -> LiveRequest:
        """The request of a new submission, or the one that its id already names.

        Raises InvalidRequest, UnknownModel, RequestConflict, QueueFull, RouterStopping,
        LedgerUnavailable, Elsewhere.
        """
        request = self._model.resolve(submission)
        opening = self._spawn(self._open(request, timeout_s))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # Its client is gone, but the ledger may have the request by now.
            self._spawn(self._nobody_reads(opening))
            raise

    async def _open(self, request: Request, timeout_s: float | None) -> LiveRequest:
        async with self._moving.hold(request.request_id):
            if (known := self._live.get(request.request_id)) is not None:
                return _same(known, request)
            self._check_room()
            try:
                opened = await self._ledger.open(request, self._router_id, timeout_s)
            except LedgerUnavailable:
                self._spawn(self._recover(request.request_id))
                raise
            if opened.created:
                live = self._take(request, opened.entry, ())
                self._expire_in(live, timeout_s)
                return live
        return await self.attach(request.request_id, 0)

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

    async def attach(self, request_id: str, offset: int) -> LiveRequest:
        """A known request, live or ended. One whose gateway is gone goes on here.

        Raises UnknownRequest, OffsetOutOfRange, Elsewhere, LedgerUnavailable.
        """
        live = self._live.get(request_id)
        if live is None:
            live = await self._attach_stored(request_id)
        if not 0 <= offset <= live.readable:
            raise OffsetOutOfRange(f"offset {offset} of {live.readable} tokens")
        return live

    async def _attach_stored(self, request_id: str) -> LiveRequest:
        stored = await self._ledger.read(request_id)
        if stored.entry.state.is_final:
            return self._replayed(stored)
        return await self.adopt(request_id)

    async def adopt(self, request_id: str) -> LiveRequest:
        """Goes on with a request whose gateway is gone. It has the grace until a client comes.

        Raises UnknownRequest, Elsewhere.
        """
        return await asyncio.shield(self._spawn(self._adopting(request_id)))

    async def _adopting(self, request_id: str) -> LiveRequest:
        async with self._adoptions, self._moving.hold(request_id):
            if (live := self._live.get(request_id)) is not None:
                return live
            if self.stopping:
                raise RouterStopping("this router is stopping: attach through another one")
            owner = (await self._persist(lambda: self._ledger.get(request_id))).gateway
            await self._check_ownerless(owner)
            stored = await self._persist(
                lambda: self._ledger.take_over(request_id, self._router_id, owner)
            )
            if not stored.entry.state.is_final and stored.entry.gateway != self._router_id:
                raise Moved("another router goes on with this request: attach again")
            if stored.request.model != self._model.name:
                return await self._give_up(stored)
            return self._replayed(stored) if stored.entry.state.is_final else self._resume(stored)

    async def _check_ownerless(self, owner: str) -> None:
        """Raises Elsewhere when another living gateway has the request."""
        if owner != self._router_id:
            address = (await self._persist(self._ledger.gateways)).get(owner)
            if address is not None:
                raise Elsewhere(address)

    async def _give_up(self, stored: Stored) -> LiveRequest:
        """What another model began no model here can go on with."""
        error = UnknownModel(f"the model {stored.request.model!r} is not served any more")
        entry = await self._persist(
            lambda: self._ledger.end(
                stored.entry.request_id, State.FAILED, error.slug, str(error), self._router_id
            )
        )
        return self._replayed(replace(stored, entry=entry))

    def _resume(self, stored: Stored) -> LiveRequest:
        entry = stored.entry
        log.info("request adopted", request_id=entry.request_id, tokens=entry.num_tokens)
        live = self._take(stored.request, entry, stored.tokens, accepted=True)
        if stored.request.deadline is not None:
            self._expire_in(live, stored.request.deadline - stored.now)
        self._wait_for_reader(live)
        return live

    def _take(
        self,
        request: Request,
        entry: Entry,
        tokens: tuple[int, ...],
        *,
        accepted: bool = False,
    ) -> LiveRequest:
        live = LiveRequest(request, entry, self._output(request, tokens), _now())
        live.accepted = accepted
        self._live[request.request_id] = live
        self._line.enqueue(live.waiting())
        return live

    def _output(self, request: Request, tokens: tuple[int, ...]) -> Output:
        output = Output(TextState(self._model.tokenizer, request.stop))
        output.extend(tokens)
        return output

    def _replayed(self, stored: Stored) -> LiveRequest:
        """An ended request, as it ended."""
        live = LiveRequest(
            stored.request, stored.entry, self._output(stored.request, stored.tokens), _now()
        )
        self._close_as(live, stored.entry)
        return live

    # a client reads, and goes

    async def stream(self, live: LiveRequest, offset: int) -> AsyncIterator[pb.GenerateResponse]:
        """The pieces of a stream from ``offset`` on; raises the request's error at its end."""
        try:
            with live.reader() as wake:
                yield live.head(offset)
                while True:
                    wake.clear()
                    while (piece := live.piece(offset)) is not None:
                        yield piece
                        if piece.finish_reason:
                            return
                        offset += len(piece.token_ids)
                    if live.error is not None:
                        raise live.error.with_traceback(None)
                    await wake.wait()
        finally:
            self._reader_left(live)

    def _reader_left(self, live: LiveRequest) -> None:
        if live.is_over or live.has_readers or self.stopping:
            return
        if live.on_disconnect is OnDisconnect.CANCEL:
            self._spawn(self._end(live, State.CANCELLED, Cancelled("its client disconnected")))
        else:
            self._wait_for_reader(live)

    def _wait_for_reader(self, live: LiveRequest) -> None:
        if live.on_disconnect is OnDisconnect.CONTINUE:
            return

        def give_up() -> None:
            if not live.has_readers:
                error = Cancelled(f"no client came back within {self._config.grace:g} s")
                self._spawn(self._end(live, State.CANCELLED, error))

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
            self._spawn(self._end(live, State.EXPIRED, DeadlineExceeded("the deadline passed")))

    async def cancel(self, request_id: str) -> Entry:
        """Ends a request; a final one stays as it is. Raises UnknownRequest, Elsewhere."""
        live = self._live.get(request_id)
        if live is None:
            entry = await self._ledger.get(request_id)
            if entry.state.is_final:
                return entry
            await self._check_ownerless(entry.gateway)
            return await self._ledger.end(
                request_id, State.CANCELLED, Cancelled.slug, "cancelled by a client", entry.gateway
            )
        return await self._end(live, State.CANCELLED, Cancelled("cancelled by a client"))

    async def get(self, request_id: str) -> Stored:
        """What the ledger knows of a request. Raises UnknownRequest."""
        return await self._ledger.read(request_id)

    # the leader speaks

    def dispatched(self, message: session_pb2.Dispatched) -> None:
        """A worker is ours for one of our requests."""
        live = self._live.get(message.request_id)
        if live is None or live.phase is not Phase.WAITING:
            self._spawn(self._decline(message))
            return
        live.begin(message.epoch, message.worker_id, message.attempt, _now())
        self._by_epoch[message.epoch] = live
        self.counters.migrated += bool(len(live.output))
        log.info(
            "dispatched",
            request_id=live.request_id,
            worker_id=message.worker_id,
            attempt=message.attempt,
            offset=len(live.output),
        )
        if not self._workers.start(message.worker_id, live.start()):
            live.avoid = message.worker_id
            self._spawn(self._return(live, delay_s=_RETRY_S))

    async def _decline(self, message: session_pb2.Dispatched) -> None:
        entry = await self._persist(
            lambda: self._ledger.release(
                message.request_id, message.epoch, loss=None, max_losses=self._config.max_losses
            )
        )
        is_ours = entry.state is State.QUEUED and entry.gateway == self._router_id
        if is_ours and message.request_id not in self._live and not self.stopping:
            await self.adopt(message.request_id)

    def refused(self, request_id: str) -> None:
        """The queue is full: it is as if the request had never come."""
        live = self._live.get(request_id)
        if live is not None and live.phase is Phase.WAITING:
            self._spawn(self._discard(live))

    def stale(self, request_id: str) -> None:
        """The ledger would not let the leader dispatch it: a move of it was lost on the way."""
        live = self._live.get(request_id)
        if live is not None and live.phase is Phase.WAITING:
            self._spawn(self._follow(live))

    async def _discard(self, live: LiveRequest) -> None:
        live.phase = Phase.ENDING
        async with self._moving.hold(live.request_id):
            self._forget(live)
            await self._persist(lambda: self._ledger.discard(live.request_id))
        live.settle(_now(), QueueFull("too many requests wait", retry_after_s=1.0))

    def adopt_soon(self, request_id: str) -> None:
        """The leader found it without a living gateway."""
        self._spawn(self._recover(request_id))

    def waiting(self) -> list[session_pb2.Waiting]:
        """What a new leader has to know. Nothing of it may be refused any more."""
        waiting = [live for live in self._live.values() if live.phase is Phase.WAITING]
        for live in waiting:
            live.accepted = True
        return [live.waiting() for live in waiting]

    # workers speak

    def progress(self, worker_id: str, progress: session_pb2.Progress) -> None:
        live = self._by_epoch.get(progress.epoch)
        if live is None:
            if not progress.stop:
                self._workers.abort(worker_id, progress.epoch)
            return
        fresh = _fresh(live, progress)
        if fresh is None:
            log.error("tokens missing", request_id=live.request_id, offset=progress.offset)
            self._workers.abort(worker_id, progress.epoch)
            self._spawn(self._return(live, loss=f"worker {worker_id} left out tokens"))
            return
        self._advance(live, fresh, progress)

    def _advance(
        self, live: LiveRequest, fresh: tuple[int, ...], progress: session_pb2.Progress
    ) -> None:
        offset = len(live.output)
        kept = live.output.extend(fresh)
        finish = FinishReason.STOP if live.output.stopped else _FINISHED_BY.get(progress.stop)
        if kept or finish:
            self._appender.put(
                Append(live.request_id, live.epoch, offset, kept, finish_reason=finish)
            )
        if finish:
            self._finishing(live, finish, at_worker=not progress.stop)
        elif progress.stop:
            self._stopped_short(live, progress)

    def _finishing(self, live: LiveRequest, finish: FinishReason, *, at_worker: bool) -> None:
        if at_worker:
            self._workers.abort(live.worker_id, live.epoch)
        self._by_epoch.pop(live.epoch, None)
        live.phase, live.finish_reason = Phase.FINISHING, finish

    def _stopped_short(self, live: LiveRequest, progress: session_pb2.Progress) -> None:
        if progress.stop == session_pb2.STOP_CAUSE_RETURNED:
            self._spawn(self._return(live))
        elif progress.stop == session_pb2.STOP_CAUSE_REFUSED:
            self._spawn(self._end(live, State.FAILED, EngineFailed(progress.error)))
        else:
            log.warning("engine failed", request_id=live.request_id, cause=progress.error)
            self._spawn(self._return(live, loss=f"the engine failed: {progress.error}"))

    def worker_lost(self, worker_id: str) -> None:
        """Everything that ran there goes back into the queue, with its tokens."""
        lost = [live for live in self._by_epoch.values() if live.worker_id == worker_id]
        log.warning("worker lost", worker_id=worker_id, requests=len(lost))
        for live in lost:
            self._spawn(self._return(live, loss=f"worker {worker_id} was lost"))

    async def _return(
        self, live: LiveRequest, *, loss: str | None = None, delay_s: float = 0.0
    ) -> None:
        """Back into the queue, with its tokens: lost, or given back."""
        epoch = live.epoch
        if self._by_epoch.pop(epoch, None) is None:
            return
        await asyncio.sleep(delay_s)
        await self._store_all(live)
        if not live.runs_under(epoch):
            return
        entry = await self._ask(
            live,
            lambda: self._ledger.release(
                live.request_id, epoch, loss=loss, max_losses=self._config.max_losses
            ),
        )
        if not live.runs_under(epoch):
            return
        if entry.state is State.QUEUED and entry.gateway == self._router_id:
            live.wait_again(_now())
            self._line.enqueue(live.waiting())
        else:
            self._settle_as(live, entry)

    async def _store_all(self, live: LiveRequest) -> None:
        """Waits until the ledger has every token, also those that it forgot when it came back."""
        if missing := live.output.tokens[live.stored :]:
            self._appender.put(Append(live.request_id, live.epoch, live.stored, tuple(missing)))
        await live.all_stored()

    # the ledger answers

    def _stored(self, append: Append, answer: Appended) -> None:
        self._ledger_away_since = None
        live = self._live.get(append.request_id)
        if live is None:
            return
        end = append.offset + len(append.tokens)
        if answer is Appended.OK:
            self.counters.output_tokens += end - live.stored
            live.mark_stored(end, _now())
            if append.finish_reason:
                self._finished(live)
        elif answer is Appended.FENCED or answer is Appended.ENDED:
            self._spawn(self._follow(live))
        elif answer is Appended.GAP:
            self._spawn(self._assert_again(live))
        else:
            error = DataLoss(f"the ledger answered {answer.value} at offset {append.offset}")
            self._spawn(self._end(live, State.FAILED, error))

    def _finished(self, live: LiveRequest) -> None:
        live.output.finish()
        self._forget(live)
        self.counters.completed += 1
        live.settle(_now())
        log.info("finished", request_id=live.request_id, tokens=len(live.output))

    async def _assert_again(self, live: LiveRequest) -> None:
        """The ledger's server came back without its last second: it gets what it had before."""
        entry = await self._ask(live, lambda: self._ledger.get(live.request_id))
        if live.is_ending:
            return
        if entry.epoch != live.epoch:
            await self._follow(live)
            return
        tokens = tuple(live.output.tokens[entry.num_tokens :])
        log.warning("tokens asserted again", request_id=live.request_id, tokens=len(tokens))
        self._appender.put(
            Append(
                live.request_id,
                live.epoch,
                entry.num_tokens,
                tokens,
                finish_reason=live.finish_reason,
            )
        )

    async def _follow(self, live: LiveRequest) -> None:
        """The ledger has the request in another state than we do: it is right."""
        async with self._moving.hold(live.request_id):
            entry = await self._ask(live, lambda: self._ledger.get(live.request_id))
            if live.is_ending:
                return
            if (entry.epoch, entry.gateway) == (live.epoch, self._router_id):
                return
            self._drop_attempt(live)
            if entry.state.is_final or entry.gateway != self._router_id:
                self._settle_as(live, entry)
                return
            await self._ask(
                live,
                lambda: self._ledger.take_over(live.request_id, self._router_id, self._router_id),
            )
            if not live.is_ending:
                live.wait_again(_now())
                self._line.enqueue(live.waiting())

    def _away(self, append: Append) -> None:
        now = _now()
        if self._ledger_away_since is None:
            self._ledger_away_since = now
        live = self._live.get(append.request_id)
        if live is not None and now - self._ledger_away_since < self._config.unledgered:
            live.mark_unledgered(now)

    # a request ends

    async def _end(self, live: LiveRequest, state: State, error: EverliftError) -> Entry:
        """Ends it before its last token. It ends, whether its caller waits for that or not."""
        return await asyncio.shield(self._spawn(self._ending(live, state, error)))

    async def _ending(self, live: LiveRequest, state: State, error: EverliftError) -> Entry:
        if live.phase is Phase.WAITING:
            self._line.withdraw(live.request_id)
        self._drop_attempt(live)
        if not live.is_over:
            live.phase = Phase.ENDING
        entry = await self._ask(
            live,
            lambda: self._ledger.end(
                live.request_id, state, error.slug, str(error), self._router_id
            ),
        )
        self._settle_as(live, entry)
        return entry

    def _drop_attempt(self, live: LiveRequest) -> None:
        """No worker shall have it any more."""
        if self._by_epoch.pop(live.epoch, None) is not None:
            self._workers.abort(live.worker_id, live.epoch)

    def _settle_as(self, live: LiveRequest, entry: Entry) -> None:
        """Ends it here as the ledger says."""
        if live.is_over:
            return
        self._forget(live)
        self.counters.failed += entry.state is State.FAILED
        if entry.state is State.FINISHED and not self._is_ours_to_the_end(live, entry):
            live.settle(_now(), Moved("it finished on another router: attach again"))
        else:
            self._close_as(live, entry)

    def _is_ours_to_the_end(self, live: LiveRequest, entry: Entry) -> bool:
        """What finished is what was streamed here."""
        return entry.gateway == self._router_id and entry.num_tokens == len(live.output)

    def _close_as(self, live: LiveRequest, entry: Entry) -> None:
        if entry.state is State.FINISHED:
            live.finish_reason = entry.finish_reason
            live.mark_stored(len(live.output), _now())
            live.output.finish()
            live.settle(_now())
        else:
            live.settle(_now(), _error_of(entry))

    def _forget(self, live: LiveRequest) -> None:
        if self._live.get(live.request_id) is live:
            del self._live[live.request_id]

    async def stop(self, drain_s: float) -> None:
        """Takes no more; lets streams finish for ``drain_s``, then sends their clients
        elsewhere."""
        self.stopping = True
        deadline = _now() + drain_s
        while self._live and _now() < deadline:
            await asyncio.sleep(0.02)
        for live in list(self._live.values()):
            self._drop_attempt(live)
            live.settle(_now(), RouterStopping("this router stops: attach through another one"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # plumbing

    async def _ask(self, live: LiveRequest, move: Callable[[], Awaitable[T]]) -> T:
        """A move of a live request; one that the ledger does not know any more ends as DataLoss."""
        try:
            return await self._persist(move)
        except UnknownRequest:
            self._drop_attempt(live)
            self._forget(live)
            live.settle(_now(), DataLoss("the ledger does not know this request any more"))
            raise

    async def _persist(self, move: Callable[[], Awaitable[T]]) -> T:
        """Asks for a move until the ledger answers. Moves may be repeated without harm."""
        while True:
            try:
                return await move()
            except LedgerUnavailable:
                await asyncio.sleep(_RETRY_S)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
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


class Elsewhere(Exception):
    """A living gateway answers for this request: ``address`` is its internal one."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


def new_request_id() -> str:
    return secrets.token_hex(16)


def _now() -> float:
    return time.monotonic()


def _same(live: LiveRequest, request: Request) -> LiveRequest:
    if live.request.body_hash != request.body_hash:
        raise RequestConflict("this request_id belongs to a request with another body")
    return live


def _fresh(live: LiveRequest, progress: session_pb2.Progress) -> tuple[int, ...] | None:
    """The tokens that are not known yet; None if some before them are missing."""
    known = len(live.output) - progress.offset
    return tuple(progress.token_ids[known:]) if known >= 0 else None


def _error_of(entry: Entry) -> EverliftError:
    if entry.state.is_final:
        return from_slug(entry.error_slug, entry.error_message)
    return Moved("another router goes on with this request: attach again")
