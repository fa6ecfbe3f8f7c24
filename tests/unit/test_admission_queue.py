"""The admission queue keeps the policy's order through requeues and withdrawals."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from router.admission import queue as module
from router.admission.policy import ORDERS, EarliestDeadline, Fifo, Waiting
from router.admission.queue import AdmissionQueue


def waiting(request_id: str, arrived: float, gateway: str = "g") -> Waiting:
    return Waiting(request_id, gateway, arrived, prefill_tokens=10, max_tokens=5)


def drain(queue: AdmissionQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_requests_leave_by_arrival_and_not_by_when_they_were_pushed() -> None:
    queue = AdmissionQueue(Fifo())
    for request_id, arrived in [("b", 2.0), ("c", 3.0), ("a", 1.0)]:
        queue.push(waiting(request_id, arrived))
    assert drain(queue) == ["a", "b", "c"]


def test_a_request_that_comes_back_keeps_its_place() -> None:
    queue = AdmissionQueue(Fifo())
    for request_id, arrived in [("a", 1.0), ("b", 2.0)]:
        queue.push(waiting(request_id, arrived))
    first = queue.pop()
    queue.push(waiting("c", 3.0))
    queue.push(first)
    assert drain(queue) == ["a", "b", "c"]


def test_a_request_that_is_told_twice_waits_once() -> None:
    queue = AdmissionQueue(Fifo())
    queue.push(waiting("a", 1.0))
    queue.push(waiting("a", 1.0))
    assert len(queue) == 1
    assert drain(queue) == ["a"]


def test_withdrawn_requests_leave_no_trace() -> None:
    queue = AdmissionQueue(Fifo())
    for number in range(500):
        queue.push(waiting(f"r{number}", float(number)))
    for number in range(499):
        assert queue.withdraw(f"r{number}", "g")
    assert not queue.withdraw("r0", "g")
    assert "r0" not in queue
    assert len(queue._heap) <= 64
    assert drain(queue) == ["r499"]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_only_the_gateway_that_waits_may_withdraw() -> None:
    queue = AdmissionQueue(Fifo())
    assert queue.push(waiting("a", 1.0, gateway="old")) is None
    replaced = queue.push(waiting("a", 1.0, gateway="new"))
    assert replaced is not None and replaced.gateway == "old"
    assert not queue.withdraw("a", "old")
    assert drain(queue) == ["a"]


def test_a_dead_gateway_takes_only_its_own_requests_along() -> None:
    queue = AdmissionQueue(Fifo())
    queue.push(waiting("a", 1.0, gateway="dead"))
    queue.push(waiting("b", 2.0, gateway="alive"))
    queue.push(waiting("c", 3.0, gateway="dead"))
    queue.withdraw_gateway("dead")
    queue.withdraw_gateway("dead")
    assert drain(queue) == ["b"]
    assert not queue._of_gateway


def test_what_leaves_is_what_was_pushed() -> None:
    pushed = Waiting(
        "r",
        "g",
        1.5,
        10,
        5,
        "w",
        choices=2,
        priority=3,
        deadline=9.0,
        ttft_deadline=7.0,
        moves_left=1,
        predicted_tokens=4,
    )
    queue = AdmissionQueue(Fifo())
    queue.push(pushed)
    assert queue.peek() == pushed
    assert queue.pop() == pushed


def test_the_work_that_waits_is_known_whatever_came_and_went() -> None:
    queue = AdmissionQueue(Fifo())
    for number in range(4):
        queue.push(replace(waiting(f"r{number}", float(number)), predicted_tokens=number))
    assert queue.work_tokens == 4 * 10 + 0 + 1 + 2 + 3
    queue.push(replace(waiting("r1", 1.0), predicted_tokens=7))
    assert queue.work_tokens == 4 * 10 + 0 + 7 + 2 + 3
    queue.withdraw("r3", "g")
    queue.pop()
    assert queue.work_tokens == 2 * 10 + 7 + 2
    queue.withdraw_gateway("g")
    assert queue.work_tokens == 0


def test_the_garbage_collector_has_nothing_to_do_with_what_waits() -> None:
    queue = AdmissionQueue(Fifo())
    queue.push(waiting("a", 1.0))
    # What holds others is looked at before them, and can be left out the next time.
    gc.collect(), gc.collect()
    assert not any(map(gc.is_tracked, (queue._heap[0], *queue._rows.values())))


def test_a_higher_class_leaves_first() -> None:
    queue = AdmissionQueue(Fifo())
    for priority, arrived in ((0, 1.0), (1, 3.0), (1, 2.0), (-1, 0.0)):
        queue.push(replace(waiting(f"{priority} {arrived}", arrived), priority=priority))
    assert drain(queue) == ["1 2.0", "1 3.0", "0 1.0", "-1 0.0"]


def test_the_work_of_an_operation_does_not_grow_with_what_waits() -> None:
    """Counted in key comparisons, not seconds: log2 of a thousandfold queue is 10 more levels."""
    comparisons = {size: _comparisons_of_push_and_pop(size) for size in (100, 100_000)}
    assert comparisons[100_000] <= 3 * comparisons[100]


class _CountingKey(tuple[float]):
    count = 0

    def __lt__(self, other: object) -> bool:
        _CountingKey.count += 1
        return tuple(self) < tuple(other)  # type: ignore[arg-type]

    __hash__ = tuple.__hash__


class _CountingPolicy:
    def key(self, waiting: Waiting) -> tuple[float | str, ...]:
        return _CountingKey((waiting.arrived,))


def _comparisons_of_push_and_pop(size: int) -> float:
    queue = AdmissionQueue(_CountingPolicy())
    for number in range(size):
        queue.push(waiting(f"r{number}", float(number)))
    _CountingKey.count = 0
    for _ in range(50):
        queue.push(queue.pop())
    return _CountingKey.count / 50


def due(request_id: str, arrived: float, **fields: object) -> Waiting:
    return replace(waiting(request_id, arrived), **fields)  # type: ignore[arg-type]


def test_an_order_is_known_by_its_name() -> None:
    assert {name: type(order) for name, order in ORDERS.items()} == {
        "fifo": Fifo,
        "deadline": EarliestDeadline,
    }


def test_what_is_due_first_leaves_first_within_its_class_and_the_others_by_arrival() -> None:
    queue = AdmissionQueue(EarliestDeadline())
    for each in (
        due("second without", 2.0),
        due("first without", 1.0),
        due("late", 3.0, deadline=90.0),
        due("first token soon", 4.0, deadline=95.0, ttft_deadline=20.0),
        due("soon", 5.0, deadline=30.0),
        due("as soon, and later", 6.0, deadline=30.0),
        due("lower class", 0.0, deadline=1.0, priority=-1),
        due("higher class", 7.0, priority=1),
    ):
        queue.push(each)
    assert drain(queue) == [
        *("higher class", "first token soon", "soon", "as soon, and later", "late"),
        *("first without", "second without", "lower class"),
    ]


def three() -> AdmissionQueue:
    """Whose deadlines are the other way round."""
    queue = AdmissionQueue(Fifo())
    for number, name in enumerate("abc"):
        queue.push(due(name, float(number), deadline=100.0 - number))
    return queue


def test_another_order_holds_for_what_waits_already_and_for_what_comes_back() -> None:
    queue = three()
    taken = queue.pop()
    assert taken.request_id == "a"
    for _ in queue.reorder(EarliestDeadline()):
        pass
    queue.push(taken)
    queue.push(due("z", 50.0, deadline=1.0))
    assert drain(queue) == ["z", "c", "b", "a"]


def test_while_another_order_is_made_the_old_one_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    queue = three()
    parts = queue.reorder(EarliestDeadline())
    next(parts)
    assert queue.pop().request_id == "a"
    queue.push(due("d", 3.0, deadline=1.0))
    queue.push(due("e", 4.0, deadline=200.0))
    queue.withdraw("e", "g")
    queue.push(due("b", 1.0, deadline=300.0))
    next(parts)
    assert queue.peek() == due("b", 1.0, deadline=300.0)
    for _ in parts:
        pass
    assert drain(queue) == ["d", "c", "b"]


def test_an_order_that_is_not_gone_through_to_its_end_never_holds() -> None:
    queue = three()
    next(queue.reorder(EarliestDeadline()))
    assert drain(queue) == ["a", "b", "c"]
