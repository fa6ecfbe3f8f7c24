"""Spans of a request at its gateway add up to its total time, whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.requests.timing import FINISHED, MAX_DETAILED_ATTEMPTS, Journal
from tests.support.router.journal_support import WatchedJournal

CAME = 1000.0


def kinds(journal: Journal) -> dict[str, float]:
    """Return the seconds by kind of span."""
    seconds: dict[str, float] = {}
    for span in journal.spans:
        name = pb.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower()
        seconds[name] = round(seconds.get(name, 0.0) + span.seconds, 9)
    return seconds


def accepted() -> WatchedJournal:
    journal = WatchedJournal(CAME)
    journal.received(CAME + 1)
    journal.accepted(CAME + 6)
    return journal


def test_journal_spans_of_an_undisturbed_request() -> None:
    journal = accepted()
    queue_wait = session_pb2.QueueWait(
        seconds=10.0,
        no_worker_s=1.0,
        dispatch_s=0.5,
        queue=pb.QueueBypass(earlier=2, higher=1, ordered=1),
    )
    journal.dispatch(CAME + 18, queue_wait=queue_wait)
    journal.says(CAME + 20, 1, waited_s=1.0, cached_tokens=8)
    breakdown = session_pb2.TimeBreakdown(
        waiting_s=1.0, prefill_s=2.0, prefill_interference_s=0.5, decode_s=3.0
    )
    journal.says(CAME + 25, 3, breakdown=breakdown)
    journal.readable(CAME + 21)
    journal.end_attempt(FINISHED, CAME + 25)
    journal.ended(FINISHED, CAME + 26)
    journal.delivered(CAME + 28)
    journal.delivered(CAME + 30)
    assert kinds(journal) == {
        "receive": 1.0,
        "ledger": 6.5,
        "network": 2.0,
        "no_worker": 1.0,
        "queue": 9.0,
        "worker_wait": 1.0,
        "prefill": 2.0,
        "decode": 3.0,
        "interference": 0.5,
        "client": 2.0,
    }
    assert journal.total_s == sum(kinds(journal).values()) == 28.0
    assert (journal.accept_s, journal.ttft_s, journal.readable_s) == (6.0, 21.0, 15.0)
    assert journal.ledger_s == 1.0


def test_spans_of_one_kind_and_attempt_are_joined() -> None:
    journal = accepted()
    journal.dispatch(CAME + 8, queue_wait=session_pb2.QueueWait(seconds=1.5, dispatch_s=0.5))
    journal.says(
        CAME + 9,
        1,
        breakdown=session_pb2.TimeBreakdown(prefill_interference_s=0.5, not_scheduled_s=0.5),
    )
    journal.end_attempt(FINISHED, CAME + 9)
    assert [(span.kind, span.seconds) for span in journal.spans] == [
        (pb.SPAN_KIND_RECEIVE, 1.0),
        (pb.SPAN_KIND_LEDGER, 5.0),
        (pb.SPAN_KIND_QUEUE, 1.5),
        (pb.SPAN_KIND_LEDGER, 0.5),
        (pb.SPAN_KIND_INTERFERENCE, 1.0),
    ]


def test_breakdown_longer_than_the_attempt_is_scaled_down() -> None:
    journal = accepted()
    journal.dispatch(CAME + 6)
    journal.says(CAME + 8, 1, breakdown=session_pb2.TimeBreakdown(prefill_s=3, decode_s=1))
    journal.end_attempt(FINISHED, CAME + 8)
    assert kinds(journal)["prefill"] == 1.5 and kinds(journal)["decode"] == 0.5
    assert journal.total_s == pytest.approx(sum(kinds(journal).values()))


def test_ledger_time_runs_from_first_token_to_readable() -> None:
    journal = accepted()
    journal.dispatch(CAME + 6)
    journal.says(CAME + 7, 0, waited_s=0.5)
    journal.says(CAME + 8, 1)
    journal.end_attempt("worker w was lost", CAME + 9, is_lost=True)
    journal.requeued(CAME + 10)
    journal.dispatch(CAME + 11, attempt=2)
    journal.says(CAME + 12, 1)
    journal.readable(CAME + 13)
    journal.readable(CAME + 14)
    assert (journal.ttft_s, journal.ledger_s) == (13.0, 5.0)


def test_migration_begins_at_the_lost_workers_last_report() -> None:
    journal = accepted()
    journal.dispatch(CAME + 6)
    journal.says(CAME + 8, 1, breakdown=session_pb2.TimeBreakdown(prefill_s=1.0))
    journal.says(CAME + 9, 1)
    journal.end_attempt("worker w was lost", CAME + 12, is_lost=True)
    journal.requeued(CAME + 13)
    seen = kinds(journal)
    parts = ("network", "prefill", "decode", "migration")
    assert [seen[name] for name in parts] == [1.0, 1.0, 1.0, 4.0]
    assert [attempt.end for attempt in journal] == ["worker w was lost"]
    journal.dispatch(CAME + 20, attempt=2)
    assert journal.spans[-1] == (pb.SPAN_KIND_NETWORK, 7.0, 2)


def test_attempt_without_reports_is_attributed_to_other() -> None:
    journal = accepted()
    journal.dispatch(CAME + 6)
    journal.end_attempt("worker w was lost", CAME + 12, is_lost=True)
    assert kinds(journal)["other"] == 6.0


def test_attempt_without_breakdown_is_wait_prefill_and_decode() -> None:
    """A stop string may end an output before its worker has reported a breakdown."""
    journal = accepted()
    journal.dispatch(CAME + 6)
    journal.says(CAME + 8, 1, waited_s=0.5)
    journal.says(CAME + 11, 4)
    journal.end_attempt(FINISHED, CAME + 11)
    at_worker = list(kinds(journal).items())[2:]
    assert at_worker == [("worker_wait", 0.5), ("prefill", 1.5), ("decode", 3.0)]


def test_long_prefill_counts_as_prefill_from_first_report() -> None:
    journal = accepted()
    journal.dispatch(CAME + 6)
    journal.says(CAME + 8, 0, waited_s=1.0, cached_tokens=2)
    assert kinds(journal.snapshot(CAME + 9))["prefill"] == 2.0
    journal.says(CAME + 10, 0, prefilled_tokens=4)
    journal.says(CAME + 12, 0, prefilled_tokens=6)
    snapshot = journal.snapshot(CAME + 13)
    assert list(kinds(snapshot).items())[2:] == [("worker_wait", 1.0), ("prefill", 6.0)]
    assert [attempt.prefilled_tokens for attempt in snapshot] == [6]
    journal.end_attempt("worker w was lost", CAME + 14, is_lost=True)
    at_worker = list(kinds(journal).items())[2:]
    assert at_worker == [("worker_wait", 1.0), ("prefill", 5.0), ("migration", 2.0)]


def test_time_since_a_report_is_split_by_decode_shares() -> None:
    journal = accepted()
    journal.dispatch(CAME + 6)
    breakdown = session_pb2.TimeBreakdown(prefill_s=1.0, decode_s=1.0, steps=2)
    before = session_pb2.TimeBreakdown(
        decode_s=50.0, decode_interference_s=40.0, prefill_interference_s=30.0, steps=100
    )
    journal.says(CAME + 8, 1, breakdown, before)
    after = session_pb2.TimeBreakdown(
        decode_s=51.0,
        decode_interference_s=40.5,
        prefill_interference_s=32.0,
        between_steps_s=0.25,
        steps=103,
    )
    journal.says(CAME + 12, 3, decoding=after)
    (attempt,) = journal.snapshot(CAME + 12)
    assert (attempt.new_tokens, attempt.steps) == (4, 5)
    journal.end_attempt("worker w was lost", CAME + 15, is_lost=True)
    assert list(kinds(journal).items())[2:] == [
        ("prefill", 1.0),
        ("decode", 1.0 + 0.25 + 1.0),
        ("interference", 2.5),
        ("other", 0.25),
        ("migration", 3.0),
    ]


@pytest.mark.parametrize("residence", ["PREEMPTED", "RESUMED"])
def test_shares_exclude_requests_without_blocks_or_tokens(residence: str) -> None:
    news = {"residence": session_pb2.Residence.Value(f"RESIDENCE_{residence}")}
    is_preempted = residence == "PREEMPTED"
    journal = accepted()
    journal.dispatch(CAME + 6)
    breakdown, none = session_pb2.TimeBreakdown(prefill_s=1.0), session_pb2.TimeBreakdown()
    journal.says(CAME + 7, int(is_preempted), breakdown, none, **news)
    journal.says(CAME + 9, 0, decoding=session_pb2.TimeBreakdown(decode_s=2.0, steps=9))
    journal.end_attempt("moved", CAME + 9)
    kind = "preempted" if is_preempted else "other"
    assert list(kinds(journal).items())[2:] == [("prefill", 1.0), (kind, 2.0)]


def test_silent_worker_counts_as_lost_since_its_last_message() -> None:
    journal = accepted()
    journal.dispatch(CAME + 6)
    journal.says(CAME + 7, 1, session_pb2.TimeBreakdown(prefill_s=1.0))
    journal.worker.last_message_at = CAME + 9
    journal.end_attempt("worker w was lost", CAME + 10, is_lost=True)
    journal.worker.last_message_at = CAME + 20
    journal.requeued(CAME + 21)
    seen = list(kinds(journal).items())[2:]
    assert seen == [("prefill", 1.0), ("decode", 2.0), ("migration", 12.0)]


def test_preempted_state_lasts_until_the_next_report() -> None:
    journal = accepted()
    journal.dispatch(CAME + 6)
    breakdown = session_pb2.TimeBreakdown(decode_s=1.0)
    preempted = session_pb2.RESIDENCE_PREEMPTED
    journal.says(CAME + 7, 1, breakdown=breakdown, residence=preempted)
    assert kinds(journal.snapshot(CAME + 9))["preempted"] == 2.0
    journal.end_attempt("moved", CAME + 10)
    assert kinds(journal)["preempted"] == 3.0


def test_worker_wait_lasts_until_the_first_report() -> None:
    journal = accepted()
    journal.dispatch(CAME + 6)
    assert kinds(journal.snapshot(CAME + 8))["worker_wait"] == 2.0


def test_running_request_is_explained_up_to_now() -> None:
    journal = accepted()
    assert kinds(journal.snapshot(CAME + 8))["queue"] == 2.0
    journal.dispatch(CAME + 9)
    journal.says(CAME + 10, 1, waited_s=0.5)
    snapshot = journal.snapshot(CAME + 12)
    assert snapshot.total_s == 12.0
    assert kinds(snapshot)["decode"] == 2.0
    assert journal.total_s == 9.0 and "decode" not in kinds(journal)


def test_withdrawn_request_uses_the_leaders_queue_wait() -> None:
    journal = accepted()
    queue_wait = session_pb2.QueueWait(
        seconds=4.0, no_worker_s=1.0, queue=pb.QueueBypass(earlier=1)
    )
    journal.withdrawn(queue_wait, CAME + 11)
    journal.withdrawn(queue_wait, CAME + 12)
    journal.ended("cancelled", CAME + 13)
    seen = [(span.kind, span.seconds) for span in journal.spans[2:]]
    assert seen == [
        (pb.SPAN_KIND_NETWORK, 1.0),
        (pb.SPAN_KIND_NO_WORKER, 1.0),
        (pb.SPAN_KIND_QUEUE, 3.0),
        (pb.SPAN_KIND_LEDGER, 2.0),
    ]


def test_occupants_are_named_only_after_a_wait_for_capacity() -> None:
    for no_worker_s, expected in ((4.0, ()), (3.999, ()), (2.0, ("a",))):
        journal = accepted()
        queue_wait = session_pb2.QueueWait(seconds=4.0, no_worker_s=no_worker_s)
        message = session_pb2.Dispatched(worker_id="w", attempt=1, queue_wait=queue_wait)
        journal.dispatched(message, 10, (), journal.worker, CAME + 11, occupants=("a",))
        (attempt,) = journal
        assert attempt.occupants == expected


def test_newcomers_exclude_arrivals_after_departure() -> None:
    journal = accepted()
    journal.dispatch(CAME + 6)
    journal.set_newcomers(("a",))
    journal.set_newcomers(("b", "a"))
    journal.end_attempt("moved", CAME + 7)
    journal.set_newcomers(("c",))
    assert [attempt.newcomers for attempt in journal] == [("b", "a")]


def test_adopted_journal_continues_earlier_spans() -> None:
    journal = Journal(CAME)
    earlier = accepted()
    journal.taken_over(earlier.spans, 3, CAME + 16)
    assert kinds(journal) == kinds(earlier) | {"other": 10.0}
    journal.ended("cancelled", CAME + 17)
    assert journal.spans[-1] == (pb.SPAN_KIND_QUEUE, 1.0, 4)
    assert journal.ttft_s is None


def test_old_attempts_are_summed() -> None:
    journal = accepted()
    now = CAME + 6.0
    for attempt in range(1, 101):
        journal.dispatch(now := now + 1, attempt)
        for _ in range(50):
            journal.says(now := now + 0.01, 1, residence=session_pb2.RESIDENCE_PREEMPTED)
        journal.end_attempt("moved", now)
        journal.requeued(now := now + 1)
    assert [attempt.number for attempt in journal.detailed_attempts] == list(
        range(101 - MAX_DETAILED_ATTEMPTS, 101)
    )
    assert journal.num_dropped == 100 - MAX_DETAILED_ATTEMPTS
    assert len(journal.spans) < 60
    assert sum(span.seconds for span in journal.spans) == pytest.approx(journal.total_s)
    assert kinds(journal)["migration"] == pytest.approx(100.0)


def test_later_reader_does_not_extend_total_time() -> None:
    journal = accepted()
    journal.ended("cancelled", CAME + 7)
    journal.delivered(CAME + 7)
    journal.delivered(CAME + 20)
    assert journal.total_s == 7.0


def decoding(now: float) -> session_pb2.TimeBreakdown:
    """Return a breakdown with more time than has passed."""
    return session_pb2.TimeBreakdown(
        decode_s=now, decode_interference_s=0.5 * now, steps=int(9 * now)
    )


STEPS: list[Callable[[WatchedJournal, float], None]] = [
    lambda journal, now: journal.received(now),
    lambda journal, now: journal.accepted(now),
    lambda journal, now: journal.dispatch(now, len(list(journal)) + 1),
    lambda journal, now: journal.dispatch(
        now, len(list(journal)) + 1, session_pb2.QueueWait(seconds=3.0)
    ),
    lambda journal, now: journal.says(now, 1, waited_s=0.25),
    lambda journal, now: journal.says(
        now, 2, session_pb2.TimeBreakdown(waiting_s=1.0, decode_s=2.0), decoding(now)
    ),
    lambda journal, now: journal.says(now, 1, decoding=decoding(now)),
    lambda journal, now: journal.says(now, 1, residence=session_pb2.RESIDENCE_PREEMPTED),
    lambda journal, now: journal.says(now, 1, residence=session_pb2.RESIDENCE_RESUMED),
    lambda journal, now: journal.readable(now),
    lambda journal, now: journal.end_attempt(FINISHED, now),
    lambda journal, now: journal.end_attempt("lost", now, is_lost=True),
    lambda journal, now: journal.requeued(now),
    lambda journal, now: journal.withdrawn(
        session_pb2.QueueWait(seconds=2.0, no_worker_s=1.0), now
    ),
    lambda journal, now: journal.ended("cancelled", now),
    lambda journal, now: journal.delivered(now),
]


@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.floats(0.0, 5.0)), max_size=40),
    st.floats(0.0, 5.0),
)
def test_journal_spans_sum_to_total_for_any_events(
    steps: list[tuple[Callable[[WatchedJournal, float], None], float]], more: float
) -> None:
    journal, now = WatchedJournal(CAME), CAME
    totals = [0.0]
    for step, seconds in steps:
        now += seconds
        step(journal, now)
        snapshot = journal.snapshot(now + more)
        total_s = sum(span.seconds for span in snapshot.spans)
        assert total_s == pytest.approx(snapshot.total_s, abs=1e-6)
        assert snapshot.total_s == pytest.approx(now + more - CAME) or not snapshot.is_open
        assert all(span.seconds > 0 for span in snapshot.spans)
        totals.append(journal.total_s)
    assert all(before <= after for before, after in pairwise(totals))
