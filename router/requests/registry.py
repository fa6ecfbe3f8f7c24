"""Registry of the requests that this router owns, and of those that ended recently."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager

from everlift import logs
from everlift.errors import EverliftError, Moved, from_slug
from router.auth.quotas import Quotas
from router.event_loop import now
from router.ledger.entry import Entry, State
from router.prediction.predictor import Prediction, Predictor
from router.requests.observer import NO_OBSERVER, Observer
from router.requests.request import LiveRequest
from router.requests.tasks import TaskGroup
from router.requests.tracer import NO_TRACES, Tracer
from router.requests.turns import Turns

log = logs.get_logger(__name__)

#: Maximum number of ended requests that are kept, each with all its tokens.
_MAX_ENDED = 10_000


class KeyedLock:
    """Locks by key; each lock exists only while it is held or awaited."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Context manager that waits for the lock of ``key`` and holds it inside."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._locks[key], self._users[key]


class RecentRequests:
    """Requests that ended, were rejected or were erased within the last ``seconds``.

    An id is in at most one of the three groups. No id is discarded for its age during ``hold``.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._num_holds = 0
        self._ended: dict[str, LiveRequest] = {}
        self._rejected: dict[str, None] = {}
        #: arrival in ledger time of erased requests, by id
        self._erased: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def ended(self) -> Iterable[LiveRequest]:
        """Return the ended requests, oldest first."""
        return list(self._ended.values())

    @property
    def rejected(self) -> Iterable[str]:
        return list(self._rejected)

    @property
    def erased(self) -> Iterable[str]:
        return list(self._erased)

    def get(self, request_id: str) -> LiveRequest | None:
        """Return the ended request of this id, or None if there is none."""
        return self._ended.get(request_id)

    def erased_arrival(self, request_id: str) -> float | None:
        """Return the arrival in ledger time of the erased request with this id, or None.

        A request with the same id and another arrival is a later request, which was not erased.
        """
        return self._erased.get(request_id)

    def was_rejected(self, request_id: str) -> bool:
        return request_id in self._rejected

    def has(self, live: LiveRequest) -> bool:
        return self._ended.get(live.request_id) is live

    def add_ended(self, live: LiveRequest) -> None:
        if len(self._ended) == _MAX_ENDED:
            self.discard(next(iter(self._ended)))
        self.discard(live.request_id)
        self._ended[live.request_id] = live
        self._discard_later(live.request_id)

    def add_rejected(self, request_id: str) -> None:
        self.discard(request_id)
        self._rejected[request_id] = None
        self._discard_later(request_id)

    def add_erased(self, request_id: str, arrived: float) -> None:
        self.discard(request_id)
        self._erased[request_id] = arrived
        self._discard_later(request_id)

    def discard(self, request_id: str) -> None:
        """Remove an id from all groups."""
        self._ended.pop(request_id, None)
        self._rejected.pop(request_id, None)
        self._erased.pop(request_id, None)
        if (timer := self._timers.pop(request_id, None)) is not None:
            timer.cancel()

    def hold(self) -> None:
        """Keep all ids until ``release``, because the ledger may lack them when it answers again.

        Each call needs its own call of ``release``.
        """
        self._num_holds += 1
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def release(self) -> None:
        """End a hold. After the last one, all ids are kept for another ``seconds``."""
        self._num_holds -= 1
        if not self._num_holds:
            for request_id in (*self._ended, *self._rejected, *self._erased):
                self._discard_later(request_id)

    def _discard_later(self, request_id: str) -> None:
        if self._num_holds:
            return
        # The timer holds only the id, because a reference to the request would keep its tokens in
        # memory.
        loop = asyncio.get_running_loop()
        self._timers[request_id] = loop.call_later(self._seconds, self.discard, request_id)


class Counters:
    """Totals of requests, preemptions and tokens since this router started."""

    def __init__(self) -> None:
        #: requests that finished, and that failed, by model
        self.completed_by_model: Counter[str] = Counter()
        self.failed_by_model: Counter[str] = Counter()
        self.migrated = self.preempted = self.moved = self.recomputed_tokens = 0
        #: output tokens that the ledger has stored, by model
        self.output_by_model: Counter[str] = Counter()

    @property
    def completed(self) -> int:
        return self.completed_by_model.total()

    @property
    def failed(self) -> int:
        return self.failed_by_model.total()

    @property
    def output_tokens(self) -> int:
        return self.output_by_model.total()


class RequestRegistry:
    """Registry of the requests that this router owns, by id.

    The registry also ends requests for their clients, and reports their ends to quotas and metrics.
    """

    def __init__(
        self,
        router_id: str,
        recent: RecentRequests,
        quotas: Quotas,
        predictors: Mapping[str, Predictor],
        turns: Turns,
        tasks: TaskGroup,
        observer: Observer = NO_OBSERVER,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self.router_id = router_id
        self.recent = recent
        self.quotas = quotas
        self.predictors = predictors
        self.turns = turns
        self.observer = observer
        self.tracer = tracer
        self.counters = Counters()
        #: whether the router is stopping: no request is added, and a request that loses its last
        #: client is neither cancelled nor given a grace period
        self.is_closing = False
        #: locks by request id, held while a request is added, removed or ended
        self.locks = KeyedLock()
        self._tasks = tasks
        self._live: dict[str, LiveRequest] = {}
        #: size of the images of all owned requests, in bytes
        self.num_image_bytes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._live.values()))

    def get(self, request_id: str) -> LiveRequest | None:
        return self._live.get(request_id)

    def known(self, request_id: str) -> LiveRequest | None:
        """Return an owned or recently ended request, or None if there is neither.

        Call this before asking the ledger. A ledger that lost recent writes may lack a recently
        ended request, or have it as unfinished.
        """
        return self._live.get(request_id) or self.recent.get(request_id)

    def has(self, live: LiveRequest) -> bool:
        """Return whether this router owns the request ``live`` itself.

        False if it owns another request with the same id: an id can be reused after the release of
        its request.
        """
        return self._live.get(live.request_id) is live

    def add(self, live: LiveRequest, prediction: Prediction | None = None) -> None:
        """Add a request, which this router then owns.

        A prediction for the request is made if ``prediction`` is None.
        """
        live.prediction = prediction or self._predictor(live).predict(live.request, live.arrived)
        live.observe(self.observer.of_class(live.request.model, live.priority))
        self.recent.discard(live.request_id)
        self.quotas.start_renewal(live.request_id)
        self._live[live.request_id] = live
        self.num_image_bytes += live.request.num_image_bytes

    def _predictor(self, live: LiveRequest) -> Predictor:
        return self.predictors[live.request.model]

    def release(self, live: LiveRequest) -> None:
        """Stop owning the request, if it is owned."""
        if self.has(live):
            del self._live[live.request_id]
            self.num_image_bytes -= live.request.num_image_bytes
            self.quotas.stop_renewal(live.request_id)

    def finalize(self, live: LiveRequest, entry: Entry) -> None:
        """Stop owning a request, and end it for its clients with the result that ``entry`` states.

        Clients receive the error Moved if the ledger's ``entry`` is not final. They also receive it
        if the request finished under another owner, or with other numbers of tokens than this
        router has. Do nothing if the request is over already.
        """
        if live.is_over:
            return
        self.release(live)
        if entry.state.is_final:
            self.quotas.settle(live.request_id, sum(entry.num_tokens))
        if entry.state is State.FINISHED and not self._was_streamed_here(live, entry):
            live.settle(now(), Moved("the request finished on another router: attach again"))
            return
        self._count_end(live, entry.state)
        live.has_unreported_end = entry.state.is_final and entry.gateway == self.router_id
        # The flag is read before ``close``, which can make the last reader leave and thereby clear
        # the flag.
        is_ours = live.has_unreported_end
        self.close(live, entry)
        if is_ours:
            if entry.state is State.FINISHED:
                self.turns.add(live, now())
            self.recent.add_ended(live)
            self.trace_end(live)

    def _count_end(self, live: LiveRequest, state: State) -> None:
        if state is State.FINISHED:
            self.counters.completed_by_model[live.request.model] += 1
            for choice in live.choices:
                self._learn_length(live, len(choice.output))
        if state is State.EXPIRED:
            for choice in live.unfinished:
                self._predictor(live).note_cut_off(live.prediction, len(choice.output))
        self.counters.failed_by_model[live.request.model] += state is State.FAILED

    def _learn_length(self, live: LiveRequest, num_tokens: int) -> None:
        predictor = self._predictor(live)
        if predictor.note(live.prediction, num_tokens) and predictor.trust is not None:
            trust = predictor.trust
            event = "predictions trusted" if trust.is_trusted else "predictions not trusted"
            log.warning(event, tau=round(trust.tau, 3), model=live.request.model)

    def trace_end(self, live: LiveRequest) -> None:
        if self.tracer.is_recorded(live.request.trace):
            self._tasks.spawn_tracing(self.tracer.ended(live))

    def is_current(self, live: LiveRequest, entry: Entry) -> bool:
        """Return whether this router owns the request and has all tokens that the ledger has.

        ``entry`` is the ledger's entry of the request.
        """
        counts = zip(live.choices, entry.num_tokens, strict=True)
        has_more = any(count > len(choice.output) for choice, count in counts)
        return entry.gateway == self.router_id and not has_more

    def _was_streamed_here(self, live: LiveRequest, entry: Entry) -> bool:
        tokens = tuple(len(choice.output) for choice in live.choices)
        return entry.gateway == self.router_id and entry.num_tokens == tokens

    def close(self, live: LiveRequest, entry: Entry) -> None:
        """End the streams of a request as finished, or with the error that ``entry`` states.

        The error is Moved if the entry is not final.
        """
        live.entry = entry
        if entry.state is State.FINISHED:
            for choice, reason in zip(live.choices, entry.finish_reasons, strict=True):
                choice.finish_reason = reason
            live.complete(now())
        else:
            live.settle(now(), _error_of(entry))

    def fail(self, live: LiveRequest, error: EverliftError) -> None:
        """Stop owning a request, and end it for its clients with ``error``.

        The ledger's entry is neither read nor changed.
        """
        self.counters.failed_by_model[live.request.model] += not live.is_over
        self.release(live)
        self.quotas.settle(live.request_id, live.num_tokens)
        live.settle(now(), error)


def _error_of(entry: Entry) -> EverliftError:
    if entry.state.is_final:
        return from_slug(entry.error_slug, entry.error_message)
    return Moved("another router owns this request: attach again")
