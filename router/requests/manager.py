"""The requests of clients: submitted, attached to, read, cancelled, forgotten; and adopted from
dead gateways.

What a request goes through:

    submit/adopt -> ledger, admission queue -> dispatched -> worker -> progress -> ledger -> readers
                          ^                                   |
                          +------- lost, or given back -------+      (attempts.py)
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from random import Random

from everlift import logs
from everlift.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineUnmeetable,
    EverliftError,
    LedgerFull,
    LedgerUnavailable,
    Moved,
    QueueFull,
    RateLimited,
    RequestConflict,
    RouterStopping,
    UnknownModel,
    UnknownRequest,
)
from everlift.messages import Request
from everlift.request_id import bare, is_named, unnamed
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.admission.early_rejection import EarlyRejection
from router.admission.policy import Policy, Rules, key_of
from router.admission.request import Wanted
from router.admission.wait_estimate import EstimatedWait
from router.auth.limits import Limits
from router.auth.quotas import Quotas, unlimited
from router.config import RouterConfig
from router.event_loop import now
from router.ledger.base import Ledger, Membership, Opened, Page, Position
from router.ledger.config import DEFAULTS
from router.ledger.entry import Dispatch, Entry, Event, State, Stored
from router.missing_workers import missing_workers
from router.prediction.predictor import Prediction, Predictor
from router.requests.attempts import Attempts, Line, Workers
from router.requests.delivery_reports import Deliveries
from router.requests.explanation import kept
from router.requests.ledger_health import LedgerHealth
from router.requests.observer import NOBODY, Observer
from router.requests.recovery import Resync, Takeover, begun
from router.requests.registry import NO_TRACES, Elsewhere, Recent, RequestRegistry, Tracer
from router.requests.request import LiveRequest, Phase
from router.requests.stream import Pieces, Reading
from router.requests.timeouts import Patience
from router.requests.timing import Journal
from router.requests.tokenizer import ServedModel

log = logs.get(__name__)


class Requests:
    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        ledger: Ledger,
        model: ServedModel,
        workers: Workers,
        line: Line,
        memory_limit: float = DEFAULTS.memory_limit,
        observer: Observer = NOBODY,
        tracer: Tracer = NO_TRACES,
        limits_of: Callable[[str], Limits] = unlimited,
    ) -> None:
        """``memory_limit`` as in LedgerConfig; ``limits_of`` tells a tenant's."""
        self._config = config
        self._router_id = router_id
        self._ledger = ledger
        self._model = model
        self._line = line
        self._early_rejection = EarlyRejection(config, Random())
        self._wait = EstimatedWait()
        self._ledger_health = LedgerHealth(memory_limit)
        #: ledger time less that of our clock
        self._ledger_ahead_s = 0.0
        self.predictor = Predictor(model.tokenizer, model.name, config.predictor_min_tau)
        self._recent = Recent(config.reassert)
        self.quotas = Quotas(ledger, limits_of)
        self._deliveries = Deliveries(ledger)
        self._registry = RequestRegistry(
            router_id,
            ledger,
            self._ledger_health,
            self._recent,
            self.quotas,
            self.predictor,
            observer,
            tracer,
        )
        self.attempts = Attempts(config, self._registry, workers, line, self.adopt_soon)
        self._patience = Patience(config.grace, self.attempts)
        self._adoption = Takeover(self._registry, model, self.attempts, self._patience)
        self._reassertion = Resync(self._registry, self.attempts.agree)
        self.counters = self._registry.counters
        self._openings: set[asyncio.Task[LiveRequest]] = set()

    def __len__(self) -> int:
        return len(self._registry)

    @property
    def takes_new(self) -> bool:
        """Clients are sent here: this router, its model and the ledger take new requests."""
        return (
            self._model.is_active and not self._registry.is_closing and self._ledger_health.is_fit
        )

    # a client comes

    async def submit(
        self, request: Request, timeout_s: float | None, journal: Journal | None = None
    ) -> LiveRequest:
        """A new request, or the one that its id already names. ``journal`` has what came before.

        Raises RequestConflict, QueueFull, DeadlineUnmeetable, RateLimited, LedgerFull,
        RouterStopping, LedgerUnavailable, Elsewhere.
        """
        opening = self._registry.spawn(self._open(request, timeout_s, journal or Journal(now())))
        self._openings.add(opening)
        opening.add_done_callback(self._openings.discard)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled() and not _is_cancelled():
                raise RouterStopping("this router stops: send the request to another one") from None
            # Its client is gone, but the ledger may have the request by now.
            self._registry.spawn(self._nobody_reads(opening))
            raise

    def turned_away(self, error: EverliftError) -> None:
        """A submission that came to nothing, with this answer."""
        self._registry.observer.refused(error.slug)

    async def _open(
        self, request: Request, timeout_s: float | None, journal: Journal
    ) -> LiveRequest:
        async with self._registry.moving.hold(request.request_id):
            if (known := self._known(request.request_id)) is not None:
                check_same_body(known.request, request.body_hash)
                return known
            prediction = await self._admit(request, timeout_s)
            live = await self._open_new(request, timeout_s, journal, prediction)
            if live is not None:
                return live
        try:
            return await self.attach(request.request_id)
        except UnknownRequest:
            raise given_up() from None

    async def _admit(self, request: Request, timeout_s: float | None) -> Prediction:
        """What is predicted of it. What the ledger has already was accepted once, and is refused
        neither for want of room nor of time."""
        try:
            self._check_room(request)
            prediction = self._predict(request)
            self._check_in_time(request, timeout_s, prediction)
        except (QueueFull, DeadlineUnmeetable, LedgerFull):
            if not await self._is_known(request.request_id):
                raise
            self._early_rejection.unsay(request.request_id)
            return self._predict(request)
        return prediction

    def _predict(self, request: Request) -> Prediction:
        return self.predictor.predict(request, now() + self._ledger_ahead_s)

    async def _open_new(
        self,
        request: Request,
        timeout_s: float | None,
        journal: Journal,
        prediction: Prediction,
    ) -> LiveRequest | None:
        """None of one that the ledger has already."""
        is_charged = await self._charge(request)
        journal.charged(now())
        prediction = self._foresee(request, prediction)
        reservation, has_begun = None, False
        # A worker may have announced a shorter context since the request was resolved: the request
        # is refused when it is dispatched.
        if self._model.fits(request):
            reservation = self.attempts.reserve(request, timeout_s, prediction)
        try:
            dispatch = None if reservation is None else reservation.dispatch
            opened = await self._open_in_ledger(request, timeout_s, is_charged, dispatch)
            if not opened.created:
                return None
            live = self._begin(request, opened.entry, timeout_s, journal, prediction)
            if reservation is not None:
                has_begun = self.attempts.begin(live, opened.entry, reservation)
        finally:
            if reservation is not None and not has_begun:
                reservation.give_back()
        if not has_begun:
            self.attempts.enqueue(live)
        self._patience.expire_in(live, timeout_s)
        return live

    def _foresee(self, request: Request, prediction: Prediction) -> Prediction:
        """``prediction``, with the wait that is foreseen now."""
        work = prediction.total_tokens(request)
        return replace(prediction, foreseen_wait_s=self._wait.come(request.priority, work))

    async def _open_in_ledger(
        self,
        request: Request,
        timeout_s: float | None,
        is_charged: bool,
        dispatch: Dispatch | None,
    ) -> Opened:
        try:
            opened = await self._ledger.open(request, self._router_id, timeout_s, dispatch)
        except LedgerUnavailable:
            # It may be there: then it is charged, and what it was charged for.
            self._registry.spawn(self._recover(request.request_id))
            raise
        except EverliftError:
            if is_charged:
                self.quotas.settle(request.request_id, None)
            raise
        if is_charged and opened.entry.state.is_final:
            # It came before, and what it took is settled.
            self.quotas.settle(request.request_id, None)
        return opened

    async def _charge(self, request: Request) -> bool:
        """``Quotas.charge``, but what the ledger has already is not refused for its tenant's
        limits."""
        try:
            return await self.quotas.charge(request)
        except RateLimited:
            if await self._is_known(request.request_id):
                return False
            raise

    async def _is_known(self, request_id: str) -> bool:
        """To the ledger. Raises LedgerUnavailable."""
        if not is_named(request_id):
            return False
        try:
            await self._ledger.get(request_id)
        except UnknownRequest:
            return False
        return True

    def _begin(
        self,
        request: Request,
        entry: Entry,
        timeout_s: float | None,
        journal: Journal,
        prediction: Prediction,
    ) -> LiveRequest:
        if timeout_s is not None:
            request = replace(request, deadline=entry.arrived + timeout_s)
        journal.accepted(now())
        live = begun(request, entry, self._model.tokenizer, journal)
        self._registry.take(live, prediction)
        self._registry.observer.of_class(live.priority).accepted(len(request.prompt_ids))
        log.info("accepted", **live.names, prompt_tokens=len(request.prompt_ids))
        return live

    async def _nobody_reads(self, opening: asyncio.Future[LiveRequest]) -> None:
        self._reader_left(await opening)

    async def _recover(self, request_id: str) -> None:
        """It may have been opened although the answer was lost: then it must not lie about."""
        with suppress(UnknownRequest, Elsewhere):
            await self._adoption.adopt(request_id)

    def _check_room(self, request: Request) -> None:
        if self._registry.is_closing:
            raise RouterStopping("this router is stopping: send the request to another one")
        self._ledger_health.check_room()
        self._early_rejection.admit(request.request_id, request.priority, self._line.queued, now())

    def _check_in_time(
        self, request: Request, timeout_s: float | None, prediction: Prediction
    ) -> None:
        target_s = request.ttft_target_s
        wanted = Wanted(
            inf if target_s is None else target_s, inf if timeout_s is None else timeout_s
        )
        least_tokens = prediction.least_tokens(request)
        self._early_rejection.check_in_time(
            request.request_id, request.priority, wanted, least_tokens, now()
        )

    async def attach(self, request_id: str) -> LiveRequest:
        """A known request, live or ended. One whose gateway is gone goes on here.

        Raises UnknownRequest, UnknownModel, Elsewhere, LedgerUnavailable.
        """
        live = self._known(request_id)
        return live if live is not None else await self._adoption.find(request_id)

    def _known(self, request_id: str) -> LiveRequest | None:
        """A ledger that lost its last second may not know, or may take for unfinished, what has
        ended here."""
        return self._registry.get(request_id) or self._recent.get(request_id)

    # a client reads, and goes

    def stream(
        self,
        live: LiveRequest,
        offsets: Sequence[int] = (),
        digests: Sequence[int] = (),
        *,
        is_relayed: bool = False,
        explains: bool = False,
    ) -> Pieces:
        """The pieces of a stream, of each choice from its offset on. A client that another gateway
        speaks for ``is_relayed``: if it goes, it may be that gateway that died. Raises
        OffsetOutOfRange."""
        reading = Reading(live, offsets, digests, explains=explains)
        self._deliveries.begin(live)
        return Pieces(live, reading, lambda: self._reader_left(live, has_grace=is_relayed))

    def _reader_left(self, live: LiveRequest, *, has_grace: bool = False) -> None:
        self._deliveries.note(live)
        if not self._registry.is_closing:
            self._patience.reader_left(live, has_grace=has_grace)

    async def cancel(self, request_id: str) -> Entry:
        """Ends a request; a final one stays as it is. Raises UnknownRequest, Elsewhere."""
        error = Cancelled("cancelled by a client")
        if self._registry.get(request_id) is None:
            # Who is on its way in is here when it has come.
            async with self._registry.moving.hold(request_id):
                pass
        if (live := self._registry.get(request_id)) is not None:
            ending = self._registry.spawn(self._cancel_live(live, error))
            if (entry := await asyncio.shield(ending)) is not None:
                return entry
        if (ended := self._recent.get(request_id)) is not None:
            await self._reassertion.tell_end(ended)
        return await self._cancel_ownerless(request_id, error)

    async def _cancel_live(self, live: LiveRequest, error: Cancelled) -> Entry | None:
        """None if it ended meanwhile, or was refused and its id is free again."""
        async with self._registry.moving.hold(live.request_id):
            if not self._registry.has(live):
                return None
            return await self.attempts.end(live, State.CANCELLED, error)

    async def _cancel_ownerless(self, request_id: str, error: Cancelled) -> Entry:
        entry = await self._ledger.get(request_id)
        while not entry.state.is_final:
            await self._adoption.check_ownerless(entry.gateway)
            # It stays as it is where an heir was quicker, who is asked then.
            entry = await self._ledger.end(
                request_id, State.CANCELLED, error.slug, str(error), entry.gateway
            )
            if entry.state.is_final:
                self.quotas.settle(request_id, sum(entry.num_tokens))
        return entry

    async def forget(self, request_id: str) -> None:
        """Erases a request; one that is unfinished is cancelled first. What ended a moment ago is
        still in the hands of the gateway where it ended. Raises UnknownRequest, Elsewhere,
        LedgerUnavailable."""
        try:
            entry = await self.cancel(request_id)
        except UnknownRequest:
            if self._recent.arrival_of_forgotten(request_id) is None:
                raise
            # It is asked for again.
            return
        await self._adoption.check_ownerless(entry.gateway)
        async with self._registry.moving.hold(request_id):
            if await self._ledger.forget(request_id) is not None:
                raise Moved("another router goes on with this request: forget it again")
            self._recent.forget(request_id, entry.arrived)
        log.info("forgotten", request_id=request_id)

    async def get(self, request_id: str) -> tuple[Stored, tuple[Event, ...]]:
        """What the ledger knows of a request, less its tokens, and its moves. Raises
        UnknownRequest."""
        entry = await self._ledger.get(request_id)
        stored = await self._ledger.read(request_id, entry.num_tokens)
        return stored, await self._ledger.events(request_id)

    async def explain(self, request_id: str) -> pb.Explanation:
        """Where its time went, by who has it, had it a moment ago, or has a client that reads on;
        else by the ledger. Raises UnknownRequest, Elsewhere, LedgerUnavailable."""
        if (live := self._known(request_id)) is not None:
            self.attempts.look_around(live)
            explanation = live.explanation(now())
            if explanation.state == pb.REQUEST_STATE_QUEUED:
                explanation.missing_workers = await self.missing_workers()
            return explanation
        entry = await self._ledger.get(request_id)
        if (read := self._deliveries.going_on(entry)) is not None:
            return read.explanation(now())
        if not entry.state.is_final:
            await self._adoption.check_ownerless(entry.gateway)
        return kept(*await self.get(request_id))

    async def missing_workers(self) -> str:
        """Return why fewer workers are ready than there are to be; empty if that is not known."""
        try:
            return missing_workers(await self._ledger.load())
        except LedgerUnavailable:
            return ""

    async def list_requests(
        self, tenant: str, states: Collection[State], limit: int, before: Position | None
    ) -> Page:
        """As the ledger's."""
        return await self._ledger.list_requests(tenant, states=states, limit=limit, before=before)

    # the ledger is seen

    def ledger_answered(self, membership: Membership) -> None:
        """It answered this router's beat."""
        self._ledger_health.answered(membership)
        self._ledger_ahead_s = membership.now - now()
        self._registry.spawn(self._deliveries.tell())

    def ledger_failed(self) -> None:
        """It did not answer a beat."""
        self._ledger_health.failed()

    def ledger_status(self) -> pb.LedgerStatus:
        return pb.LedgerStatus(
            server=self._ledger.server,
            durability_class=self._ledger.durability_class,
            durability=self._config.durability,
            memory_used=self._ledger_health.memory_used or None,
            away=self._ledger_health.is_away or self.attempts.keeping.is_away,
            rollbacks=self._ledger_health.rollbacks,
        )

    async def generation_changed(self, generation: str) -> None:
        """Tells a ledger that may have lost something what it has to know, then the leader that
        this is done. Returns when it is."""
        await self._reassertion.hear(generation)
        self._line.asserted(generation)

    # operators speak

    def obey(self, rules: Rules) -> None:
        """Other rules hold of the queue."""
        self._early_rejection.rules = rules

    # the leader speaks

    def dispatched(self, message: session_pb2.Dispatched) -> None:
        live = self._registry.get(message.request_id)
        if live is not None and live.phase is Phase.WAITING:
            try:
                live.request = self._model.begun(live.request, has_begun=live.num_tokens > 0)
                if not live.num_tokens:
                    self._model.check_worker(live.request, message.worker_id)
            except (UnknownModel, ContextLengthExceeded) as error:
                live.phase = Phase.ENDING
                self.attempts.end(live, State.FAILED, error)
                return
        self.attempts.dispatched(message)

    def move(self, epoch: int) -> None:
        self.attempts.move(epoch)

    def evict(self, eviction: session_pb2.Eviction) -> None:
        self.attempts.evict(eviction)

    def stale(self, request_id: str) -> None:
        self.attempts.stale(request_id)

    @property
    def outlook(self) -> session_pb2.Outlook:
        """What those that come now have to expect, by the leader's last word."""
        return self._early_rejection.outlook

    def foresee(self, outlook: session_pb2.Outlook) -> None:
        self._early_rejection.outlook = outlook
        self._wait.hear(outlook)

    def refused(self, refusal: session_pb2.Refusal) -> None:
        """It is as if the request had never come."""
        live = self._registry.get(refusal.request_id)
        if live is not None and live.phase is Phase.WAITING:
            live.phase = Phase.ENDING
            self._registry.spawn_for(live, self._discard(live, self._error_of(refusal)))

    def withdrawn(self, message: session_pb2.Withdrawn) -> None:
        self.attempts.withdrawn(message)

    def _error_of(self, refusal: session_pb2.Refusal) -> EverliftError:
        retry_after_s = refusal.retry_after_s if refusal.HasField("retry_after_s") else None
        return self._early_rejection.refuse(
            refusal.request_id, refusal.slug, retry_after_s, now(), refusal.least_tokens
        )

    async def _discard(self, live: LiveRequest, refusal: EverliftError) -> None:
        async with self._registry.moving.hold(live.request_id):
            if live.is_over:
                return
            self._registry.let_go(live)
            entry = await self._registry.persist(
                lambda: self._ledger.discard(live.request_id, self._router_id)
            )
            if entry is None:
                self.quotas.settle(live.request_id, None)
                self._recent.refuse(live.request_id)
            else:
                # Another gateway went on with it meanwhile, or it has ended.
                self._registry.settle_as(live, entry)
        self._registry.tracer.refused(
            live.request.trace, live.age_s(now()), refusal.slug, live.request.x_request_id
        )
        live.settle(now(), refusal)

    def adopt_soon(self, request_id: str) -> None:
        """The leader found it without a living gateway."""
        self._registry.spawn(self._recover(request_id))

    def waiting(self, order: Policy) -> Iterator[session_pb2.Waiting]:
        """What a new leader has to know, in this order, made as it is read. Nothing of it may be
        refused any more."""
        waiting = [live for live in self._registry if live.phase is Phase.WAITING]
        for live in sorted(waiting, key=partial(key_of, order)):
            if live.phase is Phase.WAITING and self._registry.has(live):
                live.accepted = True
                yield self.attempts.waiting(live)

    def running(self) -> list[session_pb2.Running]:
        """What a new leader has to know of those that workers have."""
        return self.attempts.running()

    # the router stops

    async def stop(self, drain_s: float) -> None:
        """Takes no more; lets streams finish for ``drain_s``, then sends their clients
        elsewhere."""
        self._registry.is_closing = True
        deadline = now() + drain_s
        while (self._openings or len(self._registry)) and now() < deadline:
            await asyncio.sleep(0.02)
        await self._turn_openings_away()
        for live in self._registry:
            self.attempts.drop(live)
        await self._keep_what_was_seen()
        for live in self._registry:
            live.settle(now(), RouterStopping("this router stops: attach through another one"))
        # There is no time to wait for a ledger that is away.
        with suppress(LedgerUnavailable):
            await self.quotas.tell()
            await self._deliveries.tell()
        await self._registry.cancel_work()

    async def _turn_openings_away(self) -> None:
        """Who came in behind the others would be told nothing any more."""
        openings = list(self._openings)
        for opening in openings:
            opening.cancel()
        await asyncio.gather(*openings, return_exceptions=True)

    async def _keep_what_was_seen(self) -> None:
        """What clients have and the ledger has not would be lost with this router. A ledger that
        is there has it after a call or never."""
        deadline = now() + DEFAULTS.timeout
        while any(live.is_ahead for live in self._registry) and now() < deadline:
            await asyncio.sleep(0.02)


def _is_cancelled() -> bool:
    """Whoever runs this."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def given_up() -> Moved:
    """To who submits what was known by its id, and was refused or forgotten elsewhere since."""
    return Moved("another router gave this request up meanwhile: send it again")


def new_request_id() -> str:
    return unnamed(secrets.token_hex(12))


def check_same_body(request: Request, body_hash: bytes) -> None:
    """Raise RequestConflict if the request of this id was submitted with another body."""
    if request.body_hash != body_hash:
        raise RequestConflict(f"request id {bare(request.request_id)} is taken by another body")
