"""State of a request from its arrival to its end, as its router knows it. Pure.

``router.ledger.entry`` defines the states, and the transitions between them (moves).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from cluster.simulator.global_queue import GATEWAY
from cluster.simulator.length_predictor import LengthPrediction
from cluster.simulator.sequence import BlockNames, NamedSequence
from cluster.simulator.summary import Record
from router.admission.request import QueueKey, Running, Waiting
from router.ledger.entry import Move, State
from router.requests.losses import Losses
from worker.engine.outcome import Outcome


@dataclass(slots=True)
class SimulatedRequest:
    record: Record
    request_id: str
    names: BlockNames
    prediction: LengthPrediction
    #: ids of the chunks of the prompt; empty without locality
    chunks: Sequence[int] = ()
    #: prompt tokens that some worker had cached when the request arrived
    num_cached: int = 0
    #: queue wait in seconds, as estimated when the request arrived
    estimated_wait_s: float = 0.0
    #: seconds per output token after the first one, as predicted by the leader
    predicted_tpot_s: float | None = None
    state: State = State.QUEUED
    worker_id: str = ""
    epoch: int = 0
    #: number of output tokens up to step ``samples_since`` of the worker; if ``samples_since`` is
    #: not None, each later step adds one token
    num_tokens: int = 0
    samples_since: int | None = None
    #: number of output tokens reported to the leader as served
    num_served: int = 0
    #: number of known tokens that any worker has computed
    num_computed: int = 0
    #: whether the leader has dispatched the request before
    accepted: bool = False
    is_preempted: bool = False
    num_moved: int = 0
    losses: Losses = field(default_factory=Losses)

    def move(self, move: Move, state: State) -> None:
        assert self.state in move.sources and state in move.targets, f"{self.state} {move}"
        self.state = state

    @property
    def known_tokens(self) -> int:
        return self.record.arrival.prompt_tokens + self.num_tokens

    @property
    def deadline(self) -> float:
        return self.record.arrival.at + self.record.arrival.deadline_s

    @property
    def ttft_deadline(self) -> float:
        arrival = self.record.arrival
        return inf if self.num_tokens else arrival.at + arrival.ttft_target_s

    def dispatch(self, worker_id: str, epoch: int, num_cached: int, now: float) -> NamedSequence:
        """Record the dispatch to a worker, and return the sequence that the worker is to start.

        ``epoch`` is the number of the attempt. ``num_cached`` tokens are expected in the worker's
        prefix cache.
        """
        self.move(Move.DISPATCH, State.RUNNING)
        self.worker_id, self.epoch = worker_id, epoch
        self.accepted, self.is_preempted = True, False
        record = self.record
        record.dispatched = min(record.dispatched, now)
        record.worker = worker_id
        record.attempts += 1
        record.migrations += bool(self.num_tokens)
        computed = max(self.num_computed, self.known_tokens - 1 if self.num_tokens else 0)
        return NamedSequence.create(
            epoch,
            self.request_id,
            record.arrival,
            self.names,
            self.predicted_output,
            self.num_tokens,
            computed,
            num_cached,
        )

    def apply_outcome(self, outcome: Outcome, step: int) -> None:
        """Apply the result of a step for this request, which the worker reported as ``outcome``.

        ``step`` is the number of the worker's step.
        """
        self.num_tokens = outcome.offset + len(outcome.tokens)
        self.num_computed = max(self.num_computed, outcome.num_computed)
        self.samples_since = step if outcome.tokens and outcome.stop is None else None

    def count_sampled(self, step: int) -> None:
        """Add one output token per worker step not yet counted, up to and including ``step``.

        A request for which the worker does not sample a token in every step remains unchanged.
        """
        if self.samples_since is not None:
            self.num_tokens += step - self.samples_since
            self.samples_since = step

    def take_served(self) -> int:
        """Return the number of output tokens that were added since the last call."""
        number, self.num_served = self.num_tokens - self.num_served, self.num_tokens
        return number

    def release(self) -> None:
        """Set the request to QUEUED, because its worker was lost or returned it.

        This ends the attempt and keeps the output tokens. The caller adds the request to the queue.
        """
        self.move(Move.RELEASE, State.QUEUED)
        self.worker_id, self.epoch, self.samples_since = "", 0, None

    # reports to the leader, and the worker's sequence

    @property
    def predicted_output(self) -> int:
        """Predicted number of output tokens of the whole request."""
        return self.prediction.length.expected_remaining(0, self.record.arrival.max_tokens)

    @property
    def predicted_work(self) -> int:
        """Sum of the uncached prompt tokens and the predicted output tokens."""
        return self.record.arrival.prompt_tokens - self.num_cached + self.predicted_output

    @property
    def queue_key(self) -> QueueKey:
        return QueueKey(
            0 if self.prediction.is_distrusted else self.predicted_work,
            self.prediction.rank,
            self.prediction.work_rank,
            self.estimated_wait_s,
        )

    def waiting(self, moves_left: int, is_suspect: bool) -> Waiting:
        arrival = self.record.arrival
        return Waiting(
            request_id=self.request_id,
            gateway=GATEWAY,
            arrived=arrival.at,
            prefill_tokens=self.known_tokens,
            max_tokens=max(1, arrival.max_tokens - self.num_tokens),
            priority=arrival.priority,
            deadline=self.deadline,
            ttft_deadline=self.ttft_deadline,
            moves_left=moves_left,
            is_suspect=is_suspect,
            predicted_tokens=self.prediction.length.expected_remaining(
                self.num_tokens, arrival.max_tokens
            ),
            queue_key=self.queue_key,
            accepted=self.accepted,
            has_run=self.record.attempts > 0,
            least_tokens=self.prediction.least_tokens,
            chunks=tuple(self.chunks),
            cached_tokens=self.num_cached,
            session=arrival.session,
        )

    def running(self, moves_left: int) -> Running:
        arrival = self.record.arrival
        return Running(
            request_id=self.request_id,
            gateway=GATEWAY,
            worker_id=self.worker_id,
            epoch=self.epoch,
            priority=arrival.priority,
            known_tokens=self.known_tokens,
            arrived=arrival.at,
            moves_left=moves_left,
            is_preempted=self.is_preempted,
            due=min(self.deadline, self.ttft_deadline),
            queue_key=self.queue_key,
        )
