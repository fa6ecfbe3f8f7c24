"""Explanation of a request (its time breakdown), as clients receive and the ledger stores it. Pure.

The router that owns a request stores the explanation in the ledger when the request is queued again
after an attempt, and when it ends. The stored message has at most MAX_BYTES bytes. Time that the
last stored explanation lacks, for example after a loss of the router, is derived from the ledger's
clock and events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from everlift.messages import Request
from everlift.v1 import inference_pb2 as pb
from router.ledger.entry import Entry, Event, State, Stored
from router.prediction.predictor import Prediction
from router.requests.continuation import continuation
from router.requests.timing import FINISHED, Attempt, Journal, Span, UnreadTime

#: Maximum size of an explanation in the ledger, in bytes.
MAX_BYTES = 4096
#: Maximum number of characters of the text that says how an attempt ended. Without a limit, an
#: error could quote a text of any length.
_MAX_END = 200

_ACCEPTING = (pb.SPAN_KIND_RECEIVE, pb.SPAN_KIND_LEDGER)


def accepting_s(explanation: pb.Explanation) -> float:
    """Return the seconds from a request's call until the ledger had accepted it."""
    spans = takewhile(lambda it: not it.attempt and it.kind in _ACCEPTING, explanation.spans)
    return sum(span.seconds for span in spans)


def explained(
    journal: Journal,
    entry: Entry,
    request: Request,
    prediction: Prediction,
    predicted_ttft_s: float | None,
    unread_tokens: int,
) -> pb.Explanation:
    """Return the explanation of a request that this router owns, from its journal.

    ``predicted_ttft_s`` is the predicted time to first token in seconds since the call, None if
    unknown. ``unread_tokens`` is the number of tokens that no client has read yet, over all
    choices.
    """
    explanation = pb.Explanation(
        request_id=entry.request_id,
        state=pb.RequestState.Value(f"REQUEST_STATE_{entry.state.name}"),
        total_s=journal.total_s,
        prompt_tokens=len(request.prompt_ids),
        output_tokens=sum(entry.num_tokens),
        predicted_output_tokens=prediction.output_tokens,
        prediction_distrusted=prediction.is_distrusted,
        ttft_s=journal.ttft_s,
        ledger_s=journal.ledger_s,
        predicted_ttft_s=predicted_ttft_s,
        dropped_attempts=journal.num_dropped,
        unread_s=journal.unread_s,
        unread_tokens=unread_tokens,
        bypassed=journal.bypassed,
        continued=continuation(entry.tally),
    )
    # Spans are added in place, because creating messages and copying them takes twice as long.
    for kind, seconds, number in journal.spans:
        explanation.spans.add(kind=kind, seconds=seconds, attempt=number)
    explanation.attempts.extend(journal.earlier_attempts)
    for attempt in journal.detailed_attempts:
        _add(attempt, explanation)
    return explanation


def summed(spans: Iterable[Span]) -> list[pb.Span]:
    """Return one span for each kind, with the total seconds of the kind, sorted by kind."""
    seconds: dict[pb.SpanKind.ValueType, float] = {}
    for span in spans:
        seconds[span.kind] = seconds.get(span.kind, 0.0) + span.seconds
    return [pb.Span(kind=kind, seconds=seconds[kind]) for kind in sorted(seconds)]


def _span(span: Span) -> pb.Span:
    return pb.Span(kind=span.kind, seconds=span.seconds, attempt=span.attempt)


def _add(attempt: Attempt, explanation: pb.Explanation) -> None:
    breakdown = attempt.breakdown
    explanation.attempts.add(
        number=attempt.number,
        worker_id=attempt.worker_id,
        known_tokens=attempt.known_tokens,
        cached_tokens=attempt.cached_tokens,
        prefilled_tokens=attempt.prefilled_tokens if not attempt.new_tokens else 0,
        new_tokens=attempt.new_tokens,
        preemptions=attempt.preemptions,
        recomputed_tokens=attempt.recomputed_tokens,
        end=attempt.end[:_MAX_END],
        steps=attempt.steps,
        most_neighbours=breakdown.most_neighbours if breakdown is not None else 0,
        neighbours=attempt.neighbours,
        newcomers=attempt.newcomers,
        occupants=attempt.occupants,
        queue=attempt.queue,
        prefix_wait=attempt.prefix_wait,
        expected_cached_tokens=attempt.expected_cached_tokens,
        adapter_s=attempt.adapter_s,
    )


