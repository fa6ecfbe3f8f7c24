"""Times of a request in its router, from its call to its end. Pure.

    came --> tokenised --> in the ledger --> in the queue
                                                  |
    dispatched --waits at its worker--> first step --> first token --> last token --> left
        ^                                         |--- preempted, resumed ---|          |
        +--------------- in the queue again <------------- lost, or given back ---------+
                                                                                        |
    delivered <-- in the ledger to its end <--------------------------------------------+

Each moment is taken once, so that the spans between them add up to the whole whatever happens. What
the leader and the worker tell divides the span that it came in; what is left of that was the way
there and back. Times are the router's clock in seconds.

Nothing is noted of a token but of each attempt's first one: how many there are is seen in the
outputs, and until when its worker was heard it knows itself.
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
from router.admission.throughput import seen_ratio
from router.ledger.entry import MAX_EVENTS
from router.requests.observer import NOBODY, ClassObserver


class UnreadTime:
    """Time in seconds during which the client had tokens of any choice to read."""

    def __init__(self, earlier_s: float = 0.0) -> None:
        """Continue from the ``earlier_s`` that the previous gateway recorded."""
        self._seconds = earlier_s
        #: up to which nothing more can be added to them
        self._counted = -inf
        #: choices that are late, and since when there are any
        self._choices: set[int] = set()
        self._since = inf

    def mark_late(self, index: int, since: float) -> None:
        """Note that a choice is late, with tokens to read since ``since``."""
        self._choices.add(index)
        self._since = min(self._since, max(since, self._counted))

    def mark_caught_up(self, index: int, now: float) -> None:
        """Note that the client has read everything."""
        self._choices.discard(index)
        if not self._choices:
            self._seconds += max(0.0, now - self._since)
            self._counted, self._since = now, inf

    def until(self, now: float) -> float:
        """Return the seconds with unread tokens up to ``now``."""
        return self._seconds + max(0.0, now - self._since)


#: Of some interval, in seconds.
Share: TypeAlias = tuple[pb.SpanKind.ValueType, float]


def in_queue(queue_wait: session_pb2.QueueWait) -> list[Share]:
    return [
        (pb.SPAN_KIND_NO_WORKER, queue_wait.no_worker_s),
        (pb.SPAN_KIND_QUEUE, max(0.0, queue_wait.seconds - queue_wait.no_worker_s)),
        (pb.SPAN_KIND_LEDGER, queue_wait.dispatch_s),
    ]


def at_worker(breakdown: session_pb2.TimeBreakdown) -> list[Share]:
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


#: Times without blocks that are kept of an attempt.
_MAX_PAUSES = 32


_NOTHING = session_pb2.TimeBreakdown()


class Speaker(Protocol):
    """Clock of a worker: its last message, and its report on decoding sequences."""

    @property
    def last_heard(self) -> float: ...

    @property
    def decoding(self) -> session_pb2.TimeBreakdown: ...


class Silent:
    """A worker that cannot be reached."""

    last_heard = -inf
    decoding = _NOTHING


SILENT = Silent()


@dataclass(slots=True)
class Pause:
    """Pause of a ``choice`` without KV blocks; ``until`` is None while it lasts."""

    choice: int
    since: float
    until: float | None = None


@dataclass(slots=True)
class Attempt:
    """Attempt; ``number`` counts from 1.

    None stands for what was not seen, or did not come to pass. What grows with each token or frame
    is as of the last look.
    """

    number: int
    dispatched: float
    worker_id: str = ""
    #: when it came there: its prompt, and what it had of outputs
    known_tokens: int = 0
    #: of its own tenant, at the same worker when it came there
    neighbours: tuple[str, ...] = ()
    #: of its own tenant too, at other workers then, if there was no room; and who came since
    occupants: tuple[str, ...] = ()
    newcomers: tuple[str, ...] = ()
    queue: pb.QueueBypass | None = None
    #: None when it has left
    worker: Speaker | None = None
    #: of the request, by choice, and how many tokens they had when it came there
    outputs: Sequence[Sized] = ()
    tokens_before: int = 0
    #: to the first step that computed something of it, by the worker's clock
    waited_s: float | None = None
    #: known tokens that this step found in the KV cache
    cached_tokens: int = 0
    #: known tokens that are computed or cached, as the worker reported last in the prefill
    prefilled_tokens: int = 0
    first_token: float | None = None
    new_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    pauses: list[Pause] = field(default_factory=list)
    #: choices that have no KV blocks
    preempted: set[int] = field(default_factory=set)
    #: by the worker, of the choice that it told of last; and when that came
    breakdown: session_pb2.TimeBreakdown | None = None
    accounted: float | None = None
    #: its worker's decoding then, and what came to that since
    _decoding: session_pb2.TimeBreakdown = field(default_factory=lambda: _NOTHING)
    since: session_pb2.TimeBreakdown = field(default_factory=lambda: _NOTHING)
    #: something was told of it
    is_begun: bool = False
    #: of one that was told of, when its worker was heard last
    heard: float | None = None
    #: how it ended, empty while it goes on
    end: str = ""

    @property
    def unaccounted(self) -> pb.SpanKind.ValueType:
        """Kind of the time since the worker's last breakdown."""
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
        """Return the shares of time since the worker's last report, as others that decode there."""
        return at_worker(self.since)

    @property
    def steps(self) -> int:
        return self.since.steps + (self.breakdown.steps if self.breakdown is not None else 0)

    @property
    def last_token(self) -> float | None:
        """Return the time of the last token, or until when its worker could continue."""
        if self.first_token is None:
            return None
        pause = self.pauses[-1] if self.pauses else None
        return pause.since if pause is not None and pause.until is None else self.heard

    # what comes of it

    def update(self) -> None:
        """Update from the worker's last report."""
        if self.worker is None:
            return
        self.new_tokens = sum(map(len, self.outputs)) - self.tokens_before
        if not self.is_begun:
            return
        self.heard = self.worker.last_heard
        if self.first_token is None or self.accounted is None or self._is_preempted:
            return
        if self.heard > self.accounted:
            self.since = _between(self._decoding, self.worker.decoding)

    def close(self, end: str) -> None:
        self.worker, self.outputs, self.end = None, (), end

    def add_breakdown(self, breakdown: session_pb2.TimeBreakdown) -> None:
        """Add a breakdown of the worker."""
        assert self.worker is not None
        self.is_begun, self.accounted = True, self.worker.last_heard
        # A part of a message keeps all of it, and the worker's frame around it.
        self.breakdown = session_pb2.TimeBreakdown()
        self.breakdown.CopyFrom(breakdown)
        self._decoding, self.since = self.worker.decoding, _NOTHING

    def progress(self, message: session_pb2.Progress) -> None:
        """Note changes other than new tokens."""
        self.is_begun = True
        self.update()
        if self.new_tokens and self.first_token is None:
            self.first_token = self.heard
        if self.waited_s is None and message.HasField("waited_s"):
            self.waited_s, self.cached_tokens = message.waited_s, message.cached_tokens
        self.prefilled_tokens = message.prefilled_tokens or self.prefilled_tokens
        self.preemptions += message.preemptions
        self.recomputed_tokens += message.recomputed_tokens
        if message.residence == session_pb2.RESIDENCE_PREEMPTED:
            self._pause(message.choice)
        elif message.residence == session_pb2.RESIDENCE_RESUMED:
            self._resume(message.choice)

    def _pause(self, choice: int) -> None:
        assert self.heard is not None
        self.preempted.add(choice)
        if len(self.pauses) < _MAX_PAUSES:
            self.pauses.append(Pause(choice, self.heard))

    def _resume(self, choice: int) -> None:
        self.preempted.discard(choice)
        for pause in self.pauses:
            if pause.choice == choice and pause.until is None:
                pause.until = self.heard


