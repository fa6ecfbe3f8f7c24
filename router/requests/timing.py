"""Times of a request in its router, from its call to its end. Pure.

    call --> tokenised --> in the ledger --> in the queue
                                                  |
    dispatched --waits at its worker--> first step --> first token --> last token --> left
        ^                                         |--- preempted, resumed ---|          |
        +--------------- in the queue again <------------- lost, or returned -----------+
                                                                                        |
    delivered <-- end in the ledger <---------------------------------------------------+

Each moment is recorded once, so the spans between the moments always add up to the whole. A report
of the leader or the worker divides the span in which it arrives. The part of the span that the
report does not cover is the time of the messages in both directions. Times are in seconds
of the router's clock.

Only the first token of an attempt has its time recorded. The number of tokens is read from the
outputs, and the time of the worker's last message from the worker's stream. At "left", the sequence
has left the worker's batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Sized
from copy import copy
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from typing import NamedTuple, Protocol, TypeAlias

from everlift.messages import FinishReason
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.admission.throughput import measured_tpot_ratio
from router.ledger.entry import MAX_EVENTS
from router.requests.observer import NO_OBSERVER, ClassObserver


class UnreadTime:
    """Total time in seconds during which the client had unread tokens of at least one choice."""

    def __init__(self, earlier_s: float = 0.0) -> None:
        """Start from the ``earlier_s`` seconds that the request's previous router recorded."""
        self._seconds = earlier_s
        #: time up to which unread time is already counted in ``_seconds``
        self._counted = -inf
        #: indices of the choices with unread tokens, and the time since which there are any
        self._choices: set[int] = set()
        self._since = inf

    def mark_unread(self, index: int, since: float) -> None:
        """Record that the choice ``index`` has had unread tokens since the time ``since``."""
        self._choices.add(index)
        self._since = min(self._since, max(since, self._counted))

    def mark_caught_up(self, index: int, now: float) -> None:
        """Record that the client has read all tokens of the choice ``index``."""
        self._choices.discard(index)
        if not self._choices:
            self._seconds += max(0.0, now - self._since)
            self._counted, self._since = now, inf

    def seconds_until(self, now: float) -> float:
        """Return the seconds, up to ``now``, in which the client had unread tokens."""
        return self._seconds + max(0.0, now - self._since)


#: Part of an interval of time: the kind of span that it belongs to, and its length in seconds.
Share: TypeAlias = tuple[pb.SpanKind.ValueType, float]


def queue_shares(queue_wait: session_pb2.QueueWait) -> list[Share]:
    prefix_s = queue_wait.prefix.seconds
    return [
        (pb.SPAN_KIND_NO_WORKER, queue_wait.no_worker_s),
        (pb.SPAN_KIND_QUEUE, max(0.0, queue_wait.seconds - queue_wait.no_worker_s - prefix_s)),
        (pb.SPAN_KIND_PREFIX_WAIT, prefix_s),
        (pb.SPAN_KIND_LEDGER, queue_wait.dispatch_s),
    ]


def worker_shares(breakdown: session_pb2.TimeBreakdown) -> list[Share]:
    interference_s = (
        breakdown.prefill_interference_s
        + breakdown.decode_interference_s
        + breakdown.not_scheduled_s
    )
    return [
        (pb.SPAN_KIND_WORKER_WAIT, breakdown.waiting_s),
        (pb.SPAN_KIND_PREFILL, breakdown.prefill_s),
        (pb.SPAN_KIND_DECODE, breakdown.decode_s),
        (pb.SPAN_KIND_INTERFERENCE, interference_s),
        (pb.SPAN_KIND_PREEMPTED, breakdown.preempted_s),
        (pb.SPAN_KIND_RECOMPUTE, breakdown.recompute_s),
        (pb.SPAN_KIND_OTHER, breakdown.between_steps_s),
    ]


#: Maximum number of pauses that are kept of an attempt.
_MAX_PAUSES = 32


