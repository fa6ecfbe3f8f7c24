"""A request between queue and worker: dispatched, making tokens, lost, given back, finished, ended.

waiting  --dispatched-->  running  --last token-->  finishing  --stored-->  over
   ^                         |
   +--- lost or given back --+         any of them  --end-->  ending  --ledger-->  over
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from everlift import logs
from everlift.errors import DataLoss, EngineFailed, EverliftError
from everlift.messages import FinishReason
from everlift.v1 import session_pb2
from router.config import RouterConfig
from router.gateway.appender import Appender
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
        self._custody.counters.migrated += bool(len(live.output))
        log.info(
            "dispatched",
            request_id=live.request_id,
            worker_id=message.worker_id,
            attempt=message.attempt,
            offset=len(live.output),
        )
        if not self._workers.start(message.worker_id, live.start()):
            live.avoid = message.worker_id
            self._custody.spawn(self._return(live, delay_s=_RETRY_S))

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
        if live is None:
            if not progress.stop:
                self._workers.abort(worker_id, progress.epoch)
            return
        fresh = _fresh(live, progress)
        if fresh is None:
            log.error("tokens missing", request_id=live.request_id, offset=progress.offset)
            self._workers.abort(worker_id, progress.epoch)
            self._custody.spawn(self._return(live, loss=f"worker {worker_id} left out tokens"))
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
            self._custody.spawn(self._return(live))
        elif progress.stop == session_pb2.STOP_CAUSE_REFUSED:
            self.end(live, State.FAILED, EngineFailed(progress.error))
        else:
            log.warning("engine failed", request_id=live.request_id, cause=progress.error)
            self._custody.spawn(self._return(live, loss=f"the engine failed: {progress.error}"))

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
        """Waits until the ledger has every token, also those that it forgot when it came back."""
        if missing := live.output.tokens[live.stored :]:
            self._appender.put(Append(live.request_id, live.epoch, live.stored, tuple(missing)))
        await live.all_stored()

    # the ledger answers

    def _stored(self, append: Append, answer: Appended) -> None:
        self._ledger_away_since = None
        live = self._custody.get(append.request_id)
        if live is None:
            return
        end = append.offset + len(append.tokens)
        if answer is Appended.OK:
            self._custody.counters.output_tokens += end - live.stored
            live.mark_stored(end, now())
            if append.finish_reason:
                self._finished(live)
        elif answer is Appended.FENCED or answer is Appended.ENDED:
            self._custody.spawn(self._follow(live))
        elif answer is Appended.GAP:
            self._custody.spawn(self._assert_again(live))
        else:
            error = DataLoss(f"the ledger answered {answer.value} at offset {append.offset}")
            self.end(live, State.FAILED, error)

    def _finished(self, live: LiveRequest) -> None:
        live.output.finish()
        self._custody.forget(live)
        self._custody.counters.completed += 1
        live.settle(now())
        log.info("finished", request_id=live.request_id, tokens=len(live.output))

    async def _assert_again(self, live: LiveRequest) -> None:
        """The ledger's server came back without its last second: it gets what it had before."""
        entry = await self._custody.ask(live, lambda: self._ledger.get(live.request_id))
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
            live.mark_unledgered(moment)

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


def _fresh(live: LiveRequest, progress: session_pb2.Progress) -> tuple[int, ...] | None:
    """The tokens that are not known yet; None if some before them are missing."""
    known = len(live.output) - progress.offset
    return tuple(progress.token_ids[known:]) if known >= 0 else None
