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

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from math import inf
from typing import Protocol

from cluster.simulator.frame import Frame
from cluster.simulator.global_queue import GlobalQueue
from cluster.simulator.length_predictor import LengthPredictor
from cluster.simulator.sequence import BlockNames, NamedSequence
from cluster.simulator.simulated_request import SimulatedRequest
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
from everlift.request_id import qualify
from router.admission.fair_share import ServedOutputs
from router.admission.load_shedding import Refusal
from router.admission.model_queue import Placed
from router.admission.throughput import measured_tpot_ratio
from router.config import RouterConfig
from router.ledger.entry import Move, State
from worker.engine.outcome import NO_UPDATE, Outcome, Residence, SequenceUpdate, Stop


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
        length_predictor: LengthPredictor,
        on_end: Callable[[Record], None],
    ) -> None:
        self._config = config
        #: maximum sequence length, prompt and output, that every worker accepts
        self._max_model_len = 0
        self._dispatcher = dispatcher
        self._workers = workers
        self._timeline = timeline
        self._length_predictor = length_predictor
        #: called with the record of each request that ends
        self._on_end = on_end
        self._requests: dict[str, SimulatedRequest] = {}
        self._by_epoch: dict[int, SimulatedRequest] = {}
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
        return not self._requests

    # clients

    def arrive(self, arrival: Arrival) -> None:
        index = len(self.records)
        available = self._max_model_len - arrival.prompt_tokens
        # Traces have no max_tokens, so the assumed one is clamped as by router.clamp_max_tokens.
        if arrival.max_tokens > available > 0:
            arrival = replace(arrival, max_tokens=available)
        record = Record(index, arrival)
        self.records.append(record)
        if available < 1:
            record.refused = PromptTooLong.slug
            return
        name = qualify(arrival.tenant, f"r{index}")
        prediction = self._length_predictor.predict(arrival)
        request = SimulatedRequest(record, name, BlockNames(index, arrival), prediction)
        if self._config.locality:
            request.chunks = request.names.chunks(arrival.prompt_tokens)
            request.num_cached = self._dispatcher.most_cached(request.chunks, arrival.prompt_tokens)
        request.estimated_wait_s = self._dispatcher.estimated_wait_s(
            arrival.priority, request.predicted_work
        )
        self._requests[request.request_id] = request
        self._enqueue(request)
        if not request.state.is_final and request.deadline < inf:
            self._timeline.at(request.deadline, self._expire, request)

    def _expire(self, request: SimulatedRequest) -> None:
        if not request.state.is_final:
            self._end(request, State.EXPIRED, DeadlineExceeded())

    def _end(self, request: SimulatedRequest, state: State, error: EverliftError) -> None:
        if request.state is State.RUNNING:
            self._workers.abort(request.worker_id, request.epoch)
            self._close_attempt(request)
        self._dispatcher.withdraw(request.request_id, self._timeline.now)
        request.move(Move.END, state)
        request.record.refused = error.slug
        self._remove(request)

    def _remove(self, request: SimulatedRequest) -> None:
        request.record.output_tokens = request.num_tokens
        if request.num_tokens and (session := request.record.arrival.session):
            self._dispatcher.session_output(session, request.num_tokens, self._timeline.now)
        del self._requests[request.request_id]
        self._on_end(request.record)

    # the leader

    def _enqueue(self, request: SimulatedRequest) -> None:
        moves_left = max(0, self._config.max_moves - request.num_moved)
        is_suspect = request.losses.is_suspect(request.num_tokens, self._config)
        waiting = request.waiting(moves_left, is_suspect)
        for refusal in self._dispatcher.enqueue(waiting, self._timeline.now):
            self._on_refused(refusal)
        if not self._has_worker:
            self._wait_for_worker(request)

    def _on_refused(self, refusal: Refusal) -> None:
        request = self._requests[refusal.waiting.request_id]
        request.move(Move.END, State.FAILED)
        request.record.refused = refusal.slug
        self._remove(request)

    def decide(self) -> None:
        """Carry out the present decisions of the queue.

        Expired requests end, preempted requests that would resume sooner on another worker are
        queued again, and requests are dispatched until the queue places none.
        """
        for refusal in self._dispatcher.expired(self._timeline.now):
            self._on_refused(refusal)
        for move in self._dispatcher.moves(self._timeline.now):
            if (request := self._abort_and_requeue(move.running.epoch)) is not None:
                request.num_moved += 1
        while placed := self._dispatcher.place(self._timeline.now):
            for each in placed:
                self._on_dispatched(each)

    def _on_dispatched(self, placed: Placed) -> None:
        request = self._requests[placed.waiting.request_id]
        request.record.bypassed += placed.bypassed
        request.predicted_tpot_s = placed.waiting.predicted_tpot_s or request.predicted_tpot_s
        now = self._timeline.now
        sequence = request.dispatch(placed.worker_id, placed.epoch, placed.cached_tokens, now)
        self._by_epoch[placed.epoch] = request
        self._workers.start(placed.worker_id, sequence)
        for victim in placed.victims:
            self._abort_and_requeue(victim.epoch)

    def _abort_and_requeue(self, epoch: int) -> SimulatedRequest | None:
        """Abort the attempt with this epoch, queue its request again, and return the request.

        Return None if the attempt has already ended.
        """
        request = self._by_epoch.get(epoch)
        if request is not None:
            self._workers.abort(request.worker_id, epoch)
            self._requeue(request)
        return request

    def _requeue(self, request: SimulatedRequest) -> None:
        self._close_attempt(request)
        request.release()
        self._enqueue(request)

    def _close_attempt(self, request: SimulatedRequest) -> None:
        del self._by_epoch[request.epoch]
        self._count_served(request)

    # workers

    def report_served(self) -> None:
        """Report to the queue how many output tokens were generated since the last report."""
        for request in self._by_epoch.values():
            self._count_served(request)
        if self._served:
            self._dispatcher.served(self._served.drain(), self._timeline.now)

    def _count_served(self, request: SimulatedRequest) -> None:
        request.count_sampled(self._steps[request.worker_id])
        if number := request.take_served():
            arrival = request.record.arrival
            self._served.add("", arrival.tenant, arrival.priority, number)

    def on_message(self, frame: Frame) -> None:
        step = self._steps[frame.worker_id] = frame.load.work.step
        for outcome in frame.outcomes:
            request = self._by_epoch.get(outcome.key.epoch)
            if request is not None:
                self._progress(request, outcome, step)
                if frame.may_defer:
                    request.samples_since = None

    def _progress(self, request: SimulatedRequest, outcome: Outcome, step: int) -> None:
        if outcome.tokens:
            if not outcome.offset:
                request.record.first_token = self._timeline.now
            request.count_sampled(step - 1)
            assert outcome.offset == request.num_tokens, "tokens missing or repeated"
        request.apply_outcome(outcome, step)
        if outcome.update is not NO_UPDATE:
            self._apply_update(request, outcome.update)
        if outcome.stop is not None:
            self._on_stop(request, outcome.stop, outcome.error)

    def _apply_update(self, request: SimulatedRequest, update: SequenceUpdate) -> None:
        record = request.record
        record.preemptions += update.preemptions
        record.recomputed_tokens += update.recomputed_tokens
        if record.attempts == 1:
            record.cached_tokens += update.cached_tokens
        if update.residence is None:
            return
        request.is_preempted = update.residence is Residence.PREEMPTED
        moves_left = max(0, self._config.max_moves - request.num_moved)
        self._dispatcher.running(request.running(moves_left), self._timeline.now)

    def _on_stop(self, request: SimulatedRequest, stop: Stop, error: EverliftError | None) -> None:
        if stop is Stop.RETURNED:
            self._requeue(request)
        elif error is not None:
            self._end(request, State.FAILED, error)
        else:
            self._finish(request)

    def _finish(self, request: SimulatedRequest) -> None:
        self._close_attempt(request)
        now = self._timeline.now
        decode_s = now - request.record.first_token
        ratio = measured_tpot_ratio(request.predicted_tpot_s, decode_s, request.num_tokens)
        if ratio is not None:
            self._dispatcher.finished(ratio, now)
        self._dispatcher.withdraw(request.request_id, now)
        request.move(Move.APPEND, State.FINISHED)
        request.record.finished = now
        self._length_predictor.note(request.num_tokens)
        self._remove(request)

    def worker_lost(self, worker_id: str, occupants: Collection[str]) -> None:
        """Queue the requests of a lost worker again; they keep their output tokens.

        Requests that have been lost too often fail. ``occupants`` are the ids of the requests that
        had a slot at the worker. Only these count as lost in an engine step, for which the limit
        is ``max_losses``; the limit for all losses is ``max_losses_total``.
        """
        self._update_max_model_len()
        for request in [it for it in self._by_epoch.values() if it.worker_id == worker_id]:
            self._close_attempt(request)
            request.losses.count(request.num_tokens, was_in_step=request.request_id in occupants)
            request.release()
            self._requeue_or_fail(request)

    def _requeue_or_fail(self, request: SimulatedRequest) -> None:
        if request.losses.are_too_many(self._config):
            self._end(request, State.FAILED, AttemptsExhausted())
        else:
            self._enqueue(request)

    def _update_max_model_len(self) -> None:
        self._max_model_len = min(self._workers.max_model_lens, default=self._max_model_len)

    # timeout while there is no worker, as in ``router.requests.timeouts``

    def worker_up(self) -> None:
        self._update_max_model_len()
        if not self._has_worker:
            self._has_worker = True
            self._outages += 1

    def last_worker_lost(self) -> None:
        self._has_worker = False
        for request in self._requests.values():
            if request.state is State.QUEUED:
                self._wait_for_worker(request)

    def _wait_for_worker(self, request: SimulatedRequest) -> None:
        self._timeline.after(
            self._config.worker_wait, self._on_worker_timeout, request, self._outages
        )

    def _on_worker_timeout(self, request: SimulatedRequest, outage: int) -> None:
        if outage == self._outages and request.state is State.QUEUED:
            self._end(request, State.FAILED, NoWorker())
