"""A request between queue and worker: dispatched, making tokens, lost, given back, finished, ended.

waiting  --dispatched-->  running  --last tokens-->  finishing  --stored-->  over
   ^                         |
   +--- lost or given back --+         any of them  --end-->  ending  --ledger-->  over

All its choices go this way together; each comes to its own end while the request is running. What
is given back choice by choice waits for the last of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from everlift import logs
from everlift.errors import DataLoss, EngineFailed, EverliftError, InvalidRequest, from_slug
from everlift.messages import FinishReason
from everlift.v1 import session_pb2
from router.config import RouterConfig
from router.gateway.appender import Appender
from router.gateway.arrival import take
from router.gateway.choice import Choice
from router.gateway.custody import Custody, now
from router.gateway.live import LiveRequest, Phase
from router.ledger.entry import Append, Appended, Entry, State

log = logs.get(__name__)

_FINISHED_BY = {
    session_pb2.STOP_CAUSE_EOS: FinishReason.STOP,
    session_pb2.STOP_CAUSE_LENGTH: FinishReason.LENGTH,
}
#: Before a request that its worker did not get queues again.
_RETRY_S = 0.1
#: To write down more of them for a worker would keep the event loop from all others for too long.
_TOKENS_AT_ONCE = 1 << 16


class Workers(Protocol):
    """The streams to the workers, as far as requests need them."""

    def start(self, worker_id: str, starts: Sequence[session_pb2.Start]) -> bool:
        """False when there is no stream to this worker."""
        ...

    def abort(self, worker_id: str, epoch: int, choices: Sequence[int] = ()) -> None:
        """Of no choices: of all."""
        ...


class Line(Protocol):
    """The line to whoever leads the admission queue."""

    @property
    def queued(self) -> int:
        """Requests that waited in the whole cluster when the leader last said so."""
        ...

    def enqueue(self, waiting: session_pb2.Waiting) -> None: ...

    def withdraw(self, request_id: str) -> None: ...


class Attempts:
    """``adopt`` is called with a request that is this gateway's and not in its custody."""

    def __init__(
        self,
        config: RouterConfig,
        custody: Custody,
        workers: Workers,
        line: Line,
        adopt: Callable[[str], None],
    ) -> None:
        self._config = config
        self._custody = custody
        self._ledger = custody.ledger
        self._workers = workers
        self._line = line
        self._adopt = adopt
        self._by_epoch: dict[int, LiveRequest] = {}
        self._ledger_away_since: float | None = None
        self._appender = Appender(custody.ledger, self._stored, self._away)

    async def run(self) -> None:
        """Carries tokens into the ledger until cancelled."""
        await self._appender.run()

    # the leader speaks

    def dispatched(self, message: session_pb2.Dispatched) -> None:
        """A worker is ours for one of our requests."""
        live = self._custody.get(message.request_id)
        if live is None or live.phase is not Phase.WAITING:
            self._custody.spawn(self._decline(message))
            return
        live.begin(message.epoch, message.worker_id, message.attempt, now())
        self._by_epoch[message.epoch] = live
        self._custody.counters.migrated += bool(live.num_tokens)
        log.info(
            "dispatched",
            request_id=live.request_id,
            worker_id=message.worker_id,
            attempt=message.attempt,
            tokens=live.num_tokens,
        )
        # Ends and tokens that the ledger did not take under an older epoch.
        self._store_rest(live)
        if not live.at_worker:
            self._all_left(live)
        elif not self._start(live, live.unfinished):
            live.avoid = message.worker_id
            self._custody.spawn(self._return(live, delay_s=_RETRY_S))

    def _start(self, live: LiveRequest, choices: Sequence[Choice]) -> bool:
        """Of long ones a part, and the others when the event loop has done what waits. False when
        there is no stream to the worker."""
        longest = len(live.request.prompt_ids) + max(len(choice.output) for choice in choices)
        count = max(1, _TOKENS_AT_ONCE // longest)
        if later := choices[count:]:
            asyncio.get_running_loop().call_soon(self._start_later, live, live.epoch, later)
        starts = [live.start(choice) for choice in choices[:count]]
        return self._workers.start(live.worker_id, starts)

    def _start_later(self, live: LiveRequest, epoch: int, choices: Sequence[Choice]) -> None:
        if self._by_epoch.get(epoch) is live:
            self._start(live, choices)

    async def _decline(self, message: session_pb2.Dispatched) -> None:
        entry = await self._custody.persist(
            lambda: self._ledger.release(
                message.request_id, message.epoch, loss=None, max_losses=self._config.max_losses
            )
        )
        is_ours = entry.state is State.QUEUED and entry.gateway == self._custody.router_id
        if is_ours and self._custody.get(message.request_id) is None:
            self._adopt(message.request_id)

    def stale(self, request_id: str) -> None:
        """The ledger would not let the leader dispatch it: a move of it was lost on the way."""
        live = self._custody.get(request_id)
        if live is not None and live.phase is Phase.WAITING:
            self._custody.spawn(self._follow(live))

    # workers speak

    def progress(self, worker_id: str, progress: session_pb2.Progress) -> None:
        live = self._by_epoch.get(progress.epoch)
        if live is None or progress.choice not in live.at_worker:
            if not progress.stop:
                self._workers.abort(worker_id, progress.epoch, (progress.choice,))
            return
        choice = live.choices[progress.choice]
        offset = len(choice.output)
        if not take(live, choice, progress):
            log.error("tokens missing", request_id=live.request_id, offset=progress.offset)
            self._lost(live, f"worker {worker_id} left out tokens")
            return
        stop = progress.stop
        finish = FinishReason.STOP if choice.output.stopped else _FINISHED_BY.get(stop)
        choice.finish_reason = finish
        if finish or len(choice.output) > offset:
            self._appender.put(live.append(choice, offset))
        if finish and not stop:
            self._workers.abort(worker_id, live.epoch, (choice.index,))
        if finish or stop == session_pb2.STOP_CAUSE_RETURNED:
            self._left(live, choice)
        elif stop:
            self._stopped_short(live, progress)

    def _left(self, live: LiveRequest, choice: Choice) -> None:
        """The worker is done with a choice, which is finished or was given back."""
        live.at_worker.discard(choice.index)
        if not live.at_worker:
            self._all_left(live)

    def _all_left(self, live: LiveRequest) -> None:
        """No worker has anything to do for it."""
        if live.unfinished:
            self._custody.spawn(self._return(live))
        else:
            del self._by_epoch[live.epoch]
            live.phase = Phase.FINISHING

    def _stopped_short(self, live: LiveRequest, progress: session_pb2.Progress) -> None:
        """The worker could not begin a choice, or not go on with it: so it is with all."""
        error = from_slug(progress.error_slug, progress.error)
        if isinstance(error, InvalidRequest):
            self.end(live, State.FAILED, error)
        elif progress.stop == session_pb2.STOP_CAUSE_REFUSED:
            self.end(live, State.FAILED, EngineFailed(progress.error))
        else:
            log.warning("engine failed", request_id=live.request_id, cause=progress.error)
            self._lost(live, f"the engine failed: {progress.error}")

    def _lost(self, live: LiveRequest, cause: str) -> None:
        """The worker lives, but this request is lost there."""
        self._workers.abort(live.worker_id, live.epoch)
        self._custody.spawn(self._return(live, loss=cause))

    def worker_lost(self, worker_id: str) -> None:
        """Everything that ran there goes back into the queue, with its tokens."""
        lost = [live for live in self._by_epoch.values() if live.worker_id == worker_id]
        log.warning("worker lost", worker_id=worker_id, requests=len(lost))
        for live in lost:
            self._custody.spawn(self._return(live, loss=f"worker {worker_id} was lost"))

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
        entry = await self._custody.ask(
            live,
            lambda: self._ledger.release(
                live.request_id, epoch, loss=loss, max_losses=self._config.max_losses
            ),
        )
        if not live.runs_under(epoch):
            return
        if entry.state is State.QUEUED and entry.gateway == self._custody.router_id:
            live.wait_again(now())
            self._line.enqueue(live.waiting())
        else:
            self._custody.settle_as(live, entry)

    async def _store_all(self, live: LiveRequest) -> None:
        """Waits until the ledger has all that came, also what it forgot when it came back."""
        self._store_rest(live)
        await live.all_stored()

    def _store_rest(self, live: LiveRequest) -> None:
        for choice in live.choices:
            if not choice.is_stored:
                self._appender.put(live.append(choice, choice.stored))

    # the ledger answers

    def _stored(self, append: Append, answer: Appended) -> None:
        self._ledger_away_since = None
        live = self._custody.get(append.request_id)
        if live is None:
            return
        if answer is Appended.FINISHED:
            self._finished(live)
        elif answer is Appended.OK:
            self._mark_stored(live, append)
        elif answer is Appended.FENCED or answer is Appended.ENDED:
            self._custody.spawn(self._follow(live))
        elif answer is Appended.GAP:
            self._custody.spawn(self._assert_again(live))
        else:
            error = DataLoss(f"the ledger answered {answer.value} at offset {append.offset}")
            self.end(live, State.FAILED, error)

    def _mark_stored(self, live: LiveRequest, append: Append) -> None:
        choice = live.choices[append.choice]
        end = append.offset + len(append.tokens)
        self._custody.counters.output_tokens += max(0, end - choice.stored)
        live.mark_stored(choice, end, now())
        if not append.finish_reason:
            return
        if all(other.is_complete for other in live.choices if other is not choice):
            # Every end was stored, and yet the request is not finished: one of them was forgotten.
            self._custody.spawn(self._assert_again(live))
        else:
            choice.complete()
            live.wake()

    def _finished(self, live: LiveRequest) -> None:
        unseen = sum(len(choice.output) - choice.stored for choice in live.choices)
        self._custody.counters.output_tokens += unseen
        self._custody.forget(live)
        self._custody.counters.completed += 1
        live.complete(now())
        log.info("finished", request_id=live.request_id, tokens=live.num_tokens)

    async def _assert_again(self, live: LiveRequest) -> None:
        """The ledger's server came back without its last second: it gets what it had before."""
        entry = await self._custody.ask(live, lambda: self._ledger.get(live.request_id))
        if live.is_ending:
            return
        if entry.epoch != live.epoch:
            await self._follow(live)
            return
        tokens = live.num_tokens - sum(entry.num_tokens)
        log.warning("tokens asserted again", request_id=live.request_id, tokens=tokens)
        for choice, stored in zip(live.choices, entry.num_tokens, strict=True):
            if stored < len(choice.output) or choice.finish_reason:
                self._appender.put(live.append(choice, stored))

    async def _follow(self, live: LiveRequest) -> None:
        """The ledger has the request in another state than we do: it is right."""
        me = self._custody.router_id
        async with self._custody.moving.hold(live.request_id):
            entry = await self._custody.ask(live, lambda: self._ledger.get(live.request_id))
            if live.is_ending:
                return
            if (entry.epoch, entry.gateway) == (live.epoch, me):
                return
            self.drop(live)
            if entry.state.is_final or entry.gateway != me:
                self._custody.settle_as(live, entry)
                return
            await self._custody.ask(
                live,
                lambda: self._ledger.take_over(
                    live.request_id, self._custody.router_id, self._custody.router_id
                ),
            )
            if not live.is_ending:
                live.wait_again(now())
                self._line.enqueue(live.waiting())

    def _away(self, append: Append) -> None:
        moment = now()
        if self._ledger_away_since is None:
            self._ledger_away_since = moment
        live = self._custody.get(append.request_id)
        if live is not None and moment - self._ledger_away_since < self._config.unledgered:
            live.mark_unledgered(live.choices[append.choice], moment)

    # it ends

    def end(self, live: LiveRequest, state: State, error: EverliftError) -> asyncio.Task[Entry]:
        """Ends it before its last token. Who waits for that shields it: it goes on in any case."""
        return self._custody.spawn(self._ending(live, state, error))

    async def _ending(self, live: LiveRequest, state: State, error: EverliftError) -> Entry:
        if live.phase is Phase.WAITING:
            self._line.withdraw(live.request_id)
        self.drop(live)
        if not live.is_over:
            live.phase = Phase.ENDING
        entry = await self._custody.ask(
            live,
            lambda: self._ledger.end(
                live.request_id, state, error.slug, str(error), self._custody.router_id
            ),
        )
        self._custody.settle_as(live, entry)
        return entry

    def drop(self, live: LiveRequest) -> None:
        """No worker shall have it any more."""
        if self._by_epoch.pop(live.epoch, None) is not None:
            self._workers.abort(live.worker_id, live.epoch)
