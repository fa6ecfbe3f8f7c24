"""Execution of the effects that the attempts' state machine (attempts.py) returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Any, Protocol

from everlift import logs
from everlift.errors import EverliftError, NoWorker
from everlift.hashes import CHUNK_SIZE, chunk_id
from everlift.messages import Request
from everlift.v1 import session_pb2
from router.admission.request import Running, Waiting
from router.config import RouterConfig
from router.event_loop import now
from router.leader.client import LeaderClient
from router.leader.leader import Reservation
from router.ledger.entry import Entry, State
from router.prediction.predictor import Prediction
from router.requests import messages
from router.requests.attempts import (
    Abort,
    Attempts,
    ConfirmStep,
    Decline,
    Effect,
    End,
    Enqueue,
    Finalize,
    Reconcile,
    Release,
    ReportFinished,
    ReportRunning,
    ReportServed,
    ReportSessionOutput,
    Start,
    Withdraw,
    Write,
    WriteUnstored,
)
from router.requests.ledger_client import LedgerClient
from router.requests.registry import RequestRegistry
from router.requests.request import Choice, LiveRequest, Phase
from router.requests.tasks import TaskGroup
from router.requests.timeouts import WorkerWait
from router.requests.timing import WorkerConnection
from router.requests.token_writer import TokenWriter

log = logs.get_logger(__name__)

#: Maximum number of tokens in the Start messages that are made in one turn of the event loop. More
#: would delay other requests.
_TOKENS_PER_TURN = 1 << 16
#: Maximum time in seconds for which the end of a request waits for the leader's answer to the
#: request's withdrawal. A living leader answers within a few milliseconds.
_WITHDRAWAL_S = 0.1


class Workers(Protocol):
    """Connections of this router to the workers."""

    def is_any_up(self, model: str) -> bool:
        """Return whether a worker of the model is connected."""
        ...

    def start(self, worker_id: str, starts: Sequence[session_pb2.Start]) -> bool:
        """Send Start messages to a worker; return False if there is no stream to it."""
        ...

    def abort(self, worker_id: str, epoch: int, choices: Sequence[int] = ()) -> None:
        """Stop these choices of the attempt ``epoch``, or all of them if ``choices`` is empty."""
        ...

    def confirm(self, worker_id: str, epoch: int) -> None:
        """Confirm that this router has received the worker's report of an attempt's first step.

        ``epoch`` identifies the attempt.
        """
        ...

    def connection(self, worker_id: str) -> WorkerConnection | None:
        """Return the connection to a worker, or None if the worker is not connected."""
        ...


class AttemptRunner:
    """Passes events to the attempts' state machine, and carries out the effects that it returns.

    ``take_over`` is called with the id of a request that the ledger assigns to this router but that
    this router does not have. The callback takes the request over in the background.
    """

    def __init__(
        self,
        config: RouterConfig,
        registry: RequestRegistry,
        ledger: LedgerClient,
        tasks: TaskGroup,
        workers: Workers,
        leader_client: LeaderClient,
        take_over: Callable[[str], None],
    ) -> None:
        self._config = config
        self._registry = registry
        self._ledger = ledger
        self._tasks = tasks
        self._workers = workers
        self._leader_client = leader_client
        self._take_over = take_over
        self._attempts = Attempts(config, registry.router_id, registry.counters)
        self.writer = TokenWriter(
            config, registry, ledger.ledger, self._schedule_reconcile, self._fail
        )
        self._worker_wait = WorkerWait(config.worker_wait, self._no_worker)
        #: pending answers of the leader to withdrawals, by request id
        self._withdrawals: dict[str, asyncio.Future[session_pb2.QueueWait]] = {}
        self._run_effect: dict[type[Any], Callable[[Any], object]] = {
            Start: self._start,
            Abort: lambda it: workers.abort(*it),
            ConfirmStep: lambda it: workers.confirm(*it),
            Enqueue: lambda it: self.enqueue(it.live),
            Withdraw: lambda it: leader_client.withdraw(it.request_id),
            ReportRunning: lambda it: self._report_running(it.live),
            ReportServed: self._report_served,
            ReportFinished: lambda it: leader_client.report_finished(*it),
            ReportSessionOutput: lambda it: self._report_session_output(it.live),
            Write: lambda it: self.writer.write(*it),
            WriteUnstored: lambda it: self.writer.write_unstored(it.live),
            Release: lambda it: tasks.spawn_for(it.live, self._release(it)),
            Decline: lambda it: tasks.spawn(self._decline(it.message)),
            End: lambda it: self.end(*it),
            Finalize: lambda it: registry.finalize(it.live, it.entry),
            Reconcile: lambda it: tasks.spawn_for(
                it.live, self.reconcile(it.live, is_queued=it.is_queued)
            ),
        }

    async def run(self) -> None:
        """Run the writer of output tokens to the ledger, until cancelled."""
        await self.writer.run()

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._run_effect[type(effect)](effect)

    # into the queue

    def reserve(
        self, request: Request, timeout_s: float | None, prediction: Prediction
    ) -> Reservation | None:
        """Reserve a worker for a request that the ledger does not have yet; return the reservation.

        ``timeout_s`` is the time from the request's arrival to its deadline in seconds, or None
        without a deadline. Return None if the request has to queue.
        """
        gateway, moves_left = self._registry.router_id, self._config.max_moves
        return self._leader_client.reserve(
            lambda arrived: messages.arriving(
                request, gateway, arrived, timeout_s, prediction, moves_left
            )
        )

    def start_reserved(self, live: LiveRequest, entry: Entry, reservation: Reservation) -> bool:
        """Start a request at its reserved worker; return whether it was started.

        ``entry`` is the ledger's entry after the request was opened. If it shows that the ledger
        did not accept the dispatch to the reserved worker, do nothing and return False.
        """
        if entry.epoch != reservation.dispatch.epoch:
            return False
        leader_knows = reservation.confirm()
        self.dispatched(reservation.dispatched(entry))
        if not leader_knows and live.runs_under(entry.epoch):
            self._report_running(live)
        return True

    def enqueue(self, live: LiveRequest) -> None:
        self._worker_wait.start_timer(live)
        self._leader_client.enqueue(self.waiting(live))

    def waiting(self, live: LiveRequest) -> Waiting:
        gateway, moves_left = self._registry.router_id, self._moves_left(live)
        is_suspect = live.losses.is_suspect(live.num_tokens, self._config)
        chunks = [chunk_id(it) for it in self._chunk_hashes(live)]
        model = live.request.model
        cached = self._leader_client.cached_tokens(model, chunks, live.known_tokens)
        return messages.waiting(live, gateway, moves_left, is_suspect, chunks, cached)

    def running(self) -> list[Running]:
        """Return all requests at workers, to be reported to a new leader."""
        return [self._running(live) for live in self._attempts.running]

    def _running(self, live: LiveRequest) -> Running:
        return messages.running(live, self._registry.router_id, self._moves_left(live))

    def _report_running(self, live: LiveRequest) -> None:
        self._leader_client.report_running(self._running(live))

    def _moves_left(self, live: LiveRequest) -> int:
        return max(0, self._config.max_moves - live.num_moved)

    def _report_served(self, effect: ReportServed) -> None:
        live, model = effect.live, effect.live.request.model
        self._leader_client.report_served(live.request_id, model, live.priority, effect.tokens)

    def _report_session_output(self, live: LiveRequest) -> None:
        if live.num_tokens and (session := live.request.session):
            model = live.request.model
            self._leader_client.report_session_output(model, session, live.num_tokens)

    # the leader's events

    def dispatched(self, message: session_pb2.Dispatched) -> None:
        live = self._registry.get(message.request_id)
        worker = self._workers.connection(message.worker_id)
        self._apply(self._attempts.on_dispatched(live, message, worker, now()))

    def move(self, epoch: int) -> None:
        self._apply(self._attempts.on_move(epoch, now()))

    def evict(self, eviction: session_pb2.Eviction) -> None:
        self._apply(self._attempts.on_evict(eviction, now()))

    def stale(self, request_id: str) -> None:
        self._apply(self._attempts.on_stale(self._registry.get(request_id)))

    def withdrawn(self, message: session_pb2.Withdrawn) -> None:
        answer = self._withdrawals.get(message.request_id)
        if answer is not None and not answer.done():
            answer.set_result(message.queue_wait)

    def _chunk_hashes(self, live: LiveRequest) -> Sequence[bytes]:
        return live.chunk_hashes() if self._config.locality else ()

    def _start(self, effect: Start) -> None:
        live, expected = effect.live, effect.live.expected_cached_tokens
        num_chunks = 0 if effect.is_whole else ceil(expected / CHUNK_SIZE)
        prefix = self._chunk_hashes(live)[:num_chunks]
        if not self._send_starts(live, effect.choices, prefix):
            self._apply(self._attempts.on_unreachable(live, now()))

    def _send_starts(
        self, live: LiveRequest, choices: Sequence[Choice], prefix: Sequence[bytes]
    ) -> bool:
        """Send the Start messages of these choices; return False if no stream to the worker exists.

        The first message omits the chunks whose hashes are in ``prefix``. The others omit the image
        files and all chunks that the choices share, because the worker gets these from the first
        message. At most ``_TOKENS_PER_TURN`` tokens, or one longer message, are sent now. The other
        choices follow in later turns of the event loop, each of which sends the image files again.
        """
        shared = self._chunk_hashes(live) if len(choices) > 1 else ()
        starts: list[session_pb2.Start] = []
        room = _TOKENS_PER_TURN
        for choice in choices:
            known = len(live.request.prompt_ids) + len(choice.output)
            room -= known - CHUNK_SIZE * len(prefix)
            if starts and room < 0:
                break
            starts.append(messages.start(live, choice, prefix, has_images=not starts))
            prefix = shared
        if later := choices[len(starts) :]:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._send_later, live, live.epoch, later, prefix)
        return self._workers.start(live.worker_id, starts)

    def _send_later(
        self, live: LiveRequest, epoch: int, choices: Sequence[Choice], prefix: Sequence[bytes]
    ) -> None:
        if self._attempts.running.get(epoch) is live:
            self._send_starts(live, choices, prefix)

    async def _decline(self, message: session_pb2.Dispatched) -> None:
        """Undo, in the ledger, the dispatch of a request that is not waiting at this router.

        Then take the request over, withdraw it or reconcile it, as its ledger entry requires. Such
        a dispatch arrives if the request was withdrawn meanwhile, if another leader dispatched
        it first, or if the ledger lost an earlier dispatch.
        """
        entry = await self._ledger.retry(lambda: self._undo(message))
        live = self._registry.get(message.request_id)
        is_ours = entry.state is State.QUEUED and entry.gateway == self._registry.router_id
        if live is None and is_ours:
            self._take_over(message.request_id)
        elif live is None or live.is_ending:
            # The leader dispatched the request after its withdrawal, and counts it as running.
            self._leader_client.withdraw(message.request_id)
        elif is_ours:
            await self.reconcile(live)

    async def _undo(self, message: session_pb2.Dispatched) -> Entry:
        ledger = self._ledger.ledger
        tally = (await ledger.get(message.request_id)).tally
        return await ledger.release(
            message.request_id,
            message.epoch,
            loss=None,
            max_losses=self._config.max_losses,
            tally=tally,
        )

    # the workers' events

    def breakdown(self, breakdown: session_pb2.TimeBreakdown) -> None:
        self._attempts.on_breakdown(breakdown)

    def progress(self, worker_id: str, progress: session_pb2.Progress) -> None:
        self._apply(self._attempts.on_progress(worker_id, progress, now()))

    def incomplete_starts(
        self, worker_id: str, starts: Iterable[session_pb2.IncompleteStart]
    ) -> None:
        """Send choices to their worker again with all tokens, because it lacks omitted ones.

        ``starts`` names the choices whose Start messages omitted tokens that the worker lacks.
        """
        choices: dict[int, list[int]] = {}
        for start in starts:
            choices.setdefault(start.epoch, []).append(start.choice)
        for epoch, indices in choices.items():
            self._apply(self._attempts.on_incomplete(worker_id, epoch, indices))

    def worker_up(self, model: str) -> None:
        self._worker_wait.worker_up(model, self._registry)

    def worker_lost(self, worker_id: str) -> None:
        for model in self._worker_wait.models_with_workers:
            if not self._workers.is_any_up(model):
                self._worker_wait.last_worker_lost(model, self._registry)
        self._apply(self._attempts.on_worker_lost(worker_id, now()))

    def note_newcomers(self, live: LiveRequest) -> None:
        self._attempts.note_newcomers(live)

    async def _release(self, release: Release) -> None:
        live, epoch = release.live, release.epoch
        await asyncio.sleep(release.delay_s)
        await self.writer.write_all(live)
        if live.runs_under(epoch):
            max_losses = self._attempts.max_losses(release)
            entry = await self._ledger.release(live, epoch, release.loss, max_losses)
            if live.runs_under(epoch):
                self._apply(self._attempts.on_released(live, entry, now()))
        if live.is_over:
            self._leader_client.withdraw(live.request_id)

    # the ledger's events

    def _schedule_reconcile(self, live: LiveRequest) -> None:
        self._apply([Reconcile(live, is_queued=True)])

    async def reconcile(self, live: LiveRequest, *, is_queued: bool = True) -> None:
        """Bring a request and its ledger entry into the same state, which is the newer of the two.

        The newer state has more moves. Moves are the state changes that the ledger counts, such as
        dispatch and release. The ledger has fewer moves than this router if its server lost recent
        writes. It has more if another router moved the request, or if the answer to a successful
        operation was lost. ``is_queued`` states whether a waiting request is in the leader's queue;
        if not, it is enqueued.
        """
        async with self._registry.locks.hold(live.request_id):
            if live.is_ending:
                return
            entry = await self._ledger.get(live)
            if not live.is_ending and (entry.state.is_final or entry.moves >= live.entry.moves):
                await self._follow(live, entry, is_queued)
            if live.is_over:
                self.drop(live)

    async def _follow(self, live: LiveRequest, entry: Entry, is_queued: bool) -> None:
        if entry.state.is_final or not self._registry.is_current(live, entry):
            self._registry.finalize(live, entry)
        elif entry.epoch == live.epoch:
            self.writer.mark_stored(live, entry)
            if live.phase is not Phase.WAITING:
                self.writer.write_unstored(live)
            elif not is_queued:
                self.enqueue(live)
        elif live.phase is not Phase.WAITING or not is_queued:
            await self._requeue(live)
        # Otherwise the message of the request's dispatch is on its way to this router.

    async def _requeue(self, live: LiveRequest) -> None:
        self.drop(live)
        entry = await self._ledger.requeue(live)
        if not live.is_ending:
            # An outdated leader may have dispatched the request again meanwhile.
            self.drop(live)
            self._apply(self._attempts.on_released(live, entry, now()))

    # the end

    def end(self, live: LiveRequest, state: State, error: EverliftError) -> asyncio.Task[Entry]:
        """End a request before its last token; return the task that ends it in the ledger.

        The task returns the request's final ledger entry. It must run to its end even if the caller
        is cancelled, so callers shield it.
        """
        answer: asyncio.Future[session_pb2.QueueWait] | None = None
        if live.phase is Phase.WAITING and not self._leader_client.is_quiet:
            answer = asyncio.get_running_loop().create_future()
            self._withdrawals[live.request_id] = answer
        self._apply(self._attempts.on_end(live, error.slug, now()))
        return self._tasks.spawn_for(live, self._end(live, state, error, answer))

    async def _end(
        self,
        live: LiveRequest,
        state: State,
        error: EverliftError,
        answer: asyncio.Future[session_pb2.QueueWait] | None,
    ) -> Entry:
        if answer is not None:
            await self._await_withdrawal(live, answer)
        entry = await self._ledger.end(live, state, error)
        self._registry.finalize(live, entry)
        return entry

    async def _await_withdrawal(
        self, live: LiveRequest, answer: asyncio.Future[session_pb2.QueueWait]
    ) -> None:
        """Record the queue wait that the leader reports in its answer to a withdrawal.

        Wait at most ``_WITHDRAWAL_S`` seconds, because the leader does not answer if it has
        dispatched the request, or never received it.
        """
        try:
            async with asyncio.timeout(_WITHDRAWAL_S):
                live.journal.withdrawn(await answer, now())
        except TimeoutError:
            pass
        finally:
            if self._withdrawals.get(live.request_id) is answer:
                del self._withdrawals[live.request_id]

    def drop(self, live: LiveRequest) -> None:
        """Withdraw a request from the leader's queue, and abort it at its worker.

        The request is not ended: its phase and its ledger entry do not change.
        """
        self._apply(self._attempts.on_dropped(live, now()))

    def _fail(self, live: LiveRequest, error: EverliftError) -> None:
        self.end(live, State.FAILED, error)

    def _no_worker(self, live: LiveRequest, error: NoWorker) -> None:
        self.end(live, State.FAILED, error)
