"""The requests that this gateway has in its hands, and what the ledger is asked about them.

Every move is the ledger's. An answer that says that somebody else has a request ends it here; one
that knows less of it than we do is told what was lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from operator import ge
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from everlift import logs
from everlift.errors import (
    Cancelled,
    DataLoss,
    EverliftError,
    LedgerUnavailable,
    Moved,
    UnknownRequest,
    from_slug,
)
from everlift.trace_context import TraceContext
from router.auth.quotas import Quotas
from router.event_loop import now
from router.ledger.base import Ledger
from router.ledger.entry import Entry, Reasserted, State
from router.prediction.predictor import Prediction, Predictor
from router.requests.ledger_health import LedgerHealth
from router.requests.observer import NOBODY, Observer
from router.requests.request import LiveRequest

if TYPE_CHECKING:
    from router.requests.request import LiveRequest


class Tracer(Protocol):
    def begin(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
        """The span of a request whose call came with this metadata; None: it is in no trace."""
        ...

    def wants(self, trace: TraceContext | None) -> bool:
        """Whether a request of this span is to be told of when it has ended."""
        ...

    def refused(
        self, trace: TraceContext | None, elapsed_s: float, slug: str, x_request_id: str
    ) -> None:
        """A request that was not accepted, so long after its call came."""
        ...

    async def ended(self, live: LiveRequest) -> None:
        """A request that is wanted is at its end, in the ledger too."""
        ...


class _Nobody:
    def begin(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
        return None

    def wants(self, trace: TraceContext | None) -> bool:
        return False

    def refused(
        self, trace: TraceContext | None, elapsed_s: float, slug: str, x_request_id: str
    ) -> None: ...

    async def ended(self, live: LiveRequest) -> None: ...


#: For a gateway without traces.
NO_TRACES = _Nobody()


class KeyedLock:
    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """One holder a key at a time."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._locks[key], self._users[key]


#: Ended requests that are kept at most, with all their tokens.
_MAX_ENDED = 10_000


class Recent:
    """Each for so many seconds. An id is one request's: of what ended, was refused or forgotten."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ended: dict[str, LiveRequest] = {}
        self._refused: dict[str, None] = {}
        self._forgotten: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def ended(self) -> Iterable[LiveRequest]:
        """Oldest first."""
        return list(self._ended.values())

    @property
    def refused(self) -> Iterable[str]:
        return list(self._refused)

    @property
    def forgotten(self) -> Iterable[str]:
        return list(self._forgotten)

    def get(self, request_id: str) -> LiveRequest | None:
        """One that ended."""
        return self._ended.get(request_id)

    def arrival_of_forgotten(self, request_id: str) -> float | None:
        """When it had come, in ledger time: whoever has its id and came later is another one."""
        return self._forgotten.get(request_id)

    def was_refused(self, request_id: str) -> bool:
        return request_id in self._refused

    def has(self, live: LiveRequest) -> bool:
        """It ended, and was not forgotten."""
        return self._ended.get(live.request_id) is live

    def end(self, live: LiveRequest) -> None:
        if len(self._ended) == _MAX_ENDED:
            self.begin(next(iter(self._ended)))
        self.begin(live.request_id)
        self._ended[live.request_id] = live
        self._let_go_later(live.request_id)

    def refuse(self, request_id: str) -> None:
        self.begin(request_id)
        self._refused[request_id] = None
        self._let_go_later(request_id)

    def forget(self, request_id: str, arrived: float) -> None:
        self.begin(request_id)
        self._forgotten[request_id] = arrived
        self._let_go_later(request_id)

    def begin(self, request_id: str) -> None:
        """The id is another request's from now on."""
        self._ended.pop(request_id, None)
        self._refused.pop(request_id, None)
        self._forgotten.pop(request_id, None)
        if (timer := self._timers.pop(request_id, None)) is not None:
            timer.cancel()

    def _let_go_later(self, request_id: str) -> None:
        # A timer that held the request would keep its tokens for so long, however many there are.
        loop = asyncio.get_running_loop()
        self._timers[request_id] = loop.call_later(self._seconds, self.begin, request_id)


log = logs.get(__name__)

T = TypeVar("T")

#: Between two tries while the ledger is away.
_RETRY_S = 0.1
#: So long a router that stops lets the traces of ended requests be made.
_TRACING_S = 1.0