def _between(
    then: session_pb2.TimeBreakdown, now: session_pb2.TimeBreakdown
) -> session_pb2.TimeBreakdown:
    return session_pb2.TimeBreakdown(
        prefill_interference_s=now.prefill_interference_s - then.prefill_interference_s,
        decode_s=now.decode_s - then.decode_s,
        decode_interference_s=now.decode_interference_s - then.decode_interference_s,
        between_steps_s=now.between_steps_s - then.between_steps_s,
        steps=max(0, now.steps - then.steps),
    )


#: Attempts of which each span is kept; of those before them there are sums.
MAX_TOLD = 8
#: How an attempt ended that brought the request's last token.
FINISHED = "finished"

#: Who waits for room no longer than that waits for nobody: it is what the queue itself takes.
_NOTHING_S = 1e-3
#: What comes last, in this order.
_BEHIND = (pb.SPAN_KIND_LEDGER, pb.SPAN_KIND_CLIENT)


class Span(NamedTuple):
    kind: pb.SpanKind.ValueType
    seconds: float
    attempt: int = 0


class Journal:
    """Journal of a request, whose call arrived at ``came``."""

    def __init__(self, came: float) -> None:
        self.came = came
        #: from its call until it was in the ledger; None where another gateway accepted it
        self.accept_s: float | None = None
        #: since it was in the ledger, and since its call, until its first token could be read
        self.readable_s: float | None = None
        self.ttft_s: float | None = None
        #: of that, from when its first token was here until the ledger had it
        self.ledger_s: float | None = None
        self.unread = UnreadTime()
        #: times that one that came to the queue later left it first
        self.bypassed = 0
        #: of the request, by choice
        self.outputs: Sequence[Sized] = ()
        #: a worker has it, whose first token of it has not come
        self.awaits_token = False
        #: as the gateway told them that had it before
        self.earlier_attempts: tuple[pb.ExplainedAttempt, ...] = ()
        #: attempts before these, of which it told only sums
        self.earlier_dropped = 0
        self._attempts: deque[Attempt] = deque(maxlen=MAX_EVENTS)
        self._spans: list[Span] = []
        #: of the attempts before those, by kind
        self._early: dict[pb.SpanKind.ValueType, float] = {}
        self._first_token: float | None = None
        self._num_dispatched = 0
        self._is_delivered = False
        self._until = came
        #: what the time since then will be called
        self._open: pb.SpanKind.ValueType = pb.SPAN_KIND_RECEIVE
        self._is_at_worker = False
        #: the attempt that the next span belongs to, and the last one that there was
        self._number = self._last_attempt = 0

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts)

    @property
    def is_open(self) -> bool:
        return self._open != pb.SPAN_KIND_UNSPECIFIED

    # what it says

    @property
    def total_s(self) -> float:
        """Seconds from the call to the last event: the sum of the spans."""
        return self._until - self.came

    @property
    def unread_s(self) -> float:
        """Seconds of the total in which there were unread tokens."""
        return min(self.total_s, self.unread.until(self._until))

    @property
    def is_delivered(self) -> bool:
        """Return whether a client has read everything."""
        return self._is_delivered

    @property
    def behind_s(self) -> float:
        """Return the seconds from the last token to the stored and delivered end."""
        last = self._spans[-len(_BEHIND) :]
        return sum(span.seconds for span in last if span.kind in _BEHIND)

    @property
    def heard(self) -> float:
        """Return when the worker was last heard of."""
        if not self._is_at_worker:
            return self._until
        attempt = self._attempts[-1]
        attempt.update()
        return self._until if attempt.heard is None else max(self._until, attempt.heard)

    @property
    def spans(self) -> list[Span]:
        """Spans in order, up to the last event."""
        first = list(takewhile(lambda span: not span.attempt, self._spans))
        early = (Span(kind, seconds) for kind, seconds in sorted(self._early.items()))
        return [*first, *early, *self._spans[len(first) :]]

    @property
    def kept_attempts(self) -> list[Attempt]:
        """Attempts whose spans are all kept."""
        return list(self._attempts)[-MAX_TOLD:]

    @property
    def num_dropped(self) -> int:
        """Number of earlier attempts that were summed."""
        return self.earlier_dropped + max(0, self._num_dispatched - MAX_TOLD)

    def until(self, now: float, *, is_read: bool = False) -> Journal:
        """Return the journal as if all that is open ended now.

        After the end, delivery is open while a client reads.
        """
        is_current = not is_read if not self.is_open else now <= self._until
        if is_current and not self._is_at_worker:
            return self
        journal = copy(self)
        journal._spans = [*self._spans]
        if journal._is_at_worker:
            journal._attempts[-1].update()
            journal._leave(now, is_lost=False)
        if journal.is_open:
            journal._lap(journal._open, now)
        elif is_read:
            journal.delivered(now)
        return journal

    # it is accepted

    def received(self, now: float) -> None:
        """Note that the call is checked and the prompt tokenised."""
        self._lap(pb.SPAN_KIND_RECEIVE, now)

    def accepted(self, now: float) -> None:
        """Note that the ledger has the request."""
        self._lap(pb.SPAN_KIND_LEDGER, now)
        self.accept_s = now - self.came
        self._queue()

    def adopted(self, earlier: Sequence[Span], num_attempts: int, now: float) -> None:
        """Continue the spans and attempts that another gateway recorded."""
        for span in earlier:
            self._lap(span.kind, min(self._until + span.seconds, now), span.attempt)
        self._lap(pb.SPAN_KIND_OTHER, now, 0)
        self._last_attempt = num_attempts
        self._queue()

    # the leader and the worker speak

    def dispatched(
        self,
        message: session_pb2.Dispatched,
        known_tokens: int,
        neighbours: tuple[str, ...],
        worker: Speaker,
        now: float,
        occupants: tuple[str, ...] = (),
    ) -> None:
        """Record a dispatch; ``occupants`` count if the request waited for room."""
        queue_wait = message.queue_wait if message.HasField("queue_wait") else None
        shares = {} if queue_wait is None else dict(in_queue(queue_wait))
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
                occupants if shares.get(pb.SPAN_KIND_QUEUE, 0.0) > _NOTHING_S else (),
                queue=None if queue_wait is None else _copied(queue_wait.queue),
                worker=worker,
                outputs=self.outputs,
                tokens_before=sum(map(len, self.outputs)),
            )
        )
        self._is_at_worker = self.awaits_token = True
        self._num_dispatched += 1
        if self._num_dispatched > MAX_TOLD:
            self._forget_up_to(self._attempts[-MAX_TOLD - 1].number)

    def joined(self, newcomers: tuple[str, ...]) -> None:
        """Record requests that came to the worker later."""
        if self._is_at_worker:
            self._attempts[-1].newcomers = newcomers

    def breakdown(self, breakdown: session_pb2.TimeBreakdown) -> None:
        if self._is_at_worker:
            self._attempts[-1].add_breakdown(breakdown)

    def progress(self, message: session_pb2.Progress) -> None:
        """Note a change of its KV blocks, or its first token."""
        if not self._is_at_worker:
            return
        attempt = self._attempts[-1]
        attempt.progress(message)
        self.awaits_token = attempt.first_token is None
        if self._first_token is None:
            self._first_token = attempt.first_token

    def left(self, end: str, now: float, *, is_lost: bool = False) -> None:
        """End the attempt: no worker has the request any more."""
        if not self._is_at_worker:
            return
        attempt, is_finished = self._attempts[-1], end == FINISHED
        attempt.update()
        if is_finished and attempt.heard is not None:
            now = attempt.heard
        self._leave(now, is_lost=is_lost)
        attempt.close(end)
        self.awaits_token = False
        self._is_at_worker = False
        self._open = pb.SPAN_KIND_LEDGER if is_finished else pb.SPAN_KIND_MIGRATION

    def queued_again(self, now: float) -> None:
        self.left("", now)
        self._lap(self._open, now)
        self._queue()

    def withdrawn(self, queue_wait: session_pb2.QueueWait, now: float) -> None:
        """Record the removal of an ended request from the queue."""
        if self._is_queued:
            self._divide(pb.SPAN_KIND_NETWORK, in_queue(queue_wait), now)
            self._open = pb.SPAN_KIND_LEDGER

    # its clients read it

    def readable(self, now: float) -> None:
        """Note the first token that clients can read here."""
        if self.accept_s is not None:
            self.readable_s = now - self.came - self.accept_s
        if self.ttft_s is None:
            self.ttft_s = now - self.came
            if self._first_token is not None:
                self.ledger_s = now - self._first_token

    def ended(self, end: str, now: float) -> None:
        """Note its end, in the ledger or given up here."""
        self.left(end, now)
        if self.is_open:
            self._lap(pb.SPAN_KIND_QUEUE if self._is_queued else pb.SPAN_KIND_LEDGER, now)
        self._open = pb.SPAN_KIND_UNSPECIFIED

    def delivered(self, now: float) -> None:
        """Note that a client has read everything; the first one counts."""
        if not self.is_open and not self._is_delivered:
            self._lap(pb.SPAN_KIND_CLIENT, now)
            self._is_delivered = True

    # spans

    @property
    def _is_queued(self) -> bool:
        return self._open == pb.SPAN_KIND_QUEUE and not self._is_at_worker

    def _queue(self) -> None:
        self._open = pb.SPAN_KIND_QUEUE
        self._number = self._last_attempt + 1

    def _leave(self, now: float, *, is_lost: bool) -> None:
        attempt = self._attempts[-1]
        if attempt.breakdown is not None and attempt.accounted is not None:
            self._divide(pb.SPAN_KIND_NETWORK, at_worker(attempt.breakdown), attempt.accounted)
            if attempt.heard is not None and attempt.since.steps:
                self._divide(attempt.unaccounted, attempt.shares, attempt.heard)
        elif attempt.waited_s is not None and attempt.heard is not None:
            first = attempt.heard if attempt.first_token is None else attempt.first_token
            self._lap(pb.SPAN_KIND_WORKER_WAIT, min(self._until + attempt.waited_s, first))
            self._lap(pb.SPAN_KIND_PREFILL, first)
        if attempt.heard is not None:
            self._lap(attempt.unaccounted, attempt.heard)
            self._lap(pb.SPAN_KIND_MIGRATION if is_lost else attempt.unaccounted, now)
        else:
            self._lap(pb.SPAN_KIND_OTHER if is_lost else pb.SPAN_KIND_WORKER_WAIT, now)

    def _divide(
        self,
        rest: pb.SpanKind.ValueType,
        shares: Sequence[Share],
        until: float,
    ) -> None:
        """Divide the time until now by reported shares, scaled down to what there was."""
        whole, told = max(0.0, until - self._until), sum(seconds for _, seconds in shares)
        scale = min(1.0, whole / told) if told > 0.0 else 0.0
        self._lap(rest, until - scale * told)
        for kind, seconds in shares:
            if seconds > 0.0:
                self._lap(kind, min(self._until + scale * seconds, until))
        self._until = max(self._until, until)

    def _lap(self, kind: pb.SpanKind.ValueType, until: float, attempt: int | None = None) -> None:
        if until > self._until:
            number = self._number if attempt is None else attempt
            seconds = until - self._until
            last = self._spans[-1] if self._spans else None
            if last is not None and (last.kind, last.attempt) == (kind, number):
                self._spans[-1] = last._replace(seconds=last.seconds + seconds)
            else:
                self._spans.append(Span(kind, seconds, number))
            self._until = until

    def _forget_up_to(self, attempt: int) -> None:
        """Keep only sums of these spans; those before the first attempt stay as they are."""
        self.earlier_dropped += len(self.earlier_attempts)
        self.earlier_attempts = ()
        for span in self._spans:
            if 1 <= span.attempt <= attempt:
                self._early[span.kind] = self._early.get(span.kind, 0.0) + span.seconds
        self._spans = [span for span in self._spans if not 1 <= span.attempt <= attempt]


