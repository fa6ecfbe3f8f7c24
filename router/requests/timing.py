"""What a gateway sees of a request, from its call to its end. Pure.

    came --> read --> rendered --> tokenised --> charged --> in the ledger --> in the queue
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
from typing import NamedTuple

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.ledger.entry import MAX_EVENTS
from router.requests.attempt import Attempt, Speaker
from router.requests.slow_readers import Unread
from router.requests.time_breakdown import Share, at_worker, in_queue

#: Attempts of which each span is kept; of those before them there are sums.
MAX_TOLD = 8
#: How an attempt ended that brought the request's last token.
FINISHED = "finished"

#: Who waits for room no longer than that waits for nobody: it is what the queue itself takes.
_NOTHING_S = 1e-3
#: What comes last, in this order.
_BEHIND = (pb.SPAN_KIND_STORING, pb.SPAN_KIND_DELIVERY)


class Span(NamedTuple):
    kind: pb.SpanKind.ValueType
    seconds: float
    attempt: int = 0


class Journal:
    """``came`` is when its call did."""

    def __init__(self, came: float) -> None:
        self.came = came
        #: from its call until it was in the ledger; None where another gateway accepted it
        self.accept_s: float | None = None
        #: since it was in the ledger, and since its call, until its first token could be read
        self.readable_s: float | None = None
        self.ttft_s: float | None = None
        #: of that, from when its first token was here until the ledger had it
        self.ledger_s: float | None = None
        self.unread = Unread()
        #: times that one that came to the queue later left it first
        self.overtaken = 0
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
        self._open: pb.SpanKind.ValueType = pb.SPAN_KIND_DOOR
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
        """From its call to what happened last: what the spans add up to."""
        return self._until - self.came

    @property
    def unread_s(self) -> float:
        """Of the whole, in which there were tokens that no client had read."""
        return min(self.total_s, self.unread.until(self._until))

    @property
    def is_delivered(self) -> bool:
        """A client has read all of it."""
        return self._is_delivered

    @property
    def behind_s(self) -> float:
        """Behind its last token: seconds until its end was in the ledger, and its client had it."""
        last = self._spans[-len(_BEHIND) :]
        return sum(span.seconds for span in last if span.kind in _BEHIND)

    @property
    def heard(self) -> float:
        """When something was heard of it last."""
        if not self._is_at_worker:
            return self._until
        attempt = self._attempts[-1]
        attempt.look()
        return self._until if attempt.heard is None else max(self._until, attempt.heard)

    @property
    def spans(self) -> list[Span]:
        """In their order, up to what happened last."""
        early = (Span(kind, seconds) for kind, seconds in sorted(self._early.items()))
        return [*early, *self._spans]

    @property
    def told(self) -> list[Attempt]:
        """Attempts of which every span is told."""
        return list(self._attempts)[-MAX_TOLD:]

    @property
    def num_dropped(self) -> int:
        """Attempts before these."""
        return self.earlier_dropped + max(0, self._num_dispatched - MAX_TOLD)

    def until(self, now: float, *, is_read: bool = False) -> Journal:
        """As it would be if all that goes on had ended at this moment. After its end that is its
        delivery, as long as it ``is_read`` by a client."""
        is_current = not is_read if not self.is_open else now <= self._until
        if is_current and not self._is_at_worker:
            return self
        journal = copy(self)
        journal._spans = [*self._spans]
        if journal._is_at_worker:
            journal._attempts[-1].look()
            journal._leave(now, is_lost=False)
        if journal.is_open:
            journal._lap(journal._open, now)
        elif is_read:
            journal.delivered(now)
        return journal

    # it is accepted

    def read(self, now: float) -> None:
        """Its call is read and checked; of a chat its template comes next."""
        self._lap(pb.SPAN_KIND_DOOR, now)

    def rendered(self, now: float) -> None:
        """The template has written its prompt."""
        self._lap(pb.SPAN_KIND_RENDERING, now)

    def tokenised(self, now: float) -> None:
        self._lap(pb.SPAN_KIND_DOOR, now)

    def charged(self, now: float) -> None:
        """To its tenant's limits."""
        self._lap(pb.SPAN_KIND_LIMITS, now)

    def accepted(self, now: float) -> None:
        """It is in the ledger."""
        self._lap(pb.SPAN_KIND_OPENING, now)
        self.accept_s = now - self.came
        self._queue()

    def adopted(self, earlier: Sequence[Span], num_attempts: int, now: float) -> None:
        """Another gateway had it, and told so much of it."""
        for span in earlier:
            self._lap(span.kind, min(self._until + span.seconds, now), span.attempt)
        self._lap(pb.SPAN_KIND_ELSEWHERE, now, 0)
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
        """``occupants`` count where it waited for room."""
        stay = message.stay if message.HasField("stay") else None
        shares = {} if stay is None else dict(in_queue(stay))
        self._number = self._last_attempt = message.attempt
        self.overtaken += message.overtaken
        self._divide(pb.SPAN_KIND_LINE, [*shares.items()], now)
        self._attempts.append(
            Attempt(
                message.attempt,
                now,
                message.worker_id,
                known_tokens,
                neighbours,
                occupants if shares.get(pb.SPAN_KIND_NO_CREDIT, 0.0) > _NOTHING_S else (),
                queue=None if stay is None else _copied(stay.queue),
                worker=worker,
                outputs=self.outputs,
                tokens_before=sum(map(len, self.outputs)),
            )
        )
        self._open, self.awaits_token = pb.SPAN_KIND_UNTOLD, True
        self._num_dispatched += 1
        if self._num_dispatched > MAX_TOLD:
            self._forget_up_to(self._attempts[-MAX_TOLD - 1].number)

    def joined(self, newcomers: tuple[str, ...]) -> None:
        """Others came to its worker since it did: these."""
        if self._is_at_worker:
            self._attempts[-1].newcomers = newcomers

    def account(self, account: session_pb2.Account) -> None:
        if self._is_at_worker:
            self._attempts[-1].tell(account)

    def progress(self, message: session_pb2.Progress) -> None:
        """It has news of the KV blocks, or its first token is awaited."""
        if not self._is_at_worker:
            return
        attempt = self._attempts[-1]
        attempt.progress(message)
        self.awaits_token = attempt.first_token is None
        if self._first_token is None:
            self._first_token = attempt.first_token

    def left(self, end: str, now: float, *, is_lost: bool = False) -> None:
        """No worker has it any more."""
        if not self._is_at_worker:
            return
        attempt, is_finished = self._attempts[-1], end == FINISHED
        attempt.look()
        if is_finished and attempt.heard is not None:
            now = attempt.heard
        self._leave(now, is_lost=is_lost)
        attempt.close(end)
        self.awaits_token = False
        self._open = pb.SPAN_KIND_STORING if is_finished else pb.SPAN_KIND_REQUEUE

    def queued_again(self, now: float) -> None:
        self.left("", now)
        self._lap(self._open, now)
        self._queue()

    def withdrawn(self, stay: session_pb2.Stay, now: float) -> None:
        """Out of the queue, for its end."""
        if self._open == pb.SPAN_KIND_QUEUED:
            self._divide(pb.SPAN_KIND_LINE, in_queue(stay), now)
            self._open = pb.SPAN_KIND_STORING

    # its clients read it

    def readable(self, now: float) -> None:
        """By clients, for the first time here."""
        if self.accept_s is not None:
            self.readable_s = now - self.came - self.accept_s
        if self.ttft_s is None:
            self.ttft_s = now - self.came
            if self._first_token is not None:
                self.ledger_s = now - self._first_token

    def ended(self, end: str, now: float) -> None:
        """In the ledger, or given up here."""
        self.left(end, now)
        if self.is_open:
            is_queued = self._open == pb.SPAN_KIND_QUEUED
            self._lap(pb.SPAN_KIND_QUEUED if is_queued else pb.SPAN_KIND_STORING, now)
        self._open = pb.SPAN_KIND_UNSPECIFIED

    def delivered(self, now: float) -> None:
        """A client has read all of it. The first one counts."""
        if not self.is_open and not self._is_delivered:
            self._lap(pb.SPAN_KIND_DELIVERY, now)
            self._is_delivered = True

    # spans

    @property
    def _is_at_worker(self) -> bool:
        return self._open == pb.SPAN_KIND_UNTOLD

    def _queue(self) -> None:
        self._open = pb.SPAN_KIND_QUEUED
        self._number = self._last_attempt + 1

    def _leave(self, now: float, *, is_lost: bool) -> None:
        attempt = self._attempts[-1]
        if attempt.account is not None and attempt.accounted is not None:
            self._divide(pb.SPAN_KIND_ON_THE_WAY, at_worker(attempt.account), attempt.accounted)
            if attempt.heard is not None and attempt.since.steps:
                self._divide(attempt.unaccounted, attempt.shares, attempt.heard)
        elif attempt.waited_s is not None and attempt.heard is not None:
            first = attempt.heard if attempt.first_token is None else attempt.first_token
            self._lap(pb.SPAN_KIND_WORKER_WAIT, min(self._until + attempt.waited_s, first))
            self._lap(pb.SPAN_KIND_PREFILL, first)
        if attempt.heard is not None:
            self._lap(attempt.unaccounted, attempt.heard)
            self._lap(pb.SPAN_KIND_DETECTION if is_lost else attempt.unaccounted, now)
        else:
            self._lap(pb.SPAN_KIND_UNTOLD if is_lost else pb.SPAN_KIND_WORKER_WAIT, now)

    def _divide(
        self,
        rest: pb.SpanKind.ValueType,
        shares: Sequence[Share],
        until: float,
    ) -> None:
        """The time up to this moment, of which so much is told. Clocks are not exact: no more is
        told than there was."""
        whole, told = max(0.0, until - self._until), sum(seconds for _, seconds in shares)
        scale = min(1.0, whole / told) if told > 0.0 else 0.0
        self._lap(rest, until - scale * told)
        for kind, seconds in shares:
            if seconds > 0.0:
                self._lap(kind, min(self._until + scale * seconds, until))
        self._until = max(self._until, until)

    def _lap(self, kind: pb.SpanKind.ValueType, until: float, attempt: int | None = None) -> None:
        """The next span lasts until this moment. There is none of no length."""
        if until > self._until:
            number = self._number if attempt is None else attempt
            self._spans.append(Span(kind, until - self._until, number))
            self._until = until

    def _forget_up_to(self, attempt: int) -> None:
        """Of these spans there are sums from now on."""
        self.earlier_dropped += len(self.earlier_attempts)
        self.earlier_attempts = ()
        for span in self._spans:
            if span.attempt <= attempt:
                self._early[span.kind] = self._early.get(span.kind, 0.0) + span.seconds
        self._spans = [span for span in self._spans if span.attempt > attempt]


def _copied(queue: pb.QueueStay) -> pb.QueueStay:
    copied = pb.QueueStay()
    copied.CopyFrom(queue)
    return copied