class Counters:
    """Since this router started."""

    def __init__(self) -> None:
        self.completed = self.failed = self.output_tokens = 0
        self.migrated = self.preempted = self.moved = self.recomputed_tokens = 0


class RequestRegistry:
    def __init__(
        self,
        router_id: str,
        ledger: Ledger,
        health: LedgerHealth,
        recent: Recent,
        quotas: Quotas,
        predictor: Predictor,
        observer: Observer = NOBODY,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self.router_id = router_id
        self.ledger = ledger
        self.health = health
        self.recent = recent
        self.quotas = quotas
        self.predictor = predictor
        self.observer = observer
        self.tracer = tracer
        self.counters = Counters()
        #: the router stops: nothing more is taken, and no client that goes is missed
        self.is_closing = False
        #: held by whoever moves a request in or out of here
        self.moving = KeyedLock()
        self._live: dict[str, LiveRequest] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._tracing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._live.values()))

    def get(self, request_id: str) -> LiveRequest | None:
        return self._live.get(request_id)

    def has(self, live: LiveRequest) -> bool:
        """It was not let go meanwhile: its id may be another request's by now."""
        return self._live.get(live.request_id) is live

    def take(self, live: LiveRequest, prediction: Prediction | None = None) -> None:
        """From now on it is in this gateway's hands. Where nothing is predicted of it yet, that is
        done here."""
        live.prediction = prediction or self.predictor.predict(live.request, live.arrived)
        live.observe(self.observer.of_class(live.priority))
        self.recent.begin(live.request_id)
        self.quotas.hold(live.request_id)
        self._live[live.request_id] = live

    def let_go(self, live: LiveRequest) -> None:
        if self.has(live):
            del self._live[live.request_id]
            self.quotas.let_go(live.request_id)

    # a request leaves

    def settle_as(self, live: LiveRequest, entry: Entry) -> None:
        """Ends it here as the ledger says."""
        if live.is_over:
            return
        self.let_go(live)
        if entry.state.is_final:
            self.quotas.settle(live.request_id, sum(entry.num_tokens))
        if entry.state is State.FINISHED and not self._is_ours_to_the_end(live, entry):
            live.settle(now(), Moved("it finished on another router: attach again"))
            return
        if entry.state is State.FINISHED:
            self.counters.completed += 1
            for choice in live.choices:
                self._note_length(live, len(choice.output))
        if entry.state is State.EXPIRED:
            for choice in live.unfinished:
                self.predictor.note_cut_off(live.prediction, len(choice.output))
        self.counters.failed += entry.state is State.FAILED
        live.has_untold_end = entry.state.is_final and entry.gateway == self.router_id
        # Whoever reads may have all of it within this call.
        is_ours = live.has_untold_end
        self.close_as(live, entry)
        if is_ours:
            self.recent.end(live)
            self._trace(live)

    def _note_length(self, live: LiveRequest, num_tokens: int) -> None:
        """An output ended."""
        if self.predictor.note(live.prediction, num_tokens) and self.predictor.trust is not None:
            trust = self.predictor.trust
            event = "predictions trusted" if trust.is_trusted else "predictions not trusted"
            log.warning(event, tau=round(trust.tau, 3))

    def _trace(self, live: LiveRequest) -> None:
        if self.tracer.wants(live.request.trace):
            task = self.spawn(self.tracer.ended(live))
            self._tracing.add(task)
            task.add_done_callback(self._tracing.discard)

    def is_ours(self, live: LiveRequest, entry: Entry) -> bool:
        """Nobody else has gone on with it."""
        counts = zip(live.choices, entry.num_tokens, strict=True)
        has_more = any(count > len(choice.output) for choice, count in counts)
        return entry.gateway == self.router_id and not has_more

    def _is_ours_to_the_end(self, live: LiveRequest, entry: Entry) -> bool:
        """What finished is what was streamed here."""
        tokens = tuple(len(choice.output) for choice in live.choices)
        return entry.gateway == self.router_id and entry.num_tokens == tokens

    def close_as(self, live: LiveRequest, entry: Entry) -> None:
        """Its readers hear of the end that ``entry`` says, or that another router has it."""
        live.entry = entry
        if entry.state is State.FINISHED:
            for choice, reason in zip(live.choices, entry.finish_reasons, strict=True):
                choice.finish_reason = reason
            live.complete(now())
        else:
            live.settle(now(), _error_of(entry))

    # asking the ledger

    async def move(self, live: LiveRequest, move: Callable[[], Awaitable[Entry]]) -> Entry:
        """The ledger's answer to a move of a live request, or to a question about it. If it has
        lost something that it had acknowledged, it is told that first. The live request is over if
        they contradict each other. Raises UnknownRequest of what is in nobody's hands here."""
        while True:
            had = _acknowledged(live)
            try:
                entry = await self.persist(move)
            except UnknownRequest:
                if not (self.has(live) or self.recent.has(live)):
                    # It was given up meanwhile, not lost.
                    raise
            else:
                if _has_all(entry, had):
                    return entry
            answer, entry = await self._restore(live)
            # An end stays, also one that contradicts ours: it cannot be told twice.
            if answer is not Reasserted.OK or entry.state.is_final:
                return entry

    async def _restore(self, live: LiveRequest) -> tuple[Reasserted, Entry]:
        """Tells the ledger again what it was told of a request. If what it has instead contradicts
        what was streamed here, or it was forgotten, this is the request's end."""
        answer, entry = await self.persist(lambda: self.ledger.reassert(live.held()))
        if answer is Reasserted.FORGOTTEN:
            return answer, _forgotten(entry)
        self.health.lost()
        log.warning("told again", request_id=live.request_id, tokens=live.num_tokens)
        if answer is Reasserted.DIVERGED:
            error = DataLoss("the ledger came back with other tokens than were streamed")
            entry = await self._end_as_failed(live, error) or entry
            self.fail(live, error)
            self._trace(live)
        return answer, entry

    async def _end_as_failed(self, live: LiveRequest, error: EverliftError) -> Entry | None:
        """In the ledger. None where it was forgotten meanwhile."""
        with suppress(UnknownRequest):
            return await self.persist(
                lambda: self.ledger.end(
                    live.request_id,
                    State.FAILED,
                    error.slug,
                    str(error),
                    self.router_id,
                    live.packed_explanation(now()),
                )
            )
        return None

    def fail(self, live: LiveRequest, error: EverliftError) -> None:
        """Ends it here without the ledger."""
        self.counters.failed += not live.is_over
        self.let_go(live)
        self.quotas.settle(live.request_id, live.num_tokens)
        live.settle(now(), error)

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

    def spawn_for(self, live: LiveRequest, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """``spawn`` of what is done for one request: an error that nobody foresaw ends it."""
        task = self.spawn(self._guarded(live, work))
        # What is cancelled before its first step has not begun with its work either.
        task.add_done_callback(lambda _: work.close())
        return task

    async def _guarded(self, live: LiveRequest, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except (EverliftError, Elsewhere):
            raise
        except Exception:
            error = EverliftError("internal error; the router's log says more")
            self.fail(live, error)
            await self._end_as_failed(live, error)
            self._trace(live)
            raise

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        try:
            task.result()
        except Elsewhere:
            # Who asked is told where; and what nobody asked for is in good hands.
            pass
        except EverliftError as error:
            log.info("not done", cause=str(error))
        except Exception:
            log.exception("request work failed")

    async def cancel_work(self) -> None:
        """Cancels all that was spawned. What the tracer is to be told of requests that have ended
        has a moment for it."""
        if self._tracing:
            await asyncio.wait(self._tracing, timeout=_TRACING_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Elsewhere(Exception):
    """A living gateway answers for this request: ``address`` is its internal one."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


def _acknowledged(live: LiveRequest) -> tuple[int, ...]:
    """What the ledger has said that it has: moves, tokens, ends."""
    tokens = (choice.stored for choice in live.choices)
    return live.entry.moves, *tokens, *(choice.is_complete for choice in live.choices)


def _has_all(entry: Entry, had: tuple[int, ...]) -> bool:
    """It may be of an older request that had the same id, and other choices."""
    has = (entry.moves, *entry.num_tokens, *map(bool, entry.finish_reasons))
    return len(has) == len(had) and all(map(ge, has, had))


def _forgotten(entry: Entry) -> Entry:
    """Its end, of which the ledger knows nothing: there is nobody who had it."""
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


def _error_of(entry: Entry) -> EverliftError:
    if entry.state.is_final:
        return from_slug(entry.error_slug, entry.error_message)
    return Moved("another router goes on with this request: attach again")
