"""Causes of waits in the queue, compared with a direct count of all departures."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.admission.policy import Fifo
from router.admission.queue import AdmissionQueue
from router.admission.request import Waiting
from router.admission.wait_stats import Arrival, WaitStatistics, bypassed


def waiting(request_id: str, priority: int = 0, accepted: bool = False) -> Waiting:
    return Waiting(request_id, "g", 0.0, 1, 1, priority=priority, accepted=accepted)


def wait_of(
    wait_stats: WaitStatistics, arrival: Arrival, of: Waiting, now: float, is_fair: bool = False
) -> session_pb2.QueueWait:
    return wait_stats.wait_of(arrival, of, "fifo", now, is_fair=is_fair)


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(-1, 1), st.booleans()),
        min_size=1,
        max_size=60,
    )
)
def test_wait_stats_count_earlier_departures_by_reason(
    moves: list[tuple[int, int, bool]],
) -> None:
    """A request arrives in each move, and often a queued one leaves."""
    with patch.multiple("router.admission.wait_stats", _BLOCK=4, _ROW=3):
        wait_stats = WaitStatistics()
        left: list[tuple[int, Waiting]] = []
        there: list[tuple[int, Waiting, Arrival, int]] = []
        for number, (which, priority, is_accepted) in enumerate(moves):
            one = waiting(f"r{number}", priority, is_accepted)
            there.append(
                (number, one, wait_stats.note_arrival(one, len(there), float(number)), len(left))
            )
            if which >= len(there):
                continue
            came, leaving, arrival, before = there.pop(which)
            meanwhile = left[before:]
            later = [it for at, it in meanwhile if at > came and not it.accepted]
            queue_wait = wait_of(wait_stats, arrival, leaving, float(number))
            assert queue_wait.seconds == number - came
            assert (queue_wait.queue.higher, queue_wait.queue.ordered, queue_wait.queue.lower) == (
                sum(it.priority > leaving.priority for it in later),
                sum(it.priority == leaving.priority for it in later),
                sum(it.priority < leaving.priority for it in later),
            )
            assert queue_wait.queue.earlier == len(meanwhile) - len(later)
            assert bypassed(queue_wait) == len(later)
            wait_stats.note_departure(arrival, leaving)
            left.append((came, leaving))
            wait_stats.prune(there[0][2] if there else None)


def test_wait_stats_count_seconds_without_workers() -> None:
    wait_stats, one = WaitStatistics(), waiting("r")
    wait_stats.update(0.0, has_worker=False)
    arrival = wait_stats.note_arrival(one, 0, 2.0)
    wait_stats.update(5.0, has_worker=True)
    wait_stats.update(11.0, has_worker=False)
    wait_stats.update(13.0, has_worker=False)
    queue_wait = wait_of(wait_stats, arrival, one, 14.5)
    assert (queue_wait.no_worker_s, queue_wait.seconds) == (6.5, 12.5)


def test_wait_stats_attribute_bypass_to_fair_share() -> None:
    wait_stats, one, other = WaitStatistics(), waiting("a/1"), waiting("b/1")
    arrival = wait_stats.note_arrival(one, 0, 1.0)
    wait_stats.note_departure(wait_stats.note_arrival(other, 1, 2.0), other)
    queue = wait_of(wait_stats, arrival, one, 3.0, is_fair=True).queue
    assert (queue.fair_share, queue.ordered) == (1, 0)


def test_wait_stats_name_only_requests_of_the_same_tenant() -> None:
    wait_stats, one = WaitStatistics(), waiting("a/1")
    wait_stats.note_departure(wait_stats.note_arrival(waiting("a/0"), 0, 0.0), waiting("a/0"))
    arrival = wait_stats.note_arrival(one, 0, 1.0)
    for number in range(20):
        other = waiting(f"{'ab'[number % 2]}/{number + 2}")
        wait_stats.note_departure(wait_stats.note_arrival(other, 1, 2.0), other)
    before = wait_of(wait_stats, arrival, one, 3.0).queue.before
    assert list(before) == [f"a/{number}" for number in range(6, 22, 2)]


def test_queue_wait_reports_requests_that_left_first() -> None:
    queue = AdmissionQueue(Fifo())
    for number in range(3):
        queue.push(Waiting(f"r{number}", "g", float(number), 1, 1), now=float(number))
    for _ in range(2):
        queue.pop()
    head = queue.peek()
    assert head is not None
    queue_wait = queue.queue_wait(head, "fifo", 10.0, is_fair=False)
    assert queue_wait.seconds == 8.0
    assert queue_wait.queue == pb.QueueBypass(found=2, earlier=2, before=["r0", "r1"], order="fifo")
    queue.dispatch(head, 0)
    assert not queue._queued
