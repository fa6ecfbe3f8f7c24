"""Queue of waiting sequences."""

from tests.support.worker.worker_support import limits, prompt, sequence
from worker.engine.sequence import Sequence
from worker.engine.waiting import WaitingQueue

LIMITS = limits()


def member(order: int, priority: int = 0) -> Sequence:
    this = sequence(LIMITS, order + 1, prompt(order + 1), priority=priority)
    this.order = order
    return this


def test_waiting_queue_restores_original_place() -> None:
    line = WaitingQueue()
    members = [member(order) for order in range(4)]
    for this in (members[2], members[3], members[1], members[0]):
        line.push(this)
    served = []
    while (head := line.head()) is not None:
        line.remove(head)
        served.append(head)
    assert served == members
    assert (len(line), line.num_tokens) == (0, 0)


def test_waiting_queue_orders_by_priority_then_arrival() -> None:
    line = WaitingQueue()
    members = [member(order, priority=order % 3) for order in range(60)]
    for this in members:
        line.push(this)
    for this in members[5:45]:
        line.remove(this)
    served = []
    while (head := line.head()) is not None:
        line.remove(head)
        served.append((-head.priority, head.order))
    assert served == sorted(served) and len(served) == 20


def test_waiting_queue_forgets_removed_members() -> None:
    line = WaitingQueue()
    members = [member(order) for order in range(100)]
    for this in members:
        line.push(this)
    for this in members[:60]:
        line.remove(this)
    assert line.head() is members[60]
    assert (len(line), line.num_tokens) == (40, sum(range(61, 101)))
    assert list(line) == members[60:]
    assert len(line._heap) <= 2 * 40 + 16, "those that left are forgotten"


def test_waiting_queue_accepts_removed_member_again() -> None:
    line = WaitingQueue()
    early, late = member(0), member(1)
    line.push(late)
    for _ in range(3):
        line.push(early)
        assert line.head() is early
        line.remove(early)
        assert line.head() is late
    assert len(line) == 1
