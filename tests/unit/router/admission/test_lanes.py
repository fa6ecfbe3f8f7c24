"""Request heap, compared with a sorted list, and its number of stale entries."""

from __future__ import annotations

from bisect import insort
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from router.admission.lanes import Queued, RequestHeap
from router.admission.request import Waiting

numbers = st.integers(0, 5).map(float)
steps = st.lists(st.tuples(st.sampled_from(["push", "leave", "first"]), numbers), max_size=300)


class Lined:
    """Request heap, and the sorted entries that it should have."""

    def __init__(self) -> None:
        self.heap = RequestHeap()
        self.expected: list[tuple[object, ...]] = []
        self._queued: dict[int, Queued] = {}
        self._tickets = count()

    def push(self, *place: object) -> None:
        ticket = next(self._tickets)
        queued = Queued(Waiting(f"r{ticket}", "g", 0.0, 1, 1), ticket, (0.0, 0, 0, 0))
        self._queued[ticket] = queued
        self.heap.push(queued, place)
        insort(self.expected, (*place, ticket))

    def leave(self, index: int) -> None:
        queued = self._queued.pop(self.expected.pop(index)[-1])
        queued.is_queued = False
        self.heap.note_removed(queued)

    def check(self) -> None:
        first = self.heap.first()
        assert (first and first[:-1]) == (self.expected[0] if self.expected else None)


@given(steps)
def test_line_behaves_like_a_sorted_list(taken: list[tuple[str, float]]) -> None:
    lined = Lined()
    for step, number in taken:
        if step == "push":
            lined.push(number)
        elif lined.expected:
            lined.leave(int(number) % len(lined.expected) if step == "leave" else 0)
        lined.check()


def test_line_orders_by_whole_place_then_ticket() -> None:
    lined = Lined()
    for place in ((1.0, "a"), (1.0, "b"), (1.0, "a"), (2.0, "a")):
        lined.push(*place)
    while lined.expected:
        lined.check()
        lined.leave(0)
    lined.check()


def test_line_keeps_at_most_about_half_stale_entries() -> None:
    lined = Lined()
    for number in range(10_000):
        lined.push(float(number))
    for remaining in range(9_999, 0, -1):
        lined.leave(remaining)
        assert len(lined.heap._items) <= 2 * remaining + 65
    lined.check()


def test_line_skips_departed_request_not_yet_noted() -> None:
    lined = Lined()
    lined.push(0.0)
    lined.push(1.0)
    lined.heap._items[0][-1].is_queued = False
    del lined.expected[0]
    lined.check()
