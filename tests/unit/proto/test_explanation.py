"""Explanation of a request's time, as sent and stored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everlift.explanation import LABELS, as_json, server_timing
from everlift.messages import FinishReason
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.ledger.entry import Entry, Event, State, Stored, StoredChoice
from router.prediction.predictor import LengthDistribution, Prediction
from router.requests.explanation import (
    MAX_BYTES,
    explained,
    packed,
    resumed_journal,
    stored_explanation,
)
from router.requests.timing import FINISHED, NO_CONNECTION, Journal
from tests.support.ledger.ledgers import make_request
from tests.support.router.journal_support import WatchedJournal

CAME = 5000.0
#: Time of the ledger's clock when the gateway's is 0.
LEDGER = 1e9


def entry(state: State = State.RUNNING, attempts: int = 1) -> Entry:
    return Entry(
        "a/r", state, "g", LEDGER + CAME + 1, (4,), attempts=attempts, finish_reasons=(None,)
    )


def journal(attempts: int = 1, names: int = 0) -> Journal:
    made = WatchedJournal(CAME)
    made.received(CAME + 0.5)
    made.accepted(CAME + 1)
    now = CAME + 1
    for attempt in range(1, attempts + 1):
        queue = pb.QueueBypass(earlier=1, before=["a/" + "b" * 120] * names)
        queue_wait = session_pb2.QueueWait(seconds=0.5, queue=queue)
        message = session_pb2.Dispatched(
            worker_id="w" * 32, attempt=attempt, bypassed=2, queue_wait=queue_wait
        )
        others = ("a/" + "n" * 120,) * names
        made.dispatched(message, 10, others, made.worker, now := now + 1, others)
        made.set_newcomers(others)
        breakdown = session_pb2.TimeBreakdown(waiting_s=0.25, prefill_s=0.25, decode_s=0.25)
        made.says(now := now + 1, 2, breakdown)
        made.end_attempt("moved", now)
        made.requeued(now := now + 1)
    return made


def explain(of: Journal, now: float, attempts: int = 1) -> pb.Explanation:
    prediction = Prediction(LengthDistribution(7.0), output_tokens=7)
    return explained(of.snapshot(now), entry(attempts=attempts), make_request(), prediction, 0.5, 3)


def stored(explanation: bytes, of: Entry, now: float) -> Stored:
    return Stored(of, make_request(), (StoredChoice(),), now, explanation=explanation)


def seconds(explanation: pb.Explanation) -> float:
    return sum(span.seconds for span in explanation.spans)


def test_explanation_has_predictions_and_outcome() -> None:
    explanation = explain(journal(), CAME + 6)
    assert explanation.total_s == seconds(explanation) == 6.0
    assert (explanation.predicted_output_tokens, explanation.output_tokens) == (7, 4)
    assert explanation.predicted_ttft_s == 0.5 and not explanation.HasField("ttft_s")
    (attempt,) = explanation.attempts
    assert (attempt.worker_id, attempt.known_tokens, attempt.end) == ("w" * 32, 10, "moved")


@pytest.mark.parametrize("attempts, names", [(1, 0), (1, 8), (3, 8), (8, 8), (64, 8)])
def test_packed_explanation_is_bounded_and_sums_up(attempts: int, names: int) -> None:
    explanation = explain(journal(attempts, names), CAME + 1000, attempts)
    data = packed(explanation)
    assert len(data) <= MAX_BYTES
    read = pb.Explanation.FromString(data)
    assert seconds(read) == pytest.approx(read.total_s) == pytest.approx(1000.0)
    assert read.dropped_attempts + len(read.attempts) == attempts
    # Ids of other requests are dropped before attempts, those of newcomers and occupants first.
    assert read.attempts and (read.dropped_attempts == 0) == (attempts <= 8)
    assert len(read.attempts[-1].neighbours) == names


def test_packed_explanation_drops_earliest_attempts() -> None:
    explanation = explain(journal(8), CAME + 1000, 8)
    for attempt in explanation.attempts:
        attempt.worker_id = "w" * 600
    read = pb.Explanation.FromString(packed(explanation))
    assert 0 < len(read.attempts) == 8 - read.dropped_attempts < 8
    assert seconds(read) == pytest.approx(read.total_s) == pytest.approx(1000.0)


def test_stored_explanation_adds_time_from_ledger_events() -> None:
    data = packed(explain(journal(), CAME + 6))
    over = replace(entry(State.FINISHED), finish_reasons=(FinishReason.STOP,))
    events = (Event(over.arrived, "open", "g"), Event(LEDGER + CAME + 6.5, "finish", ""))
    explanation = stored_explanation(stored(data, over, LEDGER + 1e6), events)
    assert explanation.state == pb.REQUEST_STATE_FINISHED
    assert explanation.spans[-1] == pb.Span(kind=pb.SPAN_KIND_LEDGER, seconds=0.5)
    assert seconds(explanation) == explanation.total_s == 6.5


def test_stored_explanation_is_built_from_events_alone() -> None:
    over = entry(State.CANCELLED)
    events = (Event(over.arrived, "open", "g"), Event(over.arrived + 3, "end", "cancelled"))
    explanation = stored_explanation(stored(b"", over, LEDGER + 1e6), events)
    assert list(explanation.spans) == [pb.Span(kind=pb.SPAN_KIND_OTHER, seconds=3.0)]
    assert explanation.total_s == 3.0


def test_resumed_journal_continues_that_of_last_gateway() -> None:
    first = journal()
    first.readable(CAME + 4)
    data = packed(explain(first, CAME + 6))
    resumed = resumed_journal(stored(data, entry(), LEDGER + CAME + 16), now=77.0)
    message = session_pb2.Dispatched(worker_id="x", attempt=3, bypassed=1)
    resumed.dispatched(message, 10, (), NO_CONNECTION, 80.0)
    resumed.end_attempt(FINISHED, 81.0)
    explanation = explain(resumed, 81.0)
    assert explanation.total_s == pytest.approx(20.0) == pytest.approx(seconds(explanation))
    by_kind = {span.kind: span.seconds for span in explanation.spans}
    assert by_kind[pb.SPAN_KIND_OTHER] == pytest.approx(10.0)
    assert [attempt.worker_id for attempt in explanation.attempts] == ["w" * 32, "x"]
    assert (explanation.ttft_s, explanation.ledger_s) == (4.0, 1.0)
    assert explanation.bypassed == 2 + 1


def test_resumed_journal_keeps_count_of_dropped_attempts() -> None:
    first = explain(journal(12), CAME + 100, attempts=12)
    resumed = resumed_journal(
        stored(packed(first), entry(attempts=12), LEDGER + CAME + 101), now=101.0
    )
    explanation = explain(resumed, 102.0, attempts=12)
    assert explanation.dropped_attempts + len(explanation.attempts) == 12
    for attempt in range(13, 13 + 9):
        message = session_pb2.Dispatched(worker_id="x", attempt=attempt)
        resumed.dispatched(message, 10, (), NO_CONNECTION, 103.0)
        resumed.end_attempt("moved", 104.0)
        resumed.requeued(105.0)
    explanation = explain(resumed, 110.0, attempts=21)
    assert explanation.dropped_attempts + len(explanation.attempts) == 21
    assert explanation.bypassed == 2 * 12
    assert seconds(explanation) == pytest.approx(explanation.total_s)


def test_span_kinds_all_have_labels() -> None:
    assert set(LABELS) == set(pb.SpanKind.values()) - {pb.SPAN_KIND_UNSPECIFIED}


def test_explanation_json_has_start_of_each_span() -> None:
    spans = [
        pb.Span(kind=pb.SPAN_KIND_QUEUE, seconds=0.25, attempt=1),
        pb.Span(kind=pb.SPAN_KIND_DECODE, seconds=0.5, attempt=1),
    ]
    explanation = pb.Explanation(request_id="r", state=pb.REQUEST_STATE_FAILED, spans=spans)
    output = as_json(explanation)
    assert output["state"] == "failed"
    assert output["spans"] == [
        {"kind": "queue", "start_s": 0.0, "seconds": 0.25, "attempt": 1},
        {"kind": "decode", "start_s": 0.25, "seconds": 0.5, "attempt": 1},
    ]
    assert server_timing(spans) == "queue;dur=250.000, decode;dur=500.000"
