"""The admission queue keeps the policy's order through requeues and withdrawals."""

from __future__ import annotations

import pytest

from router.admission import queue as module
from router.admission.fair_share import FairShare
from router.admission.parking import Wait
from router.admission.policy import EarliestDeadline, Fifo, Policy
from router.admission.queue import AdmissionQueue
from router.admission.request import Waiting
from tests.support.router.admission_support import POLICIES


def waiting(request_id: str, arrived: float, gateway: str = "g") -> Waiting:
    return Waiting(request_id, gateway, arrived, prefill_tokens=10, max_tokens=5)


def drain(queue: AdmissionQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_queue_orders_by_arrival_not_push_order() -> None:
    queue = AdmissionQueue(Fifo())
    for request_id, arrived in [("b", 2.0), ("c", 3.0), ("a", 1.0)]:
        queue.push(waiting(request_id, arrived))
    assert drain(queue) == ["a", "b", "c"]


def test_queue_keeps_position_of_requeued_request() -> None:
    queue = AdmissionQueue(Fifo())
    for request_id, arrived in [("a", 1.0), ("b", 2.0)]:
        queue.push(waiting(request_id, arrived))
    first = queue.pop()
    queue.push(waiting("c", 3.0))
    queue.push(first)
    assert drain(queue) == ["a", "b", "c"]


def test_queue_holds_duplicate_push_once() -> None:
    queue = AdmissionQueue(Fifo())
    queue.push(waiting("a", 1.0))
    queue.push(waiting("a", 1.0))
    assert len(queue) == 1
    assert drain(queue) == ["a"]


def test_queue_fully_removes_withdrawn_requests() -> None:
    queue = AdmissionQueue(Fifo())
    for number in range(500):
        queue.push(waiting(f"r{number}", float(number)))
    for number in range(499):
        assert queue.withdraw(f"r{number}", "g")
    assert not queue.withdraw("r0", "g")
    assert "r0" not in queue
    assert drain(queue) == ["r499"]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_withdraw_requires_the_current_gateway() -> None:
    queue = AdmissionQueue(Fifo())
    assert queue.push(waiting("a", 1.0, gateway="old")) is None
    replaced = queue.push(waiting("a", 1.0, gateway="new"))
    assert replaced is not None and replaced.gateway == "old"
    assert not queue.withdraw("a", "old")
    assert drain(queue) == ["a"]


def test_withdraw_gateway_removes_only_its_requests() -> None:
    queue = AdmissionQueue(Fifo())
    queue.push(waiting("a", 1.0, gateway="dead"))
    queue.push(waiting("b", 2.0, gateway="alive"))
    queue.push(waiting("c", 3.0, gateway="dead"))
    queue.withdraw_gateway("dead")
    queue.withdraw_gateway("dead")
    assert drain(queue) == ["b"]


def test_queue_pop_returns_pushed_request_unchanged() -> None:
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


def test_queue_work_tokens_track_push_pop_and_withdraw() -> None:
    queue = AdmissionQueue(Fifo())
    for number in range(4):
        queue.push(waiting(f"r{number}", float(number))._replace(predicted_tokens=number))
    assert queue.work_tokens == 4 * 10 + 0 + 1 + 2 + 3
    queue.push(waiting("r1", 1.0)._replace(predicted_tokens=7))
    assert queue.work_tokens == 4 * 10 + 0 + 7 + 2 + 3
    queue.withdraw("r3", "g")
    queue.pop()
    assert queue.work_tokens == 2 * 10 + 7 + 2
    queue.withdraw_gateway("g")
    assert queue.work_tokens == 0


def test_queue_pops_higher_class_first() -> None:
    queue = AdmissionQueue(Fifo())
    for priority, arrived in ((0, 1.0), (1, 3.0), (1, 2.0), (-1, 0.0)):
        queue.push(waiting(f"{priority} {arrived}", arrived)._replace(priority=priority))
    assert drain(queue) == ["1 2.0", "1 3.0", "0 1.0", "-1 0.0"]


def due(request_id: str, arrived: float, **fields: object) -> Waiting:
    return waiting(request_id, arrived)._replace(**fields)  # type: ignore[arg-type]


def three() -> AdmissionQueue:
    """Return a queue of three requests whose deadlines are in reverse order."""
    queue = AdmissionQueue(Fifo())
    for number, name in enumerate("abc"):
        queue.push(due(name, float(number), deadline=100.0 - number))
    return queue


def test_reorder_applies_to_queued_and_requeued_requests() -> None:
    queue = three()
    taken = queue.pop()
    assert taken.request_id == "a"
    for _ in queue.reorder(EarliestDeadline(60.0)):
        pass
    queue.push(taken)
    queue.push(due("z", 50.0, deadline=1.0))
    assert drain(queue) == ["z", "c", "b", "a"]


def test_reorder_in_progress_keeps_the_old_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REORDER_BATCH", 1)
    queue = three()
    parts = queue.reorder(EarliestDeadline(60.0))
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


def test_reorder_abandoned_midway_has_no_effect() -> None:
    queue = three()
    next(queue.reorder(EarliestDeadline(60.0)))
    assert drain(queue) == ["a", "b", "c"]


@pytest.mark.parametrize("is_fair", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda it: it.name)
def test_queue_returns_parked_request_to_its_place(policy: Policy, is_fair: bool) -> None:
    fair_share = FairShare(1.0, 2.0, lambda tenant: 1.0)
    queue = AdmissionQueue(policy, 0.0, fair_share, is_fair=is_fair)
    for number in range(4):
        queue.push(waiting(f"r{number}", float(number))._replace(expires=100.0))
    wait = Wait("w", 1, 1.0, 1.0, 1.0)
    for _ in range(2):
        for request_id in ("r2", "r1"):
            queue.park(request_id, wait)
        assert queue.num_parked == 2
        for request_id in ("r1", "r2"):
            queue.unpark(request_id, 0.5)
    assert queue.parked_s("r1") == 1.0 and queue.last_wait("r0") is None
    assert drain(queue) == ["r0", "r1", "r2", "r3"]
    assert queue.expire(200.0) is None