def _copied(queue: pb.QueueBypass) -> pb.QueueBypass:
    copied = pb.QueueBypass()
    copied.CopyFrom(queue)
    return copied


class RequestTimes:
    """Times of a request at this gateway, for the metrics.

    ``has_begun_elsewhere``: the client read the first token from another gateway.
    """

    def __init__(self, journal: Journal, now: float, *, has_begun_elsewhere: bool) -> None:
        self.observer: ClassObserver = NOBODY
        #: seconds that it waited until it was dispatched, all times together
        self.queued_s = 0.0
        self._journal = journal
        self._has_begun_elsewhere = has_begun_elsewhere
        self._taken = self._waiting_since = now
        self._dispatched: float | None = None
        self._predicted_ttft_s: float | None = None
        self._predicted_tpot_s: float | None = None
        self._first_token: float | None = None
        #: by choice, when more could be read last
        self._readable_since: dict[int, float] = {}

    def age_s(self, now: float) -> float:
        """Return the seconds since the call."""
        return now - self._journal.came

    # what happens to it

    def queued_again(self, now: float) -> None:
        self._waiting_since = now

    def dispatched(self, message: session_pb2.Dispatched, now: float) -> None:
        """Note a dispatch; the first one counts for observers."""
        if message.HasField("predicted_ttft_s"):
            self._predicted_ttft_s = message.predicted_ttft_s
        if message.HasField("predicted_tpot_s"):
            self._predicted_tpot_s = message.predicted_tpot_s
        self.queued_s += now - self._waiting_since
        if self._dispatched is None:
            self._dispatched = now
            self.observer.dispatched(self.queued_s)

    def more_to_read(self, choice: int, now: float) -> None:
        """Note that clients may read more of a choice than before."""
        if self._first_token is None:
            self._first_token = now
            if not self._has_begun_elsewhere:
                self._first_to_read(now)
        if (before := self._readable_since.get(choice)) is not None:
            self.observer.next_tokens(now - before)
        self._readable_since[choice] = now

    def _first_to_read(self, now: float) -> None:
        self._journal.readable(now)
        if self._dispatched is not None:
            self.observer.first_token(self.age_s(now), now - self._dispatched)
            if self._predicted_ttft_s is not None:
                self.observer.ttft_predicted(self._predicted_ttft_s, now - self._taken)

    def judge_tpot(self, longest: int, now: float) -> float | None:
        """Return the measured over the predicted time per output token, at the last token.

        ``longest`` is the length of the longest choice; None if unknown.
        """
        if self._first_token is None or self._has_begun_elsewhere:
            return None
        ratio = seen_ratio(self._predicted_tpot_s, now - self._first_token, longest)
        if ratio is not None:
            self.observer.tpot_predicted(ratio)
        return ratio

    def finished(
        self, prompt_tokens: int, output_tokens: int, reasons: Sequence[FinishReason], now: float
    ) -> None:
        """Note its end by its last token."""
        self.observer.finished(
            self.age_s(now),
            now - self._began_to_tell(now),
            prompt_tokens,
            output_tokens,
            self._journal.bypassed,
            reasons,
        )

    # what came of it

    def readable_since(self, choice: int, otherwise: float) -> float:
        """Return when more of a choice became readable last, or ``otherwise``."""
        return self._readable_since.get(choice, otherwise)

    def ttft_s(self, ended: float) -> float:
        """Seconds from its call to its first token, or to its end if there is none."""
        told_s = self._journal.ttft_s
        return self.age_s(self._began_to_tell(ended)) if told_s is None else told_s

    @property
    def foreseen_ttft_s(self) -> float | None:
        """Predicted seconds from its call to its first token."""
        if self._predicted_ttft_s is None:
            return None
        return self.age_s(self._taken) + self._predicted_ttft_s

    def _began_to_tell(self, ended: float) -> float:
        return ended if self._first_token is None else self._first_token
