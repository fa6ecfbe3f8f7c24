"""Why requests waited in the queue, against looking at all that left."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.admission.policy import Fifo
from router.admission.queue import AdmissionQueue
from router.admission.request import Waiting
from router.admission.wait_stats import Arrival, Obstacle, WaitStatistics, overtaken


def waiting(request_id: str, priority: int = 0, accepted: bool = False) -> Waiting:
    return Waiting(request_id, "g", 0.0, 1, 1, priority=priority, accepted=accepted)


def told(
    stays: WaitStatistics, arrival: Arrival, of: Waiting, now: float, in_turns: bool = False
) -> session_pb2.Stay:
    return stays.told(arrival, of, "fifo", now, in_turns=in_turns)


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(-1, 1), st.booleans()),
        min_size=1,
        max_size=60,
    )
)
def test_those_that_left_first_are_counted_by_their_reasons(
    moves: list[tuple[int, int, bool]],
) -> None:
    """Each move lets somebody come, and often one of those that wait leave."""
    with patch.multiple("router.admission.wait_stats", _BLOCK=4, _ROW=3):
        stays = WaitStatistics()
        left: list[tuple[int, Waiting]] = []
        there: list[tuple[int, Waiting, Arrival, int]] = []
        for number, (which, priority, is_accepted) in enumerate(moves):
            one = waiting(f"r{number}", priority, is_accepted)
            there.append((number, one, stays.come(one, len(there), float(number)), len(left)))
            if which >= len(there):
                continue
            came, leaving, arrival, before = there.pop(which)
            meanwhile = left[before:]
            later = [it for at, it in meanwhile if at > came and not it.accepted]
            stay = told(stays, arrival, leaving, float(number))
            assert stay.seconds == number - came
            assert (stay.queue.higher, stay.queue.ordered, stay.queue.lower) == (
                sum(it.priority > leaving.priority for it in later),
                sum(it.priority == leaving.priority for it in later),
                sum(it.priority < leaving.priority for it in later),
            )
            assert stay.queue.earlier == len(meanwhile) - len(later)
            assert overtaken(stay) == len(later)
            stays.leave(arrival, leaving)
            left.append((came, leaving))
            stays.forget(there[0][2] if there else None)


def test_what_holds_the_queue_up_is_told_by_its_time() -> None:
    stays, one = WaitStatistics(), waiting("r")
    stays.look(Obstacle.NO_WORKER, 0.0)
    arrival = stays.come(one, 0, 2.0)
    stays.look(Obstacle.LEADER, 5.0)
    stays.look(None, 9.0)
    stays.is_next("r", 9.5)
    stays.is_next("r", 10.0)
    stays.look(Obstacle.NO_WORKER, 11.0)
    stays.look(Obstacle.WORKER_STARTS, 13.0)
    stays.look(Obstacle.WORKER_UNPLACED, 16.0)
    stays.look(None, 17.5)
    stay = told(stays, arrival, one, 18.5)
    assert (stay.no_worker_s, stay.starting_s, stay.leader_s) == (5.0, 3.0, 4.0)
    assert stay.unplaced_s == 1.5
    assert (stay.seconds, stay.first_s) == (16.5, 2.5)


def test_another_ones_turn_as_the_next_is_not_its_own() -> None:
    stays, one = WaitStatistics(), waiting("r")
    arrival = stays.come(one, 0, 1.0)
    stays.is_next("r", 2.0)
    stays.is_next("other", 3.0)
    assert told(stays, arrival, one, 4.0).first_s == 0.0


def test_where_tenants_take_turns_these_are_the_reason() -> None:
    stays, one, other = WaitStatistics(), waiting("a/1"), waiting("b/1")
    arrival = stays.come(one, 0, 1.0)
    stays.leave(stays.come(other, 1, 2.0), other)
    queue = told(stays, arrival, one, 3.0, in_turns=True).queue
    assert (queue.turns, queue.ordered) == (1, 0)


def test_a_tenant_hears_of_its_own_requests_alone() -> None:
    stays, one = WaitStatistics(), waiting("a/1")
    stays.leave(stays.come(waiting("a/0"), 0, 0.0), waiting("a/0"))
    arrival = stays.come(one, 0, 1.0)
    for number in range(20):
        other = waiting(f"{'ab'[number % 2]}/{number + 2}")
        stays.leave(stays.come(other, 1, 2.0), other)
    before = told(stays, arrival, one, 3.0).queue.before
    assert list(before) == [f"a/{number}" for number in range(6, 22, 2)]


def test_of_a_queue_it_is_told_who_left_first() -> None:
    queue = AdmissionQueue(Fifo())
    for number in range(3):
        queue.push(Waiting(f"r{number}", "g", float(number), 1, 1), now=float(number))
    for _ in range(2):
        queue.pop()
    head = queue.peek()
    assert head is not None
    stay = queue.stay(head, "fifo", 10.0, in_turns=False)
    assert stay.seconds == 8.0
    assert stay.queue == pb.QueueStay(found=2, earlier=2, before=["r0", "r1"], order="fifo")
    queue.dispatch(head)
    assert not queue._queued


def test_who_comes_again_is_the_next_one_anew() -> None:
    stays, one = WaitStatistics(), waiting("r")
    stays.leave(stays.come(one, 0, 0.0), one)
    stays.is_next("r", 1.0)
    arrival = stays.come(one, 0, 5.0)
    stays.is_next("r", 6.0)
    assert told(stays, arrival, one, 8.0).first_s == 2.0
