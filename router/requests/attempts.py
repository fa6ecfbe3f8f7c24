"""A request between queue and worker: dispatched, making tokens, lost, given back, finished, ended.

waiting  --dispatched-->  running  --last tokens-->  finishing  --stored-->  over
   ^                         |
   +- lost, given back, -----+            any of them  --end-->  ending  --ledger-->  over
      or moved elsewhere

All its choices go this way together; each comes to its own end while the request is running. What
is given back choice by choice waits for the last of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from everlift import logs
from everlift.errors import EngineFailed, EverliftError, InvalidRequest, from_slug
from everlift.messages import FinishReason, Request
from everlift.request_id import bare, tenant_of
from everlift.v1 import session_pb2
from router.admission.dispatch_message import dispatched
from router.config import RouterConfig
from router.event_loop import now
from router.ledger.entry import Dispatch, Entry, State
from router.prediction.predictor import Prediction
from router.requests import messages
from router.requests.agreement import Agreement
from router.requests.at_workers import AtWorkers
from router.requests.leaving import Leaving
from router.requests.progress import note, take
from router.requests.registry import RequestRegistry
from router.requests.request import Choice, LiveRequest, Phase
from router.requests.timing import FINISHED, SILENT, Speaker
from router.requests.token_writer import TokenWriter
from router.requests.worker_wait import WorkerWait

log = logs.get(__name__)

_FINISHED_BY = {
    session_pb2.STOP_CAUSE_EOS: FinishReason.STOP,
    session_pb2.STOP_CAUSE_LENGTH: FinishReason.LENGTH,
}
#: Before a request that its worker did not get queues again.
_RETRY_S = 0.1
#: To write down more of them for a worker would keep the event loop from all others for too long.
_TOKENS_AT_ONCE = 1 << 16
#: A number of losses that no request reaches.
_NEVER = 1 << 30


class Workers(Protocol):
    """The streams to the workers, as far as requests need them."""

    @property
    def is_any_up(self) -> bool: ...

    def start(self, worker_id: str, starts: Sequence[session_pb2.Start]) -> bool:
        """False when there is no stream to this worker."""
        ...

    def abort(self, worker_id: str, epoch: int, choices: Sequence[int] = ()) -> None:
        """Of no choices: of all."""
        ...

    def confirm(self, worker_id: str, epoch: int) -> None:
        """Tell the worker that the first step of a sequence is known here."""
        ...

    def speaker(self, worker_id: str) -> Speaker | None:
        """None when there is no stream to this worker."""
        ...


class Reservation(Protocol):
    """A worker for a request that the ledger does not have yet. Whoever has it says what became of
    it."""

    @property
    def dispatch(self) -> Dispatch: ...

    @property
    def predicted_ttft_s(self) -> float | None:
        """From its arrival to its first token; None: not known."""
        ...

    @property
    def predicted_tpot_s(self) -> float | None:
        """For each token after that, likewise."""
        ...

    def begun(self) -> bool:
        """The ledger has let it begin. Whether who leads knows that."""
        ...

    def give_back(self) -> None:
        """It did not begin."""
        ...


class Line(Protocol):
    """The line to whoever leads the admission queue."""

    def reserve(self, request: Callable[[float], session_pb2.Waiting]) -> Reservation | None:
        """A worker for a request that is about to come, by the moment in ledger time at which it
        does, where it would leave the queue as soon as it came there. None: it has to wait, or
        somebody else has to be asked."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Nobody leads, as far as one knows, or has not said anything for a while."""
        ...

    @property
    def queued(self) -> int:
        """Requests that waited in the whole cluster when the leader last said so."""
        ...

    def enqueue(self, waiting: session_pb2.Waiting) -> None: ...

    def withdraw(self, request_id: str) -> None:
        """It needs no worker any more: neither its place in the queue nor what it had."""
        ...

    def running(self, running: session_pb2.Running) -> None:
        """Its worker preempted it, or goes on with it."""
        ...

    def served(self, request_id: str, priority: int, tokens: int) -> None:
        """So much more of its output came."""
        ...

    def finished(self, tpot_ratio: float) -> None:
        """A request did, and each of its tokens took so many times as long as was predicted."""
        ...

    def asserted(self, generation: str) -> None:
        """The ledger of this generation has been told again what it may have lost."""
        ...


