"""Gateway of a simulated cluster: the part of a router that owns its unfinished requests. Pure.

A request has the states of the product (``router.requests.attempts``). There are no clients and no
ledger:

    queued   --dispatched-->  running  --last token-->  finished
      ^                         |
      +- lost, returned, -------+        either  --end-->  failed, expired
         moved or evicted

Each dispatch of a request to a worker is an attempt, whose number is its epoch. Messages about an
attempt that has ended are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from math import inf
from typing import Protocol

from cluster.simulator.foresight import Foresight
from cluster.simulator.frame import Frame
from cluster.simulator.global_queue import GlobalQueue
from cluster.simulator.life import Life
from cluster.simulator.sequence import BlockNames, NamedSequence
from cluster.simulator.summary import Record
from cluster.simulator.timeline import Timeline
from cluster.simulator.workloads.arrivals import Arrival
from everlift.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    EverliftError,
    NoWorker,
    PromptTooLong,
)
from everlift.request_id import qualified
from router.admission.fair_share import ServedOutputs
from router.admission.load_shedding import Refusal
from router.admission.scheduler import Placed
from router.admission.throughput import seen_ratio
from router.config import RouterConfig
from router.ledger.entry import Move, State
from worker.engine.outcome import NO_NEWS, News, Outcome, Residence, Stop


class Workers(Protocol):
    """Connections from the gateway to the workers."""

    @property
    def max_model_lens(self) -> Iterable[int]:
        """Maximum sequence length of each worker, in tokens."""
        ...

    def start(self, worker_id: str, sequence: NamedSequence) -> None: ...

    def abort(self, worker_id: str, epoch: int) -> None: ...


class Gateway:
    def __init__(
        self,
        config: RouterConfig,
        dispatcher: GlobalQueue,
        workers: Workers,
        timeline: Timeline,
        foresight: Foresight,
    ) -> None:
        self._config = config
        #: maximum sequence length, prompt and output, that every worker accepts
        self._max_model_len = 0
        self._dispatcher = dispatcher
        self._workers = workers
        self._timeline = timeline
        self._foresight = foresight
        self._lives: dict[str, Life] = {}
        self._by_epoch: dict[int, Life] = {}
        #: number of completed steps that each worker last reported
        self._steps: dict[str, int] = {}
        self._served = ServedOutputs()
        self._has_worker = False
        #: number of times that a worker became available while there was none
        self._outages = 0
        self.records: list[Record] = []

    @property
    def is_idle(self) -> bool:
        """Return whether every request that has arrived has ended."""
        return not self._lives

    # clients

    def arrive(self, arrival: Arrival) -> None:
        index = len(self.records)
        room = self._max_model_len - arrival.prompt_tokens
        # Traces have no max_tokens, so the assumed one is clamped as by router.clamp_max_tokens.
        if arrival.max_tokens > room > 0:
            arrival = replace(arrival, max_tokens=room)
        record = Record(index, arrival)
        self.records.append(record)
        if room < 1:
            record.refused = PromptTooLong.slug
            return
        name = qualified(arrival.tenant, f"r{index}")
        foretold = self._foresight.foretell(arrival)
        life = Life(record, name, BlockNames(index, arrival), foretold)
        life.estimated_wait_s = self._dispatcher.estimated_wait_s(
            arrival.priority, life.predicted_work
        )
        self._lives[life.request_id] = life
        self._enqueue(life)
        if not life.state.is_final and life.deadline < inf:
            self._timeline.at(life.deadline, self._expire, life)

    def _expire(self, life: Life) -> None:
        if not life.state.is_final:
            self._end(life, State.EXPIRED, DeadlineExceeded())

    def _end(self, life: Life, state: State, error: EverliftError) -> None:
        if life.state is State.RUNNING:
            self._workers.abort(life.worker_id, life.epoch)
            self._leave(life)
        self._dispatcher.withdraw(life.request_id, self._timeline.now)
        life.move(Move.END, state)
        life.record.refused = error.slug
        self._over(life)

    def _over(self, life: Life) -> None:
        life.record.output_tokens = life.num_tokens
        del self._lives[life.request_id]

    # the leader

    def _enqueue(self, life: Life) -> None:
        moves_left = max(0, self._config.max_moves - life.num_moved)
        is_suspect = life.losses.make_suspect(life.num_tokens, self._config)
        waiting = life.waiting(moves_left, is_suspect)
        for refusal in self._dispatcher.enqueue(waiting, self._timeline.now):
            self._refused(refusal)
        if not self._has_worker:
            self._wait_for_worker(life)

    def _refused(self, refusal: Refusal) -> None:
        life = self._lives[refusal.waiting.request_id]
        life.move(Move.END, State.FAILED)
        life.record.refused = refusal.slug
        self._over(life)

    def decide(self) -> None:
        """Carry out the present decisions of the queue.

        Expired requests end, preempted requests that would resume sooner on another worker are
        queued again, and requests are dispatched until the queue places none.
        """
        for refusal in self._dispatcher.expired(self._timeline.now):
            self._refused(refusal)
        for move in self._dispatcher.moves(self._timeline.now):
            if (life := self._take_off(move.running.epoch)) is not None:
                life.num_moved += 1
        while placed := self._dispatcher.place(self._timeline.now):
            for each in placed:
                self._dispatched(each)

    def _dispatched(self, placed: Placed) -> None:
        life = self._lives[placed.waiting.request_id]
        life.record.bypassed += placed.bypassed
        life.predicted_tpot_s = placed.waiting.predicted_tpot_s or life.predicted_tpot_s
        sequence = life.begin(placed.worker_id, placed.epoch, self._timeline.now)
        self._by_epoch[placed.epoch] = life
        self._workers.start(placed.worker_id, sequence)
        for victim in placed.victims:
            self._take_off(victim.epoch)

    def _take_off(self, epoch: int) -> Life | None:
        """Abort the attempt with this epoch, queue its request again, and return the request.

        Return None if the attempt has already ended.
        """
        life = self._by_epoch.get(epoch)
        if life is not None:
            self._workers.abort(life.worker_id, epoch)
            self._return(life)
        return life

    def _return(self, life: Life) -> None:
        self._leave(life)
        life.release()
        self._enqueue(life)

    def _leave(self, life: Life) -> None:
        del self._by_epoch[life.epoch]
        self._count_served(life)

    # workers

    def tell_served(self) -> None:
        """Report to the queue how many output tokens were generated since the last report."""
        for life in self._by_epoch.values():
            self._count_served(life)
        if self._served:
            self._dispatcher.served(self._served.drain(), self._timeline.now)

    def _count_served(self, life: Life) -> None:
        life.drew(self._steps[life.worker_id])
        if number := life.take_served():
            arrival = life.record.arrival
            self._served.add(arrival.tenant, arrival.priority, number)

    def on_message(self, frame: Frame) -> None:
        step = self._steps[frame.worker_id] = frame.load.work.step
        for outcome in frame.outcomes:
            life = self._by_epoch.get(outcome.key.epoch)
            if life is not None:
                self._progress(life, outcome, step)

    def _progress(self, life: Life, outcome: Outcome, step: int) -> None:
        if outcome.tokens:
            if not outcome.offset:
                life.record.first_token = self._timeline.now
            life.drew(step - 1)
            assert outcome.offset == life.num_tokens, "tokens missing or repeated"
        life.said(outcome, step)
        if outcome.news is not NO_NEWS:
            self._note(life, outcome.news)
        if outcome.stop is not None:
            self._stopped(life, outcome.stop, outcome.error)

    def _note(self, life: Life, news: News) -> None:
        record = life.record
        record.preemptions += news.preemptions
        record.recomputed_tokens += news.recomputed_tokens
        if record.attempts == 1:
            record.cached_tokens += news.cached_tokens
        if news.residence is None:
            return
        life.is_preempted = news.residence is Residence.PREEMPTED
        moves_left = max(0, self._config.max_moves - life.num_moved)
        self._dispatcher.running(life.running(moves_left), self._timeline.now)

    def _stopped(self, life: Life, stop: Stop, error: EverliftError | None) -> None:
        if stop is Stop.RETURNED:
            self._return(life)
        elif error is not None:
            self._end(life, State.FAILED, error)
        else:
            self._finish(life)

    def _finish(self, life: Life) -> None:
        self._leave(life)
        now = self._timeline.now
        decode_s = now - life.record.first_token
        ratio = seen_ratio(life.predicted_tpot_s, decode_s, life.num_tokens)
        if ratio is not None:
            self._dispatcher.finished(ratio, now)
        self._dispatcher.withdraw(life.request_id, now)
        life.move(Move.APPEND, State.FINISHED)
        life.record.finished = now
        self._foresight.note(life.num_tokens)
        self._over(life)

    def worker_lost(self, worker_id: str, occupants: Collection[str]) -> None:
        """Queue the requests of a lost worker again; they keep their output tokens.

        Requests that have been lost too often fail. ``occupants`` are the ids of the requests that
        had a slot at the worker; only for these the loss counts as one during a step.
        """
        self._limit()
        for life in [it for it in self._by_epoch.values() if it.worker_id == worker_id]:
            self._leave(life)
            life.losses.count(life.num_tokens, was_in_step=life.request_id in occupants)
            life.release()
            self._queue_again(life)

    def _queue_again(self, life: Life) -> None:
        if life.losses.are_too_many(self._config):
            self._end(life, State.FAILED, AttemptsExhausted())
        else:
            self._enqueue(life)

    def _limit(self) -> None:
        self._max_model_len = min(self._workers.max_model_lens, default=self._max_model_len)

    # timeout while there is no worker, as in ``router.requests.timeouts``

    def worker_up(self) -> None:
        self._limit()
        if not self._has_worker:
            self._has_worker = True
            self._outages += 1

    def last_worker_lost(self) -> None:
        self._has_worker = False
        for life in self._lives.values():
            if life.state is State.QUEUED:
                self._wait_for_worker(life)

    def _wait_for_worker(self, life: Life) -> None:
        self._timeline.after(self._config.worker_wait, self._no_worker_came, life, self._outages)

    def _no_worker_came(self, life: Life, outage: int) -> None:
        if outage == self._outages and life.state is State.QUEUED:
            self._end(life, State.FAILED, NoWorker())
