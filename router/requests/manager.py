"""Manager of the requests of a router, from submission or takeover to the end.

The life of a request:

    submit/take over -> ledger, queue -> dispatched -> worker -> progress -> ledger -> clients
                             ^                            |
                             +------ lost or returned ----+      (attempts.py)
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from random import Random

from everlift import logs
from everlift.errors import (
    Cancelled,
    ContextLengthExceeded,
    EverliftError,
    LedgerUnavailable,
    Moved,
    RouterStopping,
    UnknownModel,
    UnknownRequest,
)
from everlift.messages import OnDisconnect, Request
from everlift.request_id import in_session, unnamed_request_id
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.admission.load_shedding import EarlyRejection
from router.admission.policy import Policy, Rules, key_of
from router.admission.request import Running, Waiting
from router.admission.wait_estimate import EstimatedWait
from router.auth.limits import Limits
from router.auth.quotas import Quotas, unlimited
from router.config import RouterConfig
from router.event_loop import now
from router.leader.client import LeaderClient
from router.ledger.base import Ledger, Membership, Page, Position
from router.ledger.config import DEFAULTS, LedgerConfig
from router.ledger.entry import Entry, Event, State, Stored
from router.missing_workers import missing_workers
from router.prediction.predictor import Predictor
from router.requests.attempt_runner import AttemptRunner, Workers
from router.requests.delivery_reports import Deliveries
from router.requests.explanation import stored_explanation
from router.requests.ledger_client import LedgerClient, LedgerHealth
from router.requests.observer import NO_OBSERVER, Observer
from router.requests.recovery import Resync, Takeover, restored_request
from router.requests.registry import RecentRequests, RequestRegistry
from router.requests.request import LiveRequest, Phase
from router.requests.served_models import ServedModels
from router.requests.session_turns import SessionTurns
from router.requests.stream import ChoiceReader, LiveSource
from router.requests.submission import Submissions
from router.requests.tasks import TaskGroup
from router.requests.timeouts import Timeouts
from router.requests.timing import Journal
from router.requests.tracer import NO_TRACES, Tracer
from router.requests.turns import Turns

log = logs.get_logger(__name__)


class Requests:
    """Manager of this router's requests, used by the APIs, the leader client and the heartbeat."""

    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        ledger: Ledger,
        models: ServedModels,
        workers: Workers,
        leader_client: LeaderClient,
        ledger_config: LedgerConfig = DEFAULTS,
        observer: Observer = NO_OBSERVER,
        tracer: Tracer = NO_TRACES,
        limits_of: Callable[[str], Limits] = unlimited,
    ) -> None:
        """Create the manager.

        ``ledger_config`` are the settings with which ``ledger`` was opened. ``limits_of`` returns
        the limits of a tenant, given by name.
        """
        self._config = config
        self._ledger = ledger
        self._models = models
        self._leader_client = leader_client
        self._early_rejection = EarlyRejection(config, Random())
        #: by model
        self._estimated_waits = {model.name: EstimatedWait() for model in models}
        self._ledger_health = LedgerHealth(ledger_config.memory_limit)
        #: predictors of output lengths, by model
        self.predictors = {
            model.name: Predictor(model.tokenizer, model.name, config.predictor_min_tau)
            for model in models
        }
        self.quotas = Quotas(ledger, limits_of)
        self._deliveries = Deliveries(ledger)
        self._tasks = TaskGroup(self._fail)
        self._recent = RecentRequests(config.reassert)
        self._turns = Turns(ledger_config.retention)
        self.session_turns = SessionTurns(self._turns, ledger, models)
        self._registry = RequestRegistry(
            router_id,
            self._recent,
            self.quotas,
            self.predictors,
            self._turns,
            self._tasks,
            observer,
            tracer,
        )
        self.counters = self._registry.counters
        self._ledger_client = LedgerClient(ledger, self._registry, self._ledger_health)
        self.attempts = AttemptRunner(
            config,
            self._registry,
            self._ledger_client,
            self._tasks,
            workers,
            leader_client,
            self.schedule_adoption,
        )
        self._timeouts = Timeouts(config.grace, self.attempts.end)
        self._takeover = Takeover(
            self._registry, self._ledger_client, self._tasks, models, self.attempts, self._timeouts
        )
        self._resync = Resync(self._registry, self._ledger_client, self.attempts.reconcile)
        self._submissions = Submissions(
            self._registry,
            self._ledger_client,
            self._ledger_health,
            models,
            leader_client,
            self.attempts,
            self._timeouts,
            self._early_rejection,
            self._estimated_waits,
            self._takeover.attach,
            self._takeover.schedule_takeover_of_unanswered,
        )

        self._opening: set[asyncio.Task[LiveRequest]] = set()

    def __len__(self) -> int:
        return len(self._registry)

    async def _fail(self, live: LiveRequest, error: EverliftError) -> None:
        await self._ledger_client.fail(live, error)

    @property
    def accepts_requests(self) -> bool:
        """Return whether this router, its cluster and the ledger accept new requests."""
        return (
            self._models.is_active and not self._registry.is_closing and self._ledger_health.is_fit
        )

    def ledger_time(self) -> float:
        """Return the present time of the ledger's clock, in seconds, as estimated by this router.

        The result is the time of this router's clock plus the offset of the ledger's clock that the
        last successful heartbeat measured.
        """
        return now() + self._ledger_health.clock_offset_s

    # clients

    async def submit(
        self, request: Request, timeout_s: float | None, journal: Journal | None = None
    ) -> LiveRequest:
        """Submit a request; return it, or the existing request of the same id.

        ``timeout_s`` is the time from the acceptance to the deadline in seconds, or None without a
        deadline. ``journal`` has the times since the request's call; if it is None, they begin now.

        Raises RequestConflict if the id exists with another body, and Elsewhere if another living
        router owns the existing, unfinished request. Raises QueueFull, DeadlineUnmeetable,
        RateLimited or LedgerFull if the request is rejected. Raises RouterStopping if this router
        is stopping, and LedgerUnavailable if the ledger does not answer or is not durable enough.
        Raises Moved if another router takes over or discards the existing request meanwhile. Raises
        UnknownModel if the existing request has ended and its model is no longer served.
        """
        journal = journal or Journal(now())
        opening = self._tasks.spawn(self._submissions.open_request(request, timeout_s, journal))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled() and not _is_cancelled():
                raise RouterStopping(
                    "this router is stopping: send the request to another router"
                ) from None
            # The client has disconnected, but the request may still be opened. It is then treated
            # like a request whose only reader has left.
            opening.add_done_callback(self._on_opened_without_client)
            raise

    def _on_opened_without_client(self, opening: asyncio.Task[LiveRequest]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._on_reader_left(opening.result())

    def count_rejected(self, error: EverliftError, model: str = "") -> None:
        """Count a submission that was rejected with ``error`` in the metrics.

        ``model`` is the name of its model; empty if it names none that is known.
        """
        self._registry.observer.refused(model, error.slug)

    async def attach(self, request_id: str) -> LiveRequest:
        """Return an unfinished or ended request; take it over if it is unfinished and ownerless.

        An unfinished request is ownerless if the router that owned it is gone.

        Raises UnknownModel if the request has ended and its model is not served, and Elsewhere if
        the request is unfinished and another living router owns it. Raises Moved if another router
        took the request over meanwhile and is not known to be alive. Also raises UnknownRequest,
        RouterStopping and LedgerUnavailable.
        """
        return await self._takeover.attach(request_id)

    def stream(
        self,
        live: LiveRequest,
        offsets: Sequence[int] = (),
        digests: Sequence[int] = (),
        *,
        is_relayed: bool = False,
        explains: bool = False,
    ) -> LiveSource:
        """Return a stream of a request's output, in which each choice starts at its offset.

        ``offsets`` are, by choice, the numbers of tokens that the client already has; those not
        given are 0. ``digests`` are, by choice, the digests of these tokens, to be compared with
        the choice's tokens; they are optional. ``is_relayed`` states that another router reads for
        the client. Closing the stream then cancels the request at the earliest after the grace
        period (``RouterConfig.grace``), because that router may have failed instead of the client.
        ``explains`` adds the time breakdown to the last message.

        Raises OffsetOutOfRange if there are more offsets than choices, if an offset is negative, or
        if it exceeds its limit. The limit is the request's max_tokens for an offset with a digest,
        and else the choice's number of readable tokens.
        """
        reader = ChoiceReader(live, offsets, digests, explains=explains)
        self._deliveries.track(live)
        return LiveSource(live, reader, lambda: self._on_reader_left(live, has_grace=is_relayed))

    def _on_reader_left(self, live: LiveRequest, *, has_grace: bool = False) -> None:
        self._deliveries.note_delivered(live)
        if not self._registry.is_closing:
            self._timeouts.on_reader_left(live, has_grace=has_grace)

    async def cancel(self, request_id: str) -> Entry:
        """Cancel a request unless it has ended, and return its ledger entry.

        Raises UnknownRequest, LedgerUnavailable, and Elsewhere if the request is unfinished and
        another living router owns it.
        """
        error = Cancelled("cancelled by a client")
        if self._registry.get(request_id) is None:
            # Wait until a request that is being opened or taken over is registered.
            async with self._registry.locks.hold(request_id):
                pass
        if (live := self._registry.get(request_id)) is not None:
            ending = self._tasks.spawn(self._cancel_live(live, error))
            entry = await asyncio.shield(ending)
            # The entry is not final if another router took the request over while this one stalled.
            if entry is not None and entry.state.is_final:
                return entry
        if (ended := self._recent.get(request_id)) is not None:
            await self._resync.resend_end(ended)
        return await self._cancel_ownerless(request_id, error)

    async def _cancel_live(self, live: LiveRequest, error: Cancelled) -> Entry | None:
        """Cancel a request that this router owns, and return its ledger entry.

        Return None if the request has ended meanwhile, or was rejected, which frees its id.
        """
        async with self._registry.locks.hold(live.request_id):
            if not self._registry.has(live):
                return None
            return await self.attempts.end(live, State.CANCELLED, error)

    async def _cancel_ownerless(self, request_id: str, error: Cancelled) -> Entry:
        entry = await self._ledger.get(request_id)
        while not entry.state.is_final:
            await self._ledger_client.check_ownerless(entry.gateway)
            # If another router took the request over meanwhile, the ledger does not change the
            # entry.
            entry = await self._ledger.end_request(
                request_id, State.CANCELLED, error.slug, str(error), entry.gateway
            )
            if entry.state.is_final:
                self.quotas.settle(request_id, sum(entry.num_tokens))
        return entry

    async def forget(self, request_id: str) -> None:
        """Erase a request, after cancelling it if it is unfinished.

        Other routers that have served the same session may keep the request's token ids in memory,
        and reuse the ids in later prompts of the session. The reuse ends ``ledger.retention``
        seconds after the router last stored the ids. No client can read the ids.

        Do nothing if an earlier call erased the request recently. Raises UnknownRequest and
        LedgerUnavailable, and Elsewhere or Moved if another router owns the request. An ended
        request still counts as owned by its last router, as long as that router is alive.
        """
        try:
            entry = await self.cancel(request_id)
        except UnknownRequest:
            if self._recent.erased_arrival(request_id) is None:
                raise
            # An earlier call has erased the request a moment ago.
            return
        await self._ledger_client.check_ownerless(entry.gateway)
        async with self._registry.locks.hold(request_id):
            if await self._ledger.erase(request_id) is not None:
                raise Moved("another router owns this request: retry forget there")
            self._recent.add_erased(request_id, entry.arrived)
            self._turns.forget(request_id)
        log.info("request deleted", request_id=request_id)

    async def get(self, request_id: str) -> tuple[Stored, tuple[Event, ...]]:
        """Return a request as the ledger stores it, without output tokens, and its last events.

        Raises UnknownRequest and LedgerUnavailable.
        """
        entry = await self._ledger.get(request_id)
        stored = await self._ledger.read(request_id, entry.num_tokens)
        return stored, await self._ledger.events(request_id)

    async def read(self, request_id: str) -> LiveRequest:
        """Return a request with the output that the ledger has of it, whichever router owns it.

        Raises UnknownRequest and LedgerUnavailable.
        """
        stored = await self._ledger.read(request_id)
        model = self._models.find(stored.request) or self._models.first
        return await restored_request(stored, model.tokenizer)

    async def prompt_ids(self, request_id: str) -> tuple[int, ...]:
        """Return the token ids of a request's prompt, whichever router owns the request.

        Raises UnknownRequest and LedgerUnavailable.
        """
        if (live := self._registry.known(request_id)) is not None:
            return live.request.prompt_ids
        entry = await self._ledger.get(request_id)
        return (await self._ledger.read(request_id, entry.num_tokens)).request.prompt_ids

    async def explain(self, request_id: str) -> pb.Explanation:
        """Return a request's time breakdown up to its end, or up to now if it has not ended.

        The breakdown comes from this router if it owns the request, if the request ended here
        recently, or if a client still reads the request from it, and otherwise from the ledger.
        Raises UnknownRequest, LedgerUnavailable, and Elsewhere if another router owns the
        unfinished request.
        """
        if (live := self._registry.known(request_id)) is not None:
            self.attempts.note_newcomers(live)
            explanation = live.explanation(now())
            if explanation.state == pb.REQUEST_STATE_QUEUED:
                explanation.missing_workers = await self.missing_workers(live.request.model)
            return explanation
        entry = await self._ledger.get(request_id)
        if (read := self._deliveries.in_delivery(entry)) is not None:
            return read.explanation(now())
        if not entry.state.is_final:
            await self._ledger_client.check_ownerless(entry.gateway)
        return stored_explanation(*await self.get(request_id))

    async def missing_workers(self, model: str | None = None) -> str:
        """Return a text that says why wanted workers of ``model``, or of any, are not ready.

        The text is empty if no worker is missing, or if the ledger does not answer.
        """
        try:
            return missing_workers(await self._ledger.load(), model)
        except LedgerUnavailable:
            return ""

    async def list_requests(
        self,
        tenant: str,
        states: Collection[State],
        limit: int,
        before: Position | None,
        session_id: str,
    ) -> Page:
        """Return a page of requests as ``Ledger.list_requests`` does.

        Raises ValueError for a ``limit`` out of range, and LedgerUnavailable.
        """
        return await self._ledger.list_requests(
            tenant, states=states, session_id=session_id, limit=limit, before=before
        )

    # the heartbeat

    def ledger_answered(self, membership: Membership) -> None:
        """Record the ledger's answer to a heartbeat, and start writing delivery reports.

        ``membership`` is the answer. A delivery report is the time breakdown of an ended request,
        including the delivery to its client. The reports are written in the background.
        """
        if self._ledger_health.is_away:
            self._recent.release()
        self._ledger_health.record_heartbeat(membership, now())
        self._tasks.spawn(self._deliveries.flush())

    def ledger_failed(self) -> None:
        """Record that the ledger did not answer a heartbeat."""
        if not self._ledger_health.is_away:
            self._recent.hold()
        self._ledger_health.record_failure()

    def ledger_status(self) -> pb.LedgerStatus:
        return pb.LedgerStatus(
            server=self._ledger.server,
            durability_class=self._ledger.durability_class,
            durability=self._config.durability,
            memory_used=self._ledger_health.memory_used or None,
            away=self._ledger_health.is_away or self.attempts.writer.is_away,
            rollbacks=self._ledger_health.rollbacks,
        )

    async def generation_changed(self, generation: str) -> None:
        """Restore this router's state in the ledger if the generation is new; notify the leader.

        ``generation`` is an identifier that changes with each restart or failover of a ledger
        server, which may lose recent writes. Nothing is restored for the first generation that this
        router sees, or if the generation is the same as before. The leader is notified in any case.
        """
        await self._resync.run(generation)
        self._leader_client.report_generation(generation)

    # operators

    def apply_rules(self, rules: Rules) -> None:
        """Apply the queue rules, which an operator has changed, to early rejection from now on."""
        self._early_rejection.rules = rules

    # the leader's events

    def dispatched(self, message: session_pb2.Dispatched) -> None:
        live = self._registry.get(message.request_id)
        if live is not None and live.phase is Phase.WAITING:
            try:
                model = self._models.of(live.request)
                has_output = live.num_tokens > 0
                live.use_versions(model.with_fingerprint(live.request, has_output=has_output))
                model.check_worker(live.request, message.worker_id)
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
    def queue_estimates(self) -> Mapping[str, session_pb2.QueueEstimate]:
        """Return the leader's latest estimate of the queue of each model."""
        return self._early_rejection.queue_estimates

    def on_queue_estimates(self, estimates: Iterable[session_pb2.QueueEstimate]) -> None:
        # A new leader may have no queue of a model yet; the previous one's estimate is outdated.
        self._early_rejection.queue_estimates = by_model = {it.model: it for it in estimates}
        for model, waits in self._estimated_waits.items():
            waits.on_estimate(by_model.get(model, session_pb2.QueueEstimate()))

    def refused(self, refusal: session_pb2.Refusal) -> None:
        """Discard a request that the leader rejected, and end it for its clients.

        A request that an API stores for later readers, and that has no reader now, ends as failed.
        """
        live = self._registry.get(refusal.request_id)
        if live is not None and live.phase is Phase.WAITING:
            live.phase = Phase.ENDING
            self._tasks.spawn_for(live, self._discard(live, self._error_of(live, refusal)))

    def withdrawn(self, message: session_pb2.Withdrawn) -> None:
        self.attempts.withdrawn(message)

    def _error_of(self, live: LiveRequest, refusal: session_pb2.Refusal) -> EverliftError:
        retry_after_s = refusal.retry_after_s if refusal.HasField("retry_after_s") else None
        return self._early_rejection.refuse(
            refusal.request_id,
            live.request.model,
            refusal.slug,
            retry_after_s,
            now(),
            refusal.least_tokens,
        )

    async def _discard(self, live: LiveRequest, refusal: EverliftError) -> None:
        async with self._registry.locks.hold(live.request_id):
            if live.is_over:
                return
            is_unread = live.on_disconnect is OnDisconnect.CONTINUE and not live.has_readers
            if is_unread and live.request.attachment:
                # The client was told that the request is queued, and polls for its end.
                self.quotas.settle(live.request_id, None)
                await self.attempts.end(live, State.FAILED, refusal)
                return
            self._registry.release(live)
            entry = await self._ledger_client.retry(
                lambda: self._ledger.discard(live.request_id, self._registry.router_id)
            )
            if entry is None:
                self.quotas.settle(live.request_id, None)
                self._recent.add_rejected(live.request_id)
            else:
                # Another router took the request over meanwhile, or the request has ended.
                self._registry.finalize(live, entry)
        self._registry.tracer.refused(
            live.request.trace, live.age_s(now()), refusal.slug, live.request.x_request_id
        )
        live.settle(now(), refusal)

    def schedule_adoption(self, request_id: str) -> None:
        """Take over a lost router's request in the background, as the leader requests."""
        self._takeover.schedule_takeover(request_id)

    def waiting(self, order: Policy) -> Iterator[Waiting]:
        """Yield all queued requests, sorted by ``order``, to be reported to a new leader.

        The requests are marked as accepted, so that the leader does not reject them later.
        """
        waiting = [live for live in self._registry if live.phase is Phase.WAITING]
        for live in sorted(waiting, key=partial(key_of, order)):
            if live.phase is Phase.WAITING and self._registry.has(live):
                live.accepted = True
                yield self.attempts.waiting(live)

    def running(self) -> list[Running]:
        """Return all requests at workers, to be reported to a new leader."""
        return self.attempts.running()

    # the end

    async def stop(self, drain_s: float) -> None:
        """Stop accepting requests, wait for unfinished ones, then redirect the clients of the rest.

        The wait takes at most ``drain_s`` seconds. The clients of the requests that are unfinished
        then receive RouterStopping, and can attach through another router.
        """
        self._registry.is_closing = True
        deadline = now() + drain_s
        while (self._opening or len(self._registry)) and now() < deadline:
            await asyncio.sleep(0.02)
        for opening in (abandoned := list(self._opening)):
            opening.cancel()
        await asyncio.gather(*abandoned, return_exceptions=True)
        for live in self._registry:
            self.attempts.drop(live)
        await self._write_delivered()
        for live in self._registry:
            live.settle(
                now(), RouterStopping("this router is stopping: attach through another router")
            )
        # A stopping router does not wait for a ledger that is unavailable.
        with suppress(LedgerUnavailable):
            await self.quotas.flush()
            await self._deliveries.flush()
        await self._tasks.cancel_all()

    async def _write_delivered(self) -> None:
        """Wait until the ledger has all output that clients may have read, up to a time limit."""
        deadline = now() + DEFAULTS.timeout
        while any(live.has_unledgered_output for live in self._registry) and now() < deadline:
            await asyncio.sleep(0.02)


def _is_cancelled() -> bool:
    """Return whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def new_request_id(session_id: str = "") -> str:
    """Return a new id for a request whose client chose none.

    ``session_id`` is the request's session; empty if it has none.
    """
    return in_session(unnamed_request_id(secrets.token_hex(12)), session_id)