_NO_BREAKDOWN = session_pb2.TimeBreakdown()


class WorkerConnection(Protocol):
    """Connection to a worker.

    ``last_message_at`` is the arrival time of the worker's last message. ``decoding`` is the
    cumulative time breakdown that the worker last reported. The breakdown sums, over all steps
    since the worker's start, the average times of the sequences that decoded in the step.
    ``arithmetic`` is the name of the worker's numerical arithmetic (``WorkerInfo.arithmetic``). The
    name is empty if results depend on the batch, and None if the worker is unknown.
    """

    @property
    def last_message_at(self) -> float: ...

    @property
    def decoding(self) -> session_pb2.TimeBreakdown: ...

    @property
    def arithmetic(self) -> str | None: ...


class NoConnection:
    """Connection to a worker that cannot be reached and has never sent a message."""

    last_message_at = -inf
    decoding = _NO_BREAKDOWN
    arithmetic = None


NO_CONNECTION = NoConnection()


@dataclass(slots=True)
class Pause:
    """Pause of a preempted choice, which has no KV blocks; ``until`` is None while it lasts.

    ``choice`` is the index of the choice.
    """

    choice: int
    since: float
    until: float | None = None


@dataclass(slots=True)
class Attempt:
    """Attempt to execute a request at a worker; ``number`` counts the request's attempts from 1.

    None stands for an event that was not observed or has not happened. Values that grow with each
    token or message are as of the last ``update``.
    """

    number: int
    dispatched: float
    worker_id: str = ""
    #: tokens of the prompt and of the outputs at the dispatch
    known_tokens: int = 0
    #: requests of the same tenant that the worker had at the dispatch
    neighbours: tuple[str, ...] = ()
    #: requests of the same tenant that other workers had at the dispatch; empty if the request did
    #: not wait for capacity
    occupants: tuple[str, ...] = ()
    #: requests of the same tenant that the worker received since the dispatch
    newcomers: tuple[str, ...] = ()
    queue: pb.QueueBypass | None = None
    prefix_wait: pb.PrefixWait | None = None
    #: known tokens that were expected in the worker's KV cache at the dispatch
    expected_cached_tokens: int = 0
    #: connection to the worker; None after the end of the attempt
    worker: WorkerConnection | None = None
    #: the request's outputs by choice, and their number of tokens at the dispatch
    outputs: Sequence[Sized] = ()
    tokens_before: int = 0
    #: seconds until the first step that computed something of the request, by the worker's clock
    waited_s: float | None = None
    #: known tokens that this first step found in the KV cache
    cached_tokens: int = 0
    #: part of ``waited_s`` in which the adapter was not loaded
    adapter_s: float = 0.0
    #: known tokens that are computed or cached, as last reported during the prefill
    prefilled_tokens: int = 0
    first_token: float | None = None
    new_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    pauses: list[Pause] = field(default_factory=list)
    #: choices that have no KV blocks
    preempted: set[int] = field(default_factory=set)
    #: the worker's last breakdown, which is for one choice, and the time at which it arrived
    breakdown: session_pb2.TimeBreakdown | None = None
    breakdown_at: float | None = None
    #: the worker's cumulative breakdown (``WorkerConnection.decoding``) when ``breakdown`` arrived,
    #: and its increase since then
    _decoding: session_pb2.TimeBreakdown = field(default_factory=lambda: _NO_BREAKDOWN)
    decoding_since: session_pb2.TimeBreakdown = field(default_factory=lambda: _NO_BREAKDOWN)
    #: whether the worker has reported anything on the attempt
    has_report: bool = False
    #: time of the worker's last message, if it has reported anything on the attempt
    last_message_at: float | None = None
    #: how the attempt ended; empty while it continues
    end: str = ""

    @property
    def open_kind(self) -> pb.SpanKind.ValueType:
        """Return the kind of span that the request is in, according to the worker's reports.

        Time after the worker's last breakdown that ``shares`` does not cover is of this kind.
        """
        if self._is_preempted:
            return pb.SPAN_KIND_PREEMPTED
        if self.new_tokens:
            return pb.SPAN_KIND_DECODE
        # After the first step and before the first token, the prompt is computed.
        return pb.SPAN_KIND_OTHER if self.waited_s is None else pb.SPAN_KIND_PREFILL

    @property
    def _is_preempted(self) -> bool:
        return (0 if self.breakdown is None else self.breakdown.choice) in self.preempted

    @property
    def shares(self) -> list[Share]:
        """Return the seconds of each kind of span since the worker's last breakdown.

        The seconds are averages over the sequences that decoded at the worker in this time, because
        the worker reports no breakdown for this request alone. Their sum can differ from the time
        that they describe, and is 0 before the first token.
        """
        return worker_shares(self.decoding_since)

    @property
    def steps(self) -> int:
        return self.decoding_since.steps + (
            self.breakdown.steps if self.breakdown is not None else 0
        )

    @property
    def last_token(self) -> float | None:
        """Return the estimated time of the last token, or None before the first one.

        The time is the start of the last pause as long as that pause lasts, and otherwise the time
        of the worker's last message.
        """
        if self.first_token is None:
            return None
        pause = self.pauses[-1] if self.pauses else None
        return pause.since if pause is not None and pause.until is None else self.last_message_at

    # reports of the worker

    def update(self) -> None:
        """Read the number of new tokens from the outputs, and the times from ``worker``.

        Do nothing after the end of the attempt.
        """
        if self.worker is None:
            return
        self.new_tokens = sum(map(len, self.outputs)) - self.tokens_before
        if not self.has_report:
            return
        self.last_message_at = self.worker.last_message_at
        if self.first_token is None or self.breakdown_at is None or self._is_preempted:
            return
        if self.last_message_at > self.breakdown_at:
            self.decoding_since = _increase(self._decoding, self.worker.decoding)

    def close(self, end: str) -> None:
        self.worker, self.outputs, self.end = None, (), end

    def add_breakdown(self, breakdown: session_pb2.TimeBreakdown) -> None:
        """Record the worker's latest time breakdown, which replaces the previous one.

        The attempt must not have ended.
        """
        assert self.worker is not None
        self.has_report, self.breakdown_at = True, self.worker.last_message_at
        # A reference to the breakdown would keep the worker's whole frame in memory, so copy it.
        self.breakdown = session_pb2.TimeBreakdown()
        self.breakdown.CopyFrom(breakdown)
        self._decoding, self.decoding_since = self.worker.decoding, _NO_BREAKDOWN

    def progress(self, message: session_pb2.Progress) -> None:
        """Record a worker's progress report, except for its tokens, which the outputs have."""
        self.has_report = True
        self.update()
        if self.new_tokens and self.first_token is None:
            self.first_token = self.last_message_at
        if self.waited_s is None and message.HasField("waited_s"):
            self.waited_s, self.cached_tokens = message.waited_s, message.cached_tokens
            self.adapter_s = message.adapter_s
        self.prefilled_tokens = message.prefilled_tokens or self.prefilled_tokens
        self.preemptions += message.preemptions
        self.recomputed_tokens += message.recomputed_tokens
        if message.residence == session_pb2.RESIDENCE_PREEMPTED:
            self._pause(message.choice)
        elif message.residence == session_pb2.RESIDENCE_RESUMED:
            self._resume(message.choice)

    def _pause(self, choice: int) -> None:
        assert self.last_message_at is not None
        self.preempted.add(choice)
        if len(self.pauses) < _MAX_PAUSES:
            self.pauses.append(Pause(choice, self.last_message_at))

    def _resume(self, choice: int) -> None:
        self.preempted.discard(choice)
        for pause in self.pauses:
            if pause.choice == choice and pause.until is None:
                pause.until = self.last_message_at


