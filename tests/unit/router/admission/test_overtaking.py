"""Number of larger tickets that left, compared with a direct count."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from router.admission.policy import Fifo
from router.admission.queue import AdmissionQueue
from router.admission.request import Waiting
from router.admission.wait_stats import BypassCounter


@given(st.lists(st.integers(0, 200), unique=True), st.integers(0, 200))
def test_bypass_counter_counts_larger_tickets_that_left(left: list[int], oldest: int) -> None:
    with patch.multiple("router.admission.wait_stats", _BLOCK=4, _ROW=3):
        overtaking = BypassCounter()
        for number, ticket in enumerate(left):
            overtaking.note_departure(ticket)
            for asked in range(0, 210, 7):
                assert overtaking.count(asked) == sum(it > asked for it in left[: number + 1])
        overtaking.prune(oldest)
        for asked in range(oldest, 210):
            assert overtaking.count(asked) == sum(it > asked for it in left)
        overtaking.note_departure(300)
        assert overtaking.count(oldest) == sum(it > oldest for it in left) + 1


def test_queue_bounds_the_departures_it_remembers() -> None:
    queue = AdmissionQueue(Fifo())
    for number in range(200_000):
        queue.push(Waiting(f"r{number}", "g", float(number), 1, 1))
        if number >= 10:
            queue.pop()
    assert queue.wait_stats.num_retained <= 3 * 32_768
