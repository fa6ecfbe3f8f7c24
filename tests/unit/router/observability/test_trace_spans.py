"""Trace spans of a request, from its events in the ledger and its gateway's journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from everlift.messages import FinishReason, Request, Submission
from everlift.trace_context import TraceContext
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.ledger.entry import Entry, Event, State, Tally
from router.observability.traces.spans import Span, refusal_span, request_spans
from router.requests.timing import Journal
from router.requests.tokenizer import ServedModel
from tests.support.router.journal_support import WatchedJournal

TRACE = TraceContext("a" * 32, "b" * 16, True, "c" * 16)
#: The gateway's clock when the ledger's is at 0.
CLOCK = 5000.0


def request() -> Request:
    message = pb.GenerateRequest(text="prompt", max_tokens=8, priority=3)
    return ServedModel.load("fake").resolve(Submission.from_proto(message, "r", 1, TRACE))


def entry(**changes: object) -> Entry:
    finished = Entry(
        "r",
        State.FINISHED,
        "gateway",
        arrived=100.0,
        num_tokens=(4,),
        attempts=1,
        finish_reasons=(FinishReason.LENGTH,),
    )
    return replace(finished, **changes)  # type: ignore[arg-type]


def moves(*of: tuple[float, str] | tuple[float, str, str]) -> list[Event]:
    return [Event(time, move, *detail or [""]) for time, move, *detail in of]


def spans(events: Sequence[Event], journal: Journal, entry: Entry) -> list[Span]:
    numbers = count(1)
    return request_spans(request(), entry, events, journal, lambda: f"{next(numbers):016x}")


def span_times(spans: list[Span]) -> list[tuple[str, float, float]]:
    return [(span.name.removeprefix("everlift."), span.start, span.end) for span in spans]


def test_trace_spans_of_an_undisturbed_request() -> None:
    journal = WatchedJournal(CLOCK + 99.5)
    journal.accepted(CLOCK + 100)
    journal.dispatch(CLOCK + 102, 1)
    journal.says(CLOCK + 103, 1, waited_s=0.25, cached_tokens=16)
    journal.says(CLOCK + 104, 3)
    journal.readable(CLOCK + 103.5)
    journal.end_attempt("finished", CLOCK + 104.5)
    events = moves((100, "open", "g"), (102, "dispatch", "w"), (105, "finish"))
    made = spans(events, journal, entry())
    assert span_times(made) == [
        ("queue", 100, 102),
        ("engine.wait", 102, 102.25),
        ("engine.prefill", 102.25, 103),
        ("engine.decode", 103, 104),
        ("attempt", 102, 105),
        ("accept", 99.5, 100),
        ("text_completion fake", 99.5, 105),
    ]
    root, attempt = made[-1], made[4]
    assert root.context == TRACE and root.is_root and not root.error
    assert root.events == ((103.5, "first_token"),)
    assert attempt.attributes == {
        "everlift.attempt": 1,
        "everlift.worker_id": "w",
        "everlift.outcome": "finished",
        "everlift.new_tokens": 4,
        "everlift.cached_tokens": 16,
    }
    parents = {span.name: span.context.parent_id for span in made}
    assert parents["everlift.queue"] == parents["everlift.attempt"] == TRACE.span_id
    assert parents["everlift.engine.decode"] == attempt.context.span_id
    assert len({span.context.span_id for span in made}) == len(made)
    assert {span.context.trace_id for span in made} == {TRACE.trace_id}


def test_root_span_attributes_describe_request_and_result() -> None:
    finished = entry(tally=Tally(2, 1, 30), losses=1, attempts=2)
    root = spans(moves((100, "open"), (101, "finish")), Journal(CLOCK), finished)[-1]
    assert (
        root.attributes.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": "fake",
            "gen_ai.request.max_tokens": 8,
            "gen_ai.response.id": "r",
            "gen_ai.usage.input_tokens": 6,
            "gen_ai.usage.output_tokens": 4,
            "everlift.priority": 3,
            "everlift.attempts": 2,
            "everlift.losses": 1,
            "everlift.preemptions": 2,
            "everlift.migrations": 1,
            "everlift.recomputed_tokens": 30,
            "everlift.continued": "same_distribution",
        }.items()
    )
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]


def test_attempt_spans_state_how_each_attempt_ended() -> None:
    journal = WatchedJournal(CLOCK)
    journal.dispatch(CLOCK + 9, 3)
    events = moves(
        (0, "open"),
        (1, "dispatch", "w1"),
        (2, "release", "worker w1 was lost"),
        (3, "dispatch", "w2"),
        (4, "take_over", "g2"),
        (5, "take_over", "g3"),
        (9, "dispatch", "w3"),
        (10, "release", ""),
        (12, "end", "cancelled"),
    )
    made = spans(events, journal, entry(state=State.CANCELLED, error_slug="cancelled", attempts=3))
    attempts = [span for span in made if span.name == "everlift.attempt"]
    assert [
        (a.attributes["everlift.attempt"], a.attributes["everlift.outcome"], a.error)
        for a in attempts
    ] == [(1, "lost", "lost"), (2, "gateway_lost", ""), (3, "returned", "")]
    queued = [(s.start, s.end) for s in made if s.name == "everlift.queue"]
    assert queued == [(0, 1), (2, 3), (4, 9), (10, 12)]
    root = made[-1]
    assert root.error == root.attributes["error.type"] == "cancelled"
    assert [name for _, name in root.events] == ["take_over", "take_over"]


def test_trace_omits_events_the_ledger_has_dropped() -> None:
    journal = WatchedJournal(CLOCK)
    journal.dispatch(CLOCK + 8, 70)
    events = moves((7, "release", ""), (8, "dispatch", "w"), (9, "finish"))
    made = spans(events, journal, entry(attempts=70))
    assert [s.attributes["everlift.attempt"] for s in made if s.name == "everlift.attempt"] == [70]
    assert (made[-1].start, made[-1].end) == (100.0, 9)


def test_preempted_spans_lie_within_the_attempt() -> None:
    journal = WatchedJournal(CLOCK)
    journal.dispatch(CLOCK, 1)
    journal.says(CLOCK + 1, 1, waited_s=0.0)
    journal.says(CLOCK + 2, residence=session_pb2.RESIDENCE_PREEMPTED)
    journal.says(CLOCK + 3, residence=session_pb2.RESIDENCE_RESUMED)
    journal.says(CLOCK + 4, residence=session_pb2.RESIDENCE_PREEMPTED)
    events = moves((0, "open"), (0, "dispatch", "w"), (4.5, "end", "expired"))
    made = spans(events, journal, entry())
    pauses = [(s.start, s.end) for s in made if s.name == "everlift.engine.preempted"]
    assert pauses == [(2, 3), (4, 4.5)]


def test_engine_spans_are_clamped_to_the_attempt() -> None:
    journal = WatchedJournal(CLOCK)
    journal.dispatch(CLOCK, 1)
    journal.says(CLOCK + 9, 1, waited_s=9.0)
    journal.end_attempt("finished", CLOCK + 9)
    made = spans(moves((0, "open"), (1, "dispatch", "w"), (2, "finish")), journal, entry())
    assert all(1 <= span.start <= span.end <= 2 for span in made if "engine" in span.name)


def test_attempt_without_a_token_has_no_decode_span() -> None:
    journal = WatchedJournal(CLOCK)
    journal.dispatch(CLOCK, 1)
    journal.says(CLOCK + 1, waited_s=0.5)
    events = moves((0, "open"), (0, "dispatch", "w"), (2, "release", "worker w was lost"))
    names = [span.name for span in spans(events, journal, entry())]
    assert "everlift.engine.prefill" in names and "everlift.engine.decode" not in names


def test_refusal_trace_is_one_span() -> None:
    span = refusal_span(TRACE, 1.0, 2.0, "queue_full", "mesh/1")
    assert (span.name, span.error, span.context) == ("text_completion", "queue_full", TRACE)
    assert span.attributes["error.type"] == "queue_full"
    assert span.attributes["http.request.header.x-request-id"] == ["mesh/1"]


def test_span_attributes_are_a_closed_set() -> None:
    """Error messages are no attributes: they may quote what a client sent."""
    journal = WatchedJournal(CLOCK)
    journal.dispatch(CLOCK, 1)
    journal.says(CLOCK + 1, 1, waited_s=0.0, token_ids=[1], error="marker")
    events = moves((0, "open"), (0, "dispatch", "w"), (1, "release", "marker"), (2, "end", "slug"))
    failed = entry(state=State.FAILED, error_slug="slug", error_message="marker")
    made = spans(events, journal, failed)
    assert "marker" not in str(made) and "prompt" not in str(made)
    assert {key for span in made for key in span.attributes} == {
        *("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"),
        *("gen_ai.request.max_tokens", "gen_ai.request.choice.count"),
        *("gen_ai.request.temperature", "gen_ai.request.top_p", "gen_ai.request.top_k"),
        *("gen_ai.response.id", "gen_ai.response.finish_reasons", "error.type"),
        *("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
        *("everlift.priority", "everlift.state", "everlift.attempts", "everlift.losses"),
        *("everlift.preemptions", "everlift.migrations", "everlift.recomputed_tokens"),
        "everlift.continued",
        *("everlift.attempt", "everlift.worker_id", "everlift.outcome"),
        *("everlift.new_tokens", "everlift.cached_tokens"),
    }