def _increase(
    then: session_pb2.TimeBreakdown, now: session_pb2.TimeBreakdown
) -> session_pb2.TimeBreakdown:
    return session_pb2.TimeBreakdown(
        prefill_interference_s=now.prefill_interference_s - then.prefill_interference_s,
        decode_s=now.decode_s - then.decode_s,
        decode_interference_s=now.decode_interference_s - then.decode_interference_s,
        between_steps_s=now.between_steps_s - then.between_steps_s,
        steps=max(0, now.steps - then.steps),
    )


#: Number of last attempts whose spans are kept one by one. Those of earlier attempts are summed.
MAX_DETAILED_ATTEMPTS = 8
#: ``end`` of an attempt that generated the request's last token.
FINISHED = "finished"

#: A queue wait of at most this many seconds does not count as a wait for capacity, because even an
#: empty queue takes that long.
_NEGLIGIBLE_WAIT_S = 1e-3
#: Kinds of the last spans of a request, in this order.
_AFTER_LAST_TOKEN = (pb.SPAN_KIND_LEDGER, pb.SPAN_KIND_CLIENT)


class Span(NamedTuple):
    kind: pb.SpanKind.ValueType
    seconds: float
    attempt: int = 0


class Journal:
    """Times of a request, as consecutive spans from its call at ``called_at`` on."""

    def __init__(self, called_at: float) -> None:
        self.called_at = called_at
        #: seconds from the call until the request was in the ledger; None if another router
        #: accepted it
        self.accept_s: float | None = None
        #: seconds from the storing of the request in the ledger until its first token was readable
        self.readable_s: float | None = None
        #: seconds from the call until the first token was readable
        self.ttft_s: float | None = None
        #: part of ``ttft_s`` between the arrival of the first token at this router and the storing
        #: of that token in the ledger
        self.ledger_s: float | None = None
        self.unread = UnreadTime()
        #: number of later requests that left the queue before this one
        self.bypassed = 0
        #: the request's outputs, by choice
        self.outputs: Sequence[Sized] = ()
        #: whether a worker has the request and the attempt's first token has not arrived
        self.awaits_token = False
        #: attempts that previous routers recorded
        self.earlier_attempts: tuple[pb.ExplainedAttempt, ...] = ()
        #: number of attempts before ``earlier_attempts``; only the sums of their spans are known
        self.earlier_dropped = 0
        self._attempts: deque[Attempt] = deque(maxlen=MAX_EVENTS)
        self._spans: list[Span] = []
        #: seconds of the attempts whose spans were dropped, by kind
        self._dropped_s: dict[pb.SpanKind.ValueType, float] = {}
        self._first_token: float | None = None
        self._num_dispatched = 0
        self._is_delivered = False
        #: end of the last span
        self._until = called_at
        #: kind of the span that begins at ``_until``; unspecified after the request's end
        self._open_kind: pb.SpanKind.ValueType = pb.SPAN_KIND_RECEIVE
        self._is_at_worker = False
        #: number of the attempt to which the next span belongs, and number of the last attempt
        self._number = self._last_attempt = 0

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts)

    @property
    def is_open(self) -> bool:
        return self._open_kind != pb.SPAN_KIND_UNSPECIFIED

    # results

    @property
    def total_s(self) -> float:
        """Return the seconds from the call to the last event, which is the sum of the spans."""
        return self._until - self.called_at

    @property
    def unread_s(self) -> float:
        """Return the seconds of ``total_s`` in which a client had unread tokens."""
        return min(self.total_s, self.unread.seconds_until(self._until))

    @property
    def is_delivered(self) -> bool:
        """Return whether a client has read everything."""
        return self._is_delivered

    @property
    def after_last_token_s(self) -> float:
        """Return the seconds from the last token until the end was stored and delivered."""
        last = self._spans[-len(_AFTER_LAST_TOKEN) :]
        return sum(span.seconds for span in last if span.kind in _AFTER_LAST_TOKEN)

    @property
    def last_event_at(self) -> float:
        """Return the time of the last event or of the worker's last message, if that is later."""
        if not self._is_at_worker:
            return self._until
        attempt = self._attempts[-1]
        attempt.update()
        return (
            self._until
            if attempt.last_message_at is None
            else max(self._until, attempt.last_message_at)
        )

    @property
    def spans(self) -> list[Span]:
        """Return the spans in order, up to the last event.

        Spans of attempts that are too old to be kept in detail (``num_dropped``) are replaced by
        one span for each kind, with the sum of their seconds. These sums follow the spans before
        the first attempt.
        """
        first = list(takewhile(lambda span: not span.attempt, self._spans))
        early = (Span(kind, seconds) for kind, seconds in sorted(self._dropped_s.items()))
        return [*first, *early, *self._spans[len(first) :]]

    @property
    def detailed_attempts(self) -> list[Attempt]:
        """Return the last ``MAX_DETAILED_ATTEMPTS`` attempts, whose spans are kept one by one."""
        return list(self._attempts)[-MAX_DETAILED_ATTEMPTS:]

    @property
    def num_dropped(self) -> int:
        """Return the number of attempts older than the detailed ones; their spans are summed."""
        return self.earlier_dropped + max(0, self._num_dispatched - MAX_DETAILED_ATTEMPTS)

    def snapshot(self, now: float, *, is_read: bool = False) -> Journal:
        """Return a copy of this journal with the times up to ``now``.

        Before the request's end, the copy's last span ends at ``now``. After the end, a span of the
        delivery is added if a client still reads (``is_read``). If there is nothing to add, return
        this journal instead of a copy.
        """
        is_current = not is_read if not self.is_open else now <= self._until
        if is_current and not self._is_at_worker:
            return self
        journal = copy(self)
        journal._spans = [*self._spans]
        if journal._is_at_worker:
            journal._attempts[-1].update()
            journal._add_attempt_spans(now, is_lost=False)
        if journal.is_open:
            journal._add_span(journal._open_kind, now)
        elif is_read:
            journal.delivered(now)
        return journal

    # acceptance

    def received(self, now: float) -> None:
        """Record that the call is checked and the prompt tokenised."""
        self._add_span(pb.SPAN_KIND_RECEIVE, now)

    def accepted(self, now: float) -> None:
        """Record that the ledger has the request."""
        self._add_span(pb.SPAN_KIND_LEDGER, now)
        self.accept_s = now - self.called_at
        self._queue()

    def taken_over(self, earlier: Sequence[Span], num_attempts: int, now: float) -> None:
        """Record a takeover: add the spans that the request's previous router recorded.

        The request has had ``num_attempts`` attempts before. A span that would end after ``now`` is
        cut at ``now``. Time up to ``now`` that no span covers becomes a span of the kind OTHER. The
        request is then in the queue.
        """
        for span in earlier:
            self._add_span(span.kind, min(self._until + span.seconds, now), span.attempt)
        self._add_span(pb.SPAN_KIND_OTHER, now, 0)
        self._last_attempt = num_attempts
        self._queue()

    # reports of the leader and the worker

    def dispatched(
        self,
        message: session_pb2.Dispatched,
        known_tokens: int,
        neighbours: tuple[str, ...],
        worker: WorkerConnection,
        now: float,
        occupants: tuple[str, ...] = (),
    ) -> None:
        """Record a dispatch of a request with ``known_tokens`` tokens of prompt and outputs.

        ``neighbours`` are ids of the tenant's other requests at the same worker. ``occupants`` are
        ids of the tenant's requests at other workers. Occupants are kept only if the request
        waited for capacity.
        """
        queue_wait = message.queue_wait if message.HasField("queue_wait") else None
        shares = {} if queue_wait is None else dict(queue_shares(queue_wait))
        self._number = self._last_attempt = message.attempt
        self.bypassed += message.bypassed
        self._divide(pb.SPAN_KIND_NETWORK, [*shares.items()], now)
        self._attempts.append(
            Attempt(
                message.attempt,
                now,
                message.worker_id,
                known_tokens,
                neighbours,
                occupants if shares.get(pb.SPAN_KIND_QUEUE, 0.0) > _NEGLIGIBLE_WAIT_S else (),
                queue=None if queue_wait is None else _copied(queue_wait.queue),
                prefix_wait=_prefix_wait(queue_wait),
                expected_cached_tokens=message.cached_tokens,
                worker=worker,
                outputs=self.outputs,
                tokens_before=sum(map(len, self.outputs)),
            )
        )
        self._is_at_worker = self.awaits_token = True
        self._num_dispatched += 1
        if self._num_dispatched > MAX_DETAILED_ATTEMPTS:
            self._merge_attempts_up_to(self._attempts[-MAX_DETAILED_ATTEMPTS - 1].number)

    def set_newcomers(self, newcomers: tuple[str, ...]) -> None:
        """Set the ids of the requests that the worker received after this one.

        Do nothing if no worker has the request.
        """
        if self._is_at_worker:
            self._attempts[-1].newcomers = newcomers

    def breakdown(self, breakdown: session_pb2.TimeBreakdown) -> None:
        if self._is_at_worker:
            self._attempts[-1].add_breakdown(breakdown)

    def progress(self, message: session_pb2.Progress) -> None:
        """Record a worker's report on the prefill, the first token, preemption or recomputation.

        Do nothing if no worker has the request.
        """
        if not self._is_at_worker:
            return
        attempt = self._attempts[-1]
        attempt.progress(message)
        self.awaits_token = attempt.first_token is None
        if self._first_token is None:
            self._first_token = attempt.first_token

    def end_attempt(self, end: str, now: float, *, is_lost: bool = False) -> None:
        """End the attempt, if there is one, because no worker has the request any more.

        ``end`` is a text that says how it ended. ``is_lost`` states whether the worker lost the
        request.
        """
        if not self._is_at_worker:
            return
        attempt, is_finished = self._attempts[-1], end == FINISHED
        attempt.update()
        if is_finished and attempt.last_message_at is not None:
            now = attempt.last_message_at
        self._add_attempt_spans(now, is_lost=is_lost)
        attempt.close(end)
        self.awaits_token = False
        self._is_at_worker = False
        self._open_kind = pb.SPAN_KIND_LEDGER if is_finished else pb.SPAN_KIND_MIGRATION

    def requeued(self, now: float) -> None:
        self.end_attempt("", now)
        self._add_span(self._open_kind, now)
        self._queue()

    def withdrawn(self, queue_wait: session_pb2.QueueWait, now: float) -> None:
        """Record the leader's report on the queue wait of a request that ended in the queue."""
        if self._is_queued:
            self._divide(pb.SPAN_KIND_NETWORK, queue_shares(queue_wait), now)
            self._open_kind = pb.SPAN_KIND_LEDGER

    # reading and end

    def readable(self, now: float) -> None:
        """Record the first token that clients can read at this router."""
        if self.accept_s is not None:
            self.readable_s = now - self.called_at - self.accept_s
        if self.ttft_s is None:
            self.ttft_s = now - self.called_at
            if self._first_token is not None:
                self.ledger_s = now - self._first_token

    def ended(self, end: str, now: float) -> None:
        """Record that the request has ended.

        ``end`` is a text that says how the request ended. If a worker has the request, the attempt
        ends in the same way.
        """
        self.end_attempt(end, now)
        if self.is_open:
            self._add_span(pb.SPAN_KIND_QUEUE if self._is_queued else pb.SPAN_KIND_LEDGER, now)
        self._open_kind = pb.SPAN_KIND_UNSPECIFIED

    def delivered(self, now: float) -> None:
        """Record that a client has read everything; only the first call counts."""
        if not self.is_open and not self._is_delivered:
            self._add_span(pb.SPAN_KIND_CLIENT, now)
            self._is_delivered = True

    # spans

    @property
    def _is_queued(self) -> bool:
        return self._open_kind == pb.SPAN_KIND_QUEUE and not self._is_at_worker

    def _queue(self) -> None:
        self._open_kind = pb.SPAN_KIND_QUEUE
        self._number = self._last_attempt + 1

    def _add_attempt_spans(self, now: float, *, is_lost: bool) -> None:
        attempt = self._attempts[-1]
        if attempt.breakdown is not None and attempt.breakdown_at is not None:
            self._divide(
                pb.SPAN_KIND_NETWORK, worker_shares(attempt.breakdown), attempt.breakdown_at
            )
            if attempt.last_message_at is not None and attempt.decoding_since.steps:
                self._divide(attempt.open_kind, attempt.shares, attempt.last_message_at)
        elif attempt.waited_s is not None and attempt.last_message_at is not None:
            first = attempt.last_message_at if attempt.first_token is None else attempt.first_token
            self._add_span(pb.SPAN_KIND_WORKER_WAIT, min(self._until + attempt.waited_s, first))
            self._add_span(pb.SPAN_KIND_PREFILL, first)
        if attempt.last_message_at is not None:
            self._add_span(attempt.open_kind, attempt.last_message_at)
            self._add_span(pb.SPAN_KIND_MIGRATION if is_lost else attempt.open_kind, now)
        else:
            self._add_span(pb.SPAN_KIND_OTHER if is_lost else pb.SPAN_KIND_WORKER_WAIT, now)

    def _divide(
        self,
        rest_kind: pb.SpanKind.ValueType,
        shares: Sequence[Share],
        until: float,
    ) -> None:
        """Divide the time up to ``until`` into spans, by shares that the leader or worker reported.

        If the sum of the shares exceeds this time, all of them are scaled down. If the sum is less,
        the remaining time precedes them as a span of kind ``rest_kind``.
        """
        whole, reported = max(0.0, until - self._until), sum(seconds for _, seconds in shares)
        scale = min(1.0, whole / reported) if reported > 0.0 else 0.0
        self._add_span(rest_kind, until - scale * reported)
        for kind, seconds in shares:
            if seconds > 0.0:
                self._add_span(kind, min(self._until + scale * seconds, until))
        self._until = max(self._until, until)

    def _add_span(
        self, kind: pb.SpanKind.ValueType, until: float, attempt: int | None = None
    ) -> None:
        if until > self._until:
            number = self._number if attempt is None else attempt
            seconds = until - self._until
            last = self._spans[-1] if self._spans else None
            if last is not None and (last.kind, last.attempt) == (kind, number):
                self._spans[-1] = last._replace(seconds=last.seconds + seconds)
            else:
                self._spans.append(Span(kind, seconds, number))
            self._until = until

    def _merge_attempts_up_to(self, attempt: int) -> None:
        """Merge the spans of the attempts 1 to ``attempt`` into one sum of seconds for each kind.

        Spans before the first attempt are kept one by one. The records of attempts at previous
        routers (``earlier_attempts``) are discarded; ``earlier_dropped`` keeps the number of them.
        """
        self.earlier_dropped += len(self.earlier_attempts)
        self.earlier_attempts = ()
        for span in self._spans:
            if 1 <= span.attempt <= attempt:
                self._dropped_s[span.kind] = self._dropped_s.get(span.kind, 0.0) + span.seconds
        self._spans = [span for span in self._spans if not 1 <= span.attempt <= attempt]


