"""Number of times a request is bypassed: at most what router/admission/README.md states.

The tests run random histories of a queue, in which requests arrive late at the leader, wait for
cached prefixes, return from workers and are withdrawn.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from math import inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.parking import Wait
from router.admission.policy import (
    EarliestDeadline,
    HighestResponseRatio,
    LeastAttained,
    Policy,
    PredictedRank,
    ShortestWork,
    StarvationLimit,
)
from router.admission.queue import AdmissionQueue
from router.admission.request import QueueKey, Waiting
from router.admission.wait_stats import bypassed
from tests.support.router.admission_support import POLICIES

LONGEST, CLASSES = 60, (-1, 0, 1)


@dataclass(frozen=True)
class Arrival:
    """Request that arrives ``pause`` seconds after the previous one.

    The leader receives it ``late`` seconds after its arrival. ``due`` and ``first_due`` are
    deadlines of its end and its first token. All are in seconds.
    """

    pause: float
    late: float
    priority: int
    tokens: int
    rank: float
    estimated_wait: float
    due: float
    first_due: float

    def waiting(self, name: str, arrived: float) -> Waiting:
        return Waiting(
            name,
            "g",
            arrived,
            self.tokens,
            max_tokens=5,
            priority=self.priority,
            deadline=arrived + self.due,
            ttft_deadline=arrived + self.first_due,
            queue_key=QueueKey(self.tokens, self.rank, self.rank, self.estimated_wait),
            attained_rank=self.rank,
        )


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        pause=st.floats(0, 2),
        late=st.sampled_from([0.0, 0.0, 0.0, 0.9, -0.3]),
        priority=st.sampled_from([-1, 0, 0, 0, 1]),
        tokens=st.integers(1, LONGEST),
        rank=st.floats(0, 0.999),
        estimated_wait=st.floats(0, 6),
        due=st.just(inf) | st.floats(0, 15),
        first_due=st.just(inf) | st.floats(0, 15),
    ),
    min_size=1,
    max_size=40,
)
FLOORS = st.sampled_from([0.0, 0.1, 0.5])
DICE = st.builds(random.Random, st.integers(0, 2**32))


@dataclass(frozen=True)
class QueueWait:
    """Wait of a request that left the queue at ``moment``.

    ``owed`` is the credit of lower classes at its arrival. ``before`` are the requests that left
    since then while it was not parked, and ``free`` those that left while it was parked. Later
    requests that left first are counted by class: the same one, higher and lower ones.
    """

    waiting: Waiting
    moment: float
    owed: dict[int, float]
    before: list[Waiting]
    free: list[Waiting]
    ordered: int
    higher: int
    lower: int


class Life:
    """Random life of a queue; ``dice`` decide which requests leave, return and are withdrawn."""

    def __init__(self, policy: Policy, floor: float, dice: random.Random) -> None:
        self._queue = AdmissionQueue(policy, floor)
        self._floor = floor
        self._dice = dice
        self._running: list[Waiting] = []
        self._left: list[Waiting] = []
        #: credit by class, in tokens
        self._owed: dict[int, float] = {}
        #: by parked request: length of ``_left`` and time when it was parked
        self._parked: dict[str, tuple[int, float]] = {}
        #: by request: requests that left while it was parked before
        self._free: dict[str, list[Waiting]] = defaultdict(list)
        #: by queued request: length of ``_left`` and credit when it was queued
        self._here: dict[str, tuple[int, dict[int, float]]] = {}
        #: requests in the order of their arrival at the leader
        self.received: list[Waiting] = []
        self.wait_stats: dict[str, list[QueueWait]] = defaultdict(list)

    def live(self, arrivals: list[Arrival]) -> None:
        moment, coming = 0.0, []
        for number, arrival in enumerate(arrivals):
            moment += arrival.pause
            coming.append((moment + arrival.late, arrival.waiting(str(number), moment)))
        for moment, waiting in sorted(coming):
            self.received.append(waiting)
            self._come(waiting)
            self._go_on(moment)
        self._unpark(moment + 3.0)
        while self._here:
            assert self._leave(moment + 3.0), "one that is parked no more can leave"

    def _come(self, waiting: Waiting) -> None:
        self._queue.push(waiting)
        self._here[waiting.request_id] = len(self._left), dict(self._owed)

    def _go_on(self, moment: float) -> None:
        while self._here and self._dice.random() < 0.45:
            if self._dice.random() < 0.2:
                self._park(moment)
            else:
                self._leave(moment)
        if self._dice.random() < 0.3:
            self._unpark(moment)
        if self._running and self._dice.random() < 0.3:
            self._come(self._running.pop(self._dice.randrange(len(self._running))))
        if self._here and self._dice.random() < 0.05:
            name = self._dice.choice(list(self._here))
            assert self._queue.withdraw(name, "g")
            del self._here[name]
            self._parked.pop(name, None)
            self._free.pop(name, None)
            self._forget()

    def _park(self, moment: float) -> None:
        """Park the head of the queue, as the leader does to wait for a worker with its prefix."""
        if (head := self._queue.peek(moment)) is not None:
            self._queue.park(head.request_id, Wait("w", 1, 1.0, 1.0, 1.0))
            self._parked[head.request_id] = len(self._left), moment

    def _unpark(self, moment: float) -> None:
        for name, (since, parked_at) in self._parked.items():
            self._queue.unpark(name, moment - parked_at)
            self._free[name] += self._left[since:]
        self._parked.clear()

    def _leave(self, moment: float) -> bool:
        """Let the head leave the queue; return False if all requests are parked."""
        head = self._queue.peek(moment)
        if head is None:
            return False
        queue_wait = self._queue.queue_wait(head, "", moment, is_fair=False)
        counts = (queue_wait.queue.ordered, queue_wait.queue.higher, queue_wait.queue.lower)
        assert bypassed(queue_wait) == sum(counts)
        self._owe(head)
        self._queue.dispatch(head, 0)
        came, owed = self._here.pop(head.request_id)
        self.wait_stats[head.request_id].append(
            QueueWait(head, moment, owed, *self._before(head, came), *counts)
        )
        self._left.append(head)
        self._running.append(self._after(head))
        self._forget()
        return True

    def _before(self, head: Waiting, came: int) -> tuple[list[Waiting], list[Waiting]]:
        """Return what left since ``came`` while ``head`` was not parked, and while it was."""
        free = self._free.pop(head.request_id, [])
        names = {id(it) for it in free}
        return [it for it in self._left[came:] if id(it) not in names], free

    def _owe(self, head: Waiting) -> None:
        """Update the credit of the classes when ``head`` leaves the queue."""
        highest, *_ = numbers = self._queue.numbers
        if head.priority < highest:
            # A request that leaves while higher classes are parked needs no credit.
            owed = self._owed.get(head.priority, 0.0)
            self._owed[head.priority] = max(0.0, owed - head.work_tokens)
        for priority in numbers:
            if priority < head.priority:
                part = self._floor * head.work_tokens
                self._owed[priority] = self._owed.get(priority, 0.0) + part

    def _forget(self) -> None:
        """Drop the credit of classes without queued requests."""
        self._owed = {it: owed for it, owed in self._owed.items() if it in self._queue.numbers}

    def _after(self, waiting: Waiting) -> Waiting:
        """Return a request as it is queued again; with new tokens it has no TTFT deadline."""
        tokens = min(LONGEST, waiting.prefill_tokens + self._dice.randrange(9))
        after = waiting._replace(
            accepted=True, has_run=True, prefill_tokens=tokens, attained_rank=0.0
        )
        return after if tokens == waiting.prefill_tokens else after._replace(ttft_deadline=inf)


def life_of(policy: Policy, floor: float, arrivals: list[Arrival], dice: random.Random) -> Life:
    life = Life(policy, floor, dice)
    life.live(arrivals)
    return life


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@given(arrivals=ARRIVALS, dice=DICE)
def test_bypassed_counts_same_class_requests_that_may_pass(
    arrivals: list[Arrival], dice: random.Random, policy: Policy
) -> None:
    """Each later request counts once, however often either of the two is queued again.

    Any later request may pass a parked one.
    """
    life = life_of(policy, 0.1, arrivals, dice)
    for number, waiting in enumerate(life.received):
        wait_stats, later = life.wait_stats[waiting.request_id], life.received[number + 1 :]
        same = [it for it in later if it.priority == waiting.priority]
        free = [it for it in same if any(it in queue_wait.free for queue_wait in wait_stats)]
        before = [it for it in same if any(it in queue_wait.before for queue_wait in wait_stats)]
        passed = [*free, *(it for it in before if it not in free)]
        assert sum(queue_wait.ordered for queue_wait in wait_stats) <= len(passed)
        for other in before:
            assert any(_may_pass(policy, other, queue_wait) for queue_wait in wait_stats)


def _may_pass(policy: Policy, later: Waiting, queue_wait: QueueWait) -> bool:
    """Return whether the policy allows ``later`` to pass the request of ``queue_wait``."""
    waiting = queue_wait.waiting
    behind_s = later.arrived - waiting.arrived - 1e-9
    match policy:
        case EarliestDeadline(undated_s):
            return _due(later, undated_s) <= _due(waiting, undated_s)
        case ShortestWork(ageing_factor):
            return behind_s <= _timeout_s(
                ageing_factor, waiting, waiting.queue_key.predicted_work_rank
            )
        case PredictedRank(ageing_factor):
            return behind_s <= _timeout_s(ageing_factor, waiting, waiting.queue_key.predicted_rank)
        case LeastAttained(ageing_factor):
            return behind_s <= _timeout_s(ageing_factor, waiting, waiting.attained_rank)
        case HighestResponseRatio():
            part = later.queue_key.predicted_total / waiting.queue_key.predicted_total / 2**0.5
            is_shorter = later.queue_key.predicted_total < waiting.queue_key.predicted_total
            waited_s = queue_wait.moment - waiting.arrived
            return behind_s <= (waited_s * (1 - part) if is_shorter else 0.0)
        case StarvationLimit(inner, limit_s):
            return behind_s <= limit_s and _may_pass(inner, later, queue_wait)
    return behind_s <= 0.0


def _timeout_s(ageing_factor: float, waiting: Waiting, rank: float) -> float:
    return ageing_factor * waiting.queue_key.estimated_wait_s * -log(1 - rank)


def _due(waiting: Waiting, undated_s: float) -> float:
    return waiting.due if waiting.due < inf else waiting.arrived + undated_s


@given(ARRIVALS, FLOORS, DICE)
def test_bypassed_counts_later_requests_of_higher_classes(
    arrivals: list[Arrival], floor: float, dice: random.Random
) -> None:
    life = life_of(ShortestWork(1.5), floor, arrivals, dice)
    for number, waiting in enumerate(life.received):
        later = sum(it.priority > waiting.priority for it in life.received[number + 1 :])
        assert sum(queue_wait.higher for queue_wait in life.wait_stats[waiting.request_id]) <= later


@given(ARRIVALS, FLOORS, DICE)
def test_bypassed_counts_lower_classes_within_their_floor(
    arrivals: list[Arrival], floor: float, dice: random.Random
) -> None:
    """Lower classes receive at most their floor of the tokens above them, plus earlier credit."""
    life = life_of(ShortestWork(1.5), floor, arrivals, dice)
    for queue_wait in (it for wait_stats in life.wait_stats.values() for it in wait_stats):
        lower = 0
        for priority in range(CLASSES[0], queue_wait.waiting.priority):
            owed = queue_wait.owed.get(priority, 0.0)
            assert owed <= (1 + floor) ** (CLASSES[-1] - priority) * LONGEST
            tokens = [it.work_tokens for it in queue_wait.before if it.priority == priority]
            left = queue_wait.before + queue_wait.free
            above = sum(it.work_tokens for it in left if it.priority > priority)
            assert sum(tokens) <= owed + floor * above + 1e-6
            lower += len(tokens) + sum(it.priority == priority for it in queue_wait.free)
        assert queue_wait.lower <= lower