# in the ledger


def packed(explanation: pb.Explanation) -> bytes:
    """Serialise an explanation in at most MAX_BYTES bytes; this modifies ``explanation``.

    The field ``unread_tokens`` is cleared. If the message is too long, the ids of other requests
    are dropped, earliest attempt first: ``newcomers`` and ``occupants`` of all attempts, then
    ``neighbours`` and ``queue.before``. If that is not enough, the earliest attempts are dropped,
    and their spans are summed by kind.
    """
    explanation.ClearField("unread_tokens")
    for shorter in _shorter(explanation):
        if shorter.ByteSize() <= MAX_BYTES:
            return shorter.SerializeToString()
    raise AssertionError(f"an explanation with sums alone exceeds {MAX_BYTES} bytes")


def _shorter(explanation: pb.Explanation) -> Iterator[pb.Explanation]:
    yield explanation
    for attempt in explanation.attempts:
        del attempt.newcomers[:], attempt.occupants[:]
        yield explanation
    for attempt in explanation.attempts:
        del attempt.neighbours[:], attempt.queue.before[:]
        yield explanation
    while explanation.attempts:
        _drop_first(explanation)
        yield explanation


def _drop_first(explanation: pb.Explanation) -> None:
    number = explanation.attempts.pop(0).number
    explanation.dropped_attempts += 1
    spans = list(_spans(explanation))
    first = list(takewhile(lambda span: not span.attempt and span.kind in _ACCEPTING, spans))
    later = [span for span in spans if span.attempt > number]
    del explanation.spans[:]
    explanation.spans.extend(map(_span, first))
    rest = spans[len(first) :]
    explanation.spans.extend(summed(span for span in rest if span.attempt <= number))
    explanation.spans.extend(map(_span, later))


def stored_explanation(stored: Stored, events: Sequence[Event]) -> pb.Explanation:
    """Return the explanation of a request that no router owns, from what the ledger stores.

    ``events`` are the request's events in the ledger. Time that no router reported is added as the
    last span: the storing of the request's end, or the time after the loss of its router.
    """
    entry = stored.entry
    explanation = pb.Explanation.FromString(stored.explanation)
    explanation.request_id = entry.request_id
    explanation.state = pb.RequestState.Value(f"REQUEST_STATE_{entry.state.name}")
    explanation.prompt_tokens = len(stored.request.prompt_ids)
    explanation.output_tokens = sum(entry.num_tokens)
    is_over = entry.state.is_final and bool(events)
    if entry.state is State.FINISHED and explanation.attempts:
        explanation.attempts[-1].end = FINISHED
    unreported_s = _unreported_s(explanation, entry, events[-1].time if is_over else stored.now)
    if unreported_s > 0.0:
        is_reported = is_over and bool(explanation.spans)
        kind = pb.SPAN_KIND_LEDGER if is_reported else pb.SPAN_KIND_OTHER
        explanation.spans.add(kind=kind, seconds=unreported_s)
        explanation.total_s += unreported_s
    return explanation


def resumed_journal(stored: Stored, now: float) -> Journal:
    """Return the journal of a request that this router takes over from another one.

    The journal begins with the times that the ledger has stored. ``now`` is the router's clock in
    seconds.
    """
    explanation = pb.Explanation.FromString(stored.explanation)
    unreported_s = _unreported_s(explanation, stored.entry, stored.now)
    journal = Journal(now - explanation.total_s - max(0.0, unreported_s))
    journal.taken_over(list(_spans(explanation)), stored.entry.attempts, now)
    journal.earlier_attempts = tuple(explanation.attempts)
    journal.earlier_dropped = explanation.dropped_attempts
    journal.unread = UnreadTime(explanation.unread_s)
    journal.bypassed = explanation.bypassed
    if explanation.HasField("ttft_s"):
        journal.ttft_s = explanation.ttft_s
    if explanation.HasField("ledger_s"):
        journal.ledger_s = explanation.ledger_s
    return journal


def _unreported_s(explanation: pb.Explanation, entry: Entry, now: float) -> float:
    return accepting_s(explanation) + (now - entry.arrived) - explanation.total_s


def _spans(explanation: pb.Explanation) -> Iterator[Span]:
    return (Span(it.kind, it.seconds, it.attempt) for it in explanation.spans)