def _copied(queue: pb.QueueBypass) -> pb.QueueBypass:
    copied = pb.QueueBypass()
    copied.CopyFrom(queue)
    return copied


def _prefix_wait(queue_wait: session_pb2.QueueWait | None) -> pb.PrefixWait | None:
    if queue_wait is None or not queue_wait.HasField("prefix"):
        return None
    copied = pb.PrefixWait()
    copied.CopyFrom(queue_wait.prefix)
    return copied


class RequestTimes:
    """Times of a request at this router, which are reported to ``observer`` as metrics.

    ``has_earlier_output`` states whether another router has delivered the first token.
    """

    def __init__(self, journal: Journal, now: float, *, has_earlier_output: bool) -> None:
        self.observer: ClassObserver = NO_OBSERVER
        #: seconds in the queue before dispatches, over all attempts
        self.queued_s = 0.0
        self._journal = journal
        self._has_earlier_output = has_earlier_output
        self._owned_since = self._waiting_since = now
        self._dispatched: float | None = None
        self._predicted_ttft_s: float | None = None
        self._predicted_tpot_s: float | None = None
        self._first_token: float | None = None
        #: time at which more tokens last became readable, by choice
        self._readable_since: dict[int, float] = {}

    def age_s(self, now: float) -> float:
        """Return the seconds from the client's call, which submitted the request, to ``now``."""
        return now - self._journal.called_at

    # events

    def requeued(self, now: float) -> None:
        self._waiting_since = now

    def dispatched(self, message: session_pb2.Dispatched, now: float) -> None:
        """Record a dispatch; only the first one is reported to the observer."""
        if message.HasField("predicted_ttft_s"):
            self._predicted_ttft_s = message.predicted_ttft_s
        if message.HasField("predicted_tpot_s"):
            self._predicted_tpot_s = message.predicted_tpot_s
        self.queued_s += now - self._waiting_since
        if self._dispatched is None:
            self._dispatched = now
            self.observer.dispatched(self.queued_s)

    def more_readable(self, choice: int, now: float) -> None:
        """Record that more tokens of a choice became readable, and report the time to the observer.

        For the first token of the request, the time since the call is reported. For later tokens,
        it is the time since tokens of the choice last became readable.
        """
        if self._first_token is None:
            self._first_token = now
            if not self._has_earlier_output:
                self._first_readable(now)
        if (before := self._readable_since.get(choice)) is not None:
            self.observer.next_tokens(now - before)
        self._readable_since[choice] = now

    def _first_readable(self, now: float) -> None:
        self._journal.readable(now)
        if self._dispatched is not None:
            self.observer.first_token(self.age_s(now), now - self._dispatched)
            if self._predicted_ttft_s is not None:
                self.observer.ttft_predicted(self._predicted_ttft_s, now - self._owned_since)

    def report_tpot_ratio(self, longest: int, now: float) -> float | None:
        """Return the ratio of the measured to the predicted time per output token.

        The ratio is also reported to the observer. ``longest`` is the number of tokens of the
        longest choice, and ``now`` the time of the last token. Return None, without a report, if
        there was no prediction, if the output is too short, or if another router delivered the
        first token.
        """
        if self._first_token is None or self._has_earlier_output:
            return None
        ratio = measured_tpot_ratio(self._predicted_tpot_s, now - self._first_token, longest)
        if ratio is not None:
            self.observer.tpot_predicted(ratio)
        return ratio

    def finished(
        self, prompt_tokens: int, output_tokens: int, reasons: Sequence[FinishReason], now: float
    ) -> None:
        """Report to the observer that the request has ended with its last token."""
        self.observer.finished(
            self.age_s(now),
            now - self._first_token_or(now),
            prompt_tokens,
            output_tokens,
            self._journal.bypassed,
            reasons,
        )

    # results

    def readable_since(self, choice: int, otherwise: float) -> float:
        """Return the time at which tokens of a choice last became readable at this router.

        Return ``otherwise`` if no token of the choice has become readable here.
        """
        return self._readable_since.get(choice, otherwise)

    def ttft_s(self, ended: float) -> float:
        """Return the seconds from the call to the first token, or to ``ended`` without a token."""
        recorded_s = self._journal.ttft_s
        return self.age_s(self._first_token_or(ended)) if recorded_s is None else recorded_s

    @property
    def predicted_ttft_s(self) -> float | None:
        """Return the predicted seconds from the call to the first token; None if unknown."""
        if self._predicted_ttft_s is None:
            return None
        return self.age_s(self._owned_since) + self._predicted_ttft_s

    def _first_token_or(self, ended: float) -> float:
        return ended if self._first_token is None else self._first_token