class Attempts:
    """``adopt`` is called with a request that is this gateway's and not in its custody."""

    def __init__(
        self,
        config: RouterConfig,
        registry: RequestRegistry,
        workers: Workers,
        line: Line,
        adopt: Callable[[str], None],
    ) -> None:
        self._config = config
        self._registry = registry
        self._ledger = registry.ledger
        self._workers = workers
        self._line = line
        self._adopt = adopt
        self._running = AtWorkers()
        self.keeping = TokenWriter(config, registry, self._differs, self._fail)
        self._agreement = Agreement(registry, self.keeping, self)
        self._leaving = Leaving()
        self._worker_wait = WorkerWait(config.worker_wait, self._fail)

    async def run(self) -> None:
        """Carries tokens into the ledger until cancelled."""
        await self.keeping.run()

    # the leader is told

    def reserve(
        self, request: Request, timeout_s: float | None, prediction: Prediction
    ) -> Reservation | None:
        """A worker for a request that the ledger does not have yet, if it need not wait for one."""
        moves_left = self._config.max_moves
        return self._line.reserve(
            lambda arrived: messages.arriving(request, arrived, timeout_s, prediction, moves_left)
        )

    def begin(self, live: LiveRequest, entry: Entry, reservation: Reservation) -> bool:
        """A request that was opened with a reservation's dispatch begins, if the ledger let it."""
        if entry.epoch != reservation.dispatch.epoch:
            return False
        leader_knows = reservation.begun()
        self.dispatched(
            dispatched(
                entry,
                predicted_ttft_s=reservation.predicted_ttft_s,
                predicted_tpot_s=reservation.predicted_tpot_s,
            )
        )
        if not leader_knows and live.runs_under(entry.epoch):
            self._line.running(messages.running(live, self._moves_left(live)))
        return True

    def enqueue(self, live: LiveRequest) -> None:
        self._worker_wait.enter(live)
        self._line.enqueue(self.waiting(live))

    def waiting(self, live: LiveRequest) -> session_pb2.Waiting:
        is_suspect = live.losses.make_suspect(live.num_tokens, self._config)
        return messages.waiting(live, self._moves_left(live), is_suspect)

    def running(self) -> list[session_pb2.Running]:
        """All that workers have."""
        return [messages.running(live, self._moves_left(live)) for live in self._running]

    def _moves_left(self, live: LiveRequest) -> int:
        return max(0, self._config.max_moves - live.num_moved)

    # the leader speaks

    def dispatched(self, message: session_pb2.Dispatched) -> None:
        """A worker is ours for one of our requests."""
        live = self._registry.get(message.request_id)
        if live is None or live.phase is not Phase.WAITING:
            self._registry.spawn(self._decline(message))
            return
        self._registry.counters.migrated += bool(live.num_tokens)
        beside = live.request_id, message.worker_id
        neighbours, occupants = self._running.neighbours(*beside), self._running.occupants(*beside)
        worker = self._workers.speaker(message.worker_id) or SILENT
        live.confirms_first_step = live.losses.need_confirmation(live.num_tokens, self._config)
        live.begin(message, neighbours, worker, now(), occupants)
        self._running.add(live)
        log.info(
            "dispatched",
            request_id=live.request_id,
            worker_id=message.worker_id,
            attempt=message.attempt,
            tokens=live.num_tokens,
        )
        # Ends and tokens that the ledger did not take under an older epoch.
        self.keeping.put_rest(live)
        if not live.at_worker:
            self._all_left(live)
        elif not self._start(live, live.unfinished):
            live.avoid = message.worker_id
            self._registry.spawn_for(live, self._return(live, end="unreachable", delay_s=_RETRY_S))

    def _start(self, live: LiveRequest, choices: Sequence[Choice]) -> bool:
        """Of long ones a part, and the others when the event loop has done what waits. False when
        there is no stream to the worker."""
        longest = len(live.request.prompt_ids) + max(len(choice.output) for choice in choices)
        count = max(1, _TOKENS_AT_ONCE // longest)
        if later := choices[count:]:
            asyncio.get_running_loop().call_soon(self._start_later, live, live.epoch, later)
        starts = [messages.start(live, choice) for choice in choices[:count]]
        return self._workers.start(live.worker_id, starts)

    def _start_later(self, live: LiveRequest, epoch: int, choices: Sequence[Choice]) -> None:
        if self._running.get(epoch) is live:
            self._start(live, choices)

    async def _decline(self, message: session_pb2.Dispatched) -> None:
        """It is not waiting here: another leader was quicker, or the ledger lost a dispatch."""
        entry = await self._registry.persist(lambda: self._released(message))
        live = self._registry.get(message.request_id)
        is_ours = entry.state is State.QUEUED and entry.gateway == self._registry.router_id
        if live is None and is_ours:
            self._adopt(message.request_id)
        elif live is None or live.is_ending:
            # What was withdrawn before may run since, as far as the leader knows.
            self._line.withdraw(message.request_id)
        elif is_ours:
            await self.agree(live)

    async def _released(self, message: session_pb2.Dispatched) -> Entry:
        """As if it had not been dispatched."""
        tally = (await self._ledger.get(message.request_id)).tally
        return await self._ledger.release(
            message.request_id,
            message.epoch,
            loss=None,
            max_losses=self._config.max_losses,
            tally=tally,
        )

    def withdrawn(self, message: session_pb2.Withdrawn) -> None:
        self._leaving.told(message)

    def stale(self, request_id: str) -> None:
        """The ledger would not let the leader dispatch it: a move of it was lost on the way."""
        live = self._registry.get(request_id)
        if live is not None and live.phase is Phase.WAITING:
            self._registry.spawn_for(live, self._agreement.find(live, is_queued=False))

    def move(self, epoch: int) -> None:
        """What runs under this epoch can go on sooner elsewhere."""
        if (live := self._take_off(epoch, "moved", "preempted, and moved")) is not None:
            live.num_moved += 1
            self._registry.counters.moved += 1

    def evict(self, eviction: session_pb2.Eviction) -> None:
        """It has to make room, which is no move of its own."""
        live = self._running.get(eviction.epoch)
        if live is not None:
            is_own = tenant_of(eviction.request_id) == tenant_of(live.request_id)
            whom = bare(eviction.request_id) if is_own else "a higher class"
            self._take_off(eviction.epoch, "evicted", f"made room for {whom}")

    def _take_off(self, epoch: int, event: str, end: str) -> LiveRequest | None:
        live = self._running.get(epoch)
        if live is not None:
            tokens = live.num_tokens
            log.info(event, request_id=live.request_id, worker_id=live.worker_id, tokens=tokens)
            self._workers.abort(live.worker_id, epoch)
            self._registry.spawn_for(live, self._return(live, end=end))
        return live

    # workers speak

    def account(self, account: session_pb2.Account) -> None:
        """Where the time of a choice went. The progress of the same frame follows."""
        live = self._running.get(account.epoch)
        if live is not None and account.choice in live.at_worker:
            live.journal.account(account)

    def progress(self, worker_id: str, progress: session_pb2.Progress) -> None:
        live = self._running.get(progress.epoch)
        if live is None or progress.choice not in live.at_worker:
            if not progress.stop:
                self._workers.abort(worker_id, progress.epoch, (progress.choice,))
            return
        choice = live.choices[progress.choice]
        offset = len(choice.output)
        if not take(live, choice, progress):
            log.error("tokens missing", request_id=live.request_id, offset=progress.offset)
            self._lost(live, f"worker {worker_id} left out tokens", was_in_step=True)
            return
        self._note(live, choice, progress, len(choice.output) - offset)
        stop = progress.stop
        finish = FinishReason.STOP if choice.output.stopped else _FINISHED_BY.get(stop)
        choice.finish_reason = finish
        if finish and not stop:
            self._workers.abort(worker_id, live.epoch, (choice.index,))
        if finish or stop == session_pb2.STOP_CAUSE_RETURNED:
            self._left(live, choice)
        elif stop:
            self._stopped_short(live, progress)
        if finish or len(choice.output) > offset:
            self.keeping.put(live, choice, offset)

    def _note(
        self, live: LiveRequest, choice: Choice, progress: session_pb2.Progress, num_new: int
    ) -> None:
        """Note what a worker reports beside ``num_new`` new tokens."""
        if live.confirms_first_step and progress.HasField("waited_s"):
            self._workers.confirm(live.worker_id, live.epoch)
        if num_new:
            self._line.served(live.request_id, live.priority, num_new)
        has_news = note(live, choice, progress)
        if has_news or live.journal.awaits_token:
            live.journal.progress(progress)
        if has_news:
            self._registry.counters.preempted += progress.preemptions
            self._registry.counters.recomputed_tokens += progress.recomputed_tokens
            self._tell_residence(live)

    def _tell_residence(self, live: LiveRequest) -> None:
        if live.is_preempted is not live.is_known_preempted:
            live.is_known_preempted = live.is_preempted
            self._line.running(messages.running(live, self._moves_left(live)))

    def _left(self, live: LiveRequest, choice: Choice) -> None:
        """The worker is done with a choice, which is finished or was given back."""
        live.at_worker.discard(choice.index)
        if not live.at_worker:
            self._all_left(live)
        else:
            self._tell_residence(live)

    def _all_left(self, live: LiveRequest) -> None:
        """No worker has anything to do for it."""
        if live.unfinished:
            self._registry.spawn_for(live, self._return(live))
        else:
            self._take_from_worker(live, FINISHED)
            live.phase = Phase.FINISHING
            if (tpot_ratio := live.judge_tpot(now())) is not None:
                self._line.finished(tpot_ratio)
            self._line.withdraw(live.request_id)

    def _stopped_short(self, live: LiveRequest, progress: session_pb2.Progress) -> None:
        """The worker could not begin a choice, or not go on with it: so it is with all."""
        error = from_slug(progress.error_slug, progress.error)
        if isinstance(error, InvalidRequest):
            self.end(live, State.FAILED, error)
        elif progress.stop == session_pb2.STOP_CAUSE_REFUSED:
            self.end(live, State.FAILED, EngineFailed(progress.error))
        else:
            log.warning("engine failed", request_id=live.request_id, cause=progress.error)
            live.avoid = live.worker_id
            cause = f"the engine failed: {progress.error}"
            # The worker goes on, so that all its reports are here.
            self._lost(live, cause, was_in_step=live.has_stepped)

    def _lost(self, live: LiveRequest, cause: str, *, was_in_step: bool) -> None:
        """Queue a request again that is lost at a worker that goes on."""
        self._workers.abort(live.worker_id, live.epoch)
        self._registry.spawn_for(live, self._return(live, loss=cause, was_in_step=was_in_step))

    def _take_from_worker(self, live: LiveRequest, end: str, *, is_lost: bool = False) -> bool:
        """False where none has it."""
        self.look_around(live)
        if self._running.remove(live.epoch) is None:
            return False
        live.journal.left(end, now(), is_lost=is_lost)
        return True

    def look_around(self, live: LiveRequest) -> None:
        """Its journal hears who came to its worker since it did."""
        live.journal.joined(self._running.newcomers(live))

    def worker_up(self) -> None:
        self._worker_wait.worker_up(self._registry)

    def worker_lost(self, worker_id: str) -> None:
        """Everything that ran there goes back into the queue, with its tokens."""
        if not self._workers.is_any_up:
            self._worker_wait.last_worker_lost(self._registry)
        lost = self._running.of(worker_id)
        log.warning("worker lost", worker_id=worker_id, requests=len(lost))
        for live in lost:
            # Without a report, only a worker that had to confirm the step was in none.
            was_in_step = live.has_stepped or not live.confirms_first_step
            loss = f"worker {worker_id} was lost"
            self._registry.spawn_for(live, self._return(live, loss=loss, was_in_step=was_in_step))

    async def _return(
        self,
        live: LiveRequest,
        *,
        loss: str | None = None,
        was_in_step: bool = False,
        end: str = "returned",
        delay_s: float = 0.0,
    ) -> None:
        """Queue a request again with its tokens: it was lost, or its worker returned it."""
        epoch = live.epoch
        if not self._take_from_worker(live, loss or end, is_lost=loss is not None):
            return
        await asyncio.sleep(delay_s)
        await self.keeping.put_all(live)
        if live.runs_under(epoch):
            if loss is not None:
                live.losses.count(live.num_tokens, was_in_step=was_in_step)
            await self._release(live, loss)
        if live.is_over:
            self._line.withdraw(live.request_id)

    async def _release(self, live: LiveRequest, loss: str | None) -> None:
        epoch = live.epoch
        # The ledger counts all losses of the request; which of them are too many is decided here.
        ends = loss is not None and live.losses.are_too_many(self._config)
        max_losses = live.entry.losses + 1 if ends else _NEVER
        entry = await self._registry.move(
            live,
            lambda: self._ledger.release(
                live.request_id,
                epoch,
                loss=loss,
                max_losses=max_losses,
                tally=live.tally,
                explanation=live.packed_explanation(now()),
            ),
        )
        if live.runs_under(epoch):
            self.queue_again(live, entry)

    def queue_again(self, live: LiveRequest, entry: Entry) -> None:
        """If the ledger lets it. Otherwise it is over here."""
        if entry.state is State.QUEUED and entry.gateway == self._registry.router_id:
            live.wait_again(entry, now())
            self.enqueue(live)
        else:
            self._registry.settle_as(live, entry)

    # the ledger speaks

    def _differs(self, live: LiveRequest) -> None:
        self._registry.spawn_for(live, self.agree(live))

    async def agree(self, live: LiveRequest) -> None:
        """The ledger may have the request in another state than we do."""
        await self._agreement.find(live)

    def _fail(self, live: LiveRequest, error: EverliftError) -> None:
        self.end(live, State.FAILED, error)

    # it ends

    def end(self, live: LiveRequest, state: State, error: EverliftError) -> asyncio.Task[Entry]:
        """Ends it before its last token. Who waits for that shields it: it goes on in any case."""
        return self._registry.spawn_for(live, self._ending(live, state, error))

    async def _ending(self, live: LiveRequest, state: State, error: EverliftError) -> Entry:
        is_queued = live.phase is Phase.WAITING
        self.drop(live, error.slug)
        if not live.is_over:
            live.phase = Phase.ENDING
        if is_queued and not self._line.is_quiet:
            await self._leaving.wait(live)
        entry = await self._registry.move(
            live,
            lambda: self._ledger.end(
                live.request_id,
                state,
                error.slug,
                str(error),
                self._registry.router_id,
                live.packed_explanation(now()),
            ),
        )
        self._registry.settle_as(live, entry)
        return entry

    def drop(self, live: LiveRequest, end: str = "given up") -> None:
        """No worker shall have it any more, nor the queue."""
        self._line.withdraw(live.request_id)
        if self._take_from_worker(live, end):
            self._workers.abort(live.worker_id, live.epoch)
