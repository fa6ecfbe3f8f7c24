"""Order in which requests leave by each policy, and the bounds for those that others pass."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, inf, log
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.messages import BATCH_PRIORITY
from router.admission.parking import Wait
from router.admission.policy import (
    ORDERS,
    EarliestDeadline,
    Fifo,
    HighestResponseRatio,
    LeastAttained,
    Policy,
    PredictedRank,
    ShortestWork,
    StarvationLimit,
    policy_of,
)
from router.admission.queue import AdmissionQueue
from router.admission.request import QueueKey, Waiting
from router.admission.wait_stats import bypassed
from router.config import Order, RouterConfig
from tests.support.router.admission_support import POLICIES

#: Requests: seconds since the previous arrival, tokens, seconds to the deadline, class.
ARRIVALS = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 400), st.none() | st.floats(0, 20), st.just(0)),
    min_size=1,
    max_size=60,
)


def waiting(request_id: str, arrived: float = 0.0, tokens: int = 10, **fields: object) -> Waiting:
    made = Waiting(
        request_id,
        "g",
        arrived,
        tokens,
        max_tokens=5,
        queue_key=QueueKey(tokens, min(tokens, 400) / 401, min(tokens, 400) / 401, 10.0),
        attained_rank=min(tokens, 400) / 401,
    )
    return made._replace(**fields)  # type: ignore[arg-type]


def with_key(request: Waiting, **fields: float) -> Waiting:
    return request._replace(queue_key=request.queue_key._replace(**fields))  # type: ignore[arg-type]


def drain(queue: AdmissionQueue, moment: float | None = None) -> list[str]:
    return [queue.pop(moment).request_id for _ in range(len(queue))]


def queue_of(policy: Policy, *requests: Waiting, class_floor: float = 0.0) -> AdmissionQueue:
    queue = AdmissionQueue(policy, class_floor)
    for each in requests:
        queue.push(each)
    return queue


def test_policy_of_maps_each_order_name() -> None:
    assert get_args(Order) == ORDERS
    config = RouterConfig(undated_due=7.0, ageing_factor=0.2)
    assert [policy_of(order, config) for order in ORDERS] == [
        Fifo(),
        EarliestDeadline(7.0),
        ShortestWork(0.2),
        PredictedRank(0.2),
        HighestResponseRatio(),
        LeastAttained(0.2),
    ]
    assert [policy_of(order, config).name for order in ORDERS] == list(ORDERS)
    limited = policy_of("shortest", replace(config, starvation=3.0))
    assert limited == StarvationLimit(ShortestWork(0.2), 3.0)
    assert limited.name == "shortest"


def test_policies_with_the_same_order_name_have_the_same_order() -> None:
    dice = random.Random(3)
    requests = [
        waiting(str(n), dice.random(), dice.randrange(999), deadline=dice.choice([inf, 2.0]))
        for n in range(50)
    ]
    by_name: dict[str, list[object]] = {}
    for policy in (*POLICIES, ShortestWork(0.3), EarliestDeadline(6.0)):
        places = [policy.place(each) for each in requests]
        assert by_name.setdefault(policy.place_name, list(places)) == places
    assert len(by_name) == 6


def test_deadline_order_dates_undated_requests() -> None:
    queue = queue_of(
        EarliestDeadline(60.0),
        waiting("undated, later", 2.0),
        waiting("undated", 1.0),
        waiting("late", 3.0, deadline=90.0),
        waiting("first token soon", 4.0, deadline=95.0, ttft_deadline=20.0),
        waiting("soon", 5.0, deadline=30.0),
        waiting("as soon, and later", 6.0, deadline=30.0),
        waiting("lower class", 0.0, deadline=1.0, priority=-1),
        waiting("higher class", 7.0, priority=1),
    )
    assert drain(queue) == [
        *("higher class", "first token soon", "soon", "as soon, and later"),
        *("undated", "undated, later", "late", "lower class"),
    ]


#: Ranks of an average request, and of one that is ten times shorter.
AVERAGE, SHORT = 1 - exp(-1), 1 - exp(-0.1)


@pytest.mark.parametrize(
    ("policy", "by"),
    [(ShortestWork(2.0), "predicted_work_rank"), (PredictedRank(2.0), "predicted_rank")],
)
def test_shortest_first_yields_to_starved_requests(policy: Policy, by: str) -> None:
    """An average request yields for two estimated waits of 5 s, a short one for a tenth of that."""
    queue = queue_of(
        policy,
        with_key(waiting("long", 0.0), **{by: AVERAGE}, estimated_wait_s=5.0),
        with_key(waiting("short", 1.0), **{by: SHORT}, estimated_wait_s=5.0),
        with_key(waiting("in time", 8.9), **{by: SHORT}, estimated_wait_s=5.0),
        with_key(waiting("too late", 9.1), **{by: SHORT}, estimated_wait_s=5.0),
        with_key(waiting("nothing waited", 9.5), **{by: AVERAGE}, estimated_wait_s=0.0),
    )
    assert drain(queue) == ["short", "nothing waited", "in time", "long", "too late"]


def test_attained_order_prefers_less_served_sessions() -> None:
    """A session that got more than the others yields for two of its estimated waits."""
    queue = queue_of(
        LeastAttained(2.0),
        with_key(waiting("served", 0.0), estimated_wait_s=5.0)._replace(attained_rank=AVERAGE),
        waiting("new", 3.0)._replace(attained_rank=0.0),
        waiting("in time", 9.9)._replace(attained_rank=0.0),
        waiting("too late", 10.1)._replace(attained_rank=0.0),
    )
    assert drain(queue, 20.0) == ["new", "in time", "served", "too late"]


def test_attained_order_is_fifo_without_a_time() -> None:
    """Routers report their requests in this order to a new leader, which has no service yet."""
    requests = [waiting(name, 0.1 * n, 300 - 100 * n) for n, name in enumerate("abc")]
    assert drain(queue_of(LeastAttained(2.0), *requests), 50.0) == ["c", "b", "a"]
    assert drain(queue_of(LeastAttained(2.0), *requests)) == ["a", "b", "c"]


@given(ARRIVALS)
def test_rank_order_is_fifo_without_predictions(
    arrivals: list[tuple[float, int, float | None, int]],
) -> None:
    moment, requests = 0.0, []
    for number, (pause, tokens, _, _) in enumerate(arrivals):
        moment += pause
        requests.append(with_key(waiting(str(number), moment, tokens), predicted_rank=0.0))
    by_rank = sorted(requests, key=PredictedRank(20.0).place)
    assert by_rank == sorted(requests, key=Fifo().place)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@given(arrivals=ARRIVALS, dice=st.randoms(use_true_random=False))
def test_policy_bypass_window_is_respected(
    arrivals: list[tuple[float, int, float | None, int]], dice: random.Random, policy: Policy
) -> None:
    """A request bypasses an older one only within the policy's window, in any queue history."""
    queue = queue_of(policy)
    left: list[tuple[Waiting, float, list[Waiting]]] = []
    here: dict[str, Waiting] = {}
    moment = 0.0
    for number, (pause, tokens, due, _) in enumerate(arrivals):
        moment += pause
        deadline = inf if due is None else moment + due
        one = waiting(str(number), moment, tokens, deadline=deadline)
        queue.push(one)
        here[one.request_id] = one
        while here and dice.random() < 0.4:
            head = queue.peek(moment)
            assert head is not None
            queue_wait = queue.queue_wait(head, policy.name, moment, is_fair=False)
            later = [it for it, *_ in left if int(it.request_id) > int(head.request_id)]
            assert bypassed(queue_wait) == len(later)
            queue.dispatch(head, 0)
            gone = here.pop(head.request_id)
            left.append((gone, moment, [it for it in here.values() if it.arrived < gone.arrived]))
    for gone, moment, passed in left:
        for older in passed:
            window = _window(policy, older, moment, gone.queue_key.predicted_total)
            assert gone.arrived - older.arrived <= window + 1e-9


def _window(policy: Policy, older: Waiting, moment: float, tokens: int) -> float:
    """Return how much later a request of ``tokens`` may arrive and still pass ``older`` at
    ``moment``.
    """
    match policy:
        case EarliestDeadline(undated_s):
            return older.deadline - older.arrived if older.deadline < inf else undated_s
        case ShortestWork(ageing_factor):
            return (
                ageing_factor
                * older.queue_key.estimated_wait_s
                * -log(1 - older.queue_key.predicted_work_rank)
            )
        case PredictedRank(ageing_factor):
            return (
                ageing_factor
                * older.queue_key.estimated_wait_s
                * -log(1 - older.queue_key.predicted_rank)
            )
        case LeastAttained(ageing_factor):
            return ageing_factor * older.queue_key.estimated_wait_s * -log(1 - older.attained_rank)
        case HighestResponseRatio():
            if tokens >= older.queue_key.predicted_total:
                return 0.0
            # The younger request has waited as long per token, up to the rounding of sizes.
            part = tokens / older.queue_key.predicted_total / 2**0.5
            return (moment - older.arrived) * (1.0 - part)
        case StarvationLimit(inner, limit_s):
            waited = moment - older.arrived
            return 0.0 if waited >= limit_s else _window(inner, older, moment, tokens)
    return 0.0


@given(ARRIVALS, st.floats(0, 50))
def test_hrrn_pops_highest_response_ratio_first(
    arrivals: list[tuple[float, int, float | None, int]], pause: float
) -> None:
    """The request with the higher ratio leaves first, up to the rounding of sizes."""
    queue, here, moment = queue_of(HighestResponseRatio()), [], 0.0
    for number, (between, tokens, _, _) in enumerate(arrivals):
        moment += between
        here.append(waiting(str(number), moment, tokens))
        queue.push(here[-1])
    moment += pause
    while here:
        gone = queue.pop(moment)
        here.remove(gone)
        ratio = (moment - gone.arrived) / gone.queue_key.predicted_total
        for other in here:
            assert (
                moment - other.arrived
            ) / other.queue_key.predicted_total <= ratio * 2**0.5 + 1e-9


@given(ARRIVALS, st.randoms(use_true_random=False))
def test_hrrn_keeps_the_place_of_unpredicted_requests(
    arrivals: list[tuple[float, int, float | None, int]], dice: random.Random
) -> None:
    queue, here, moment = queue_of(HighestResponseRatio()), [], 0.0
    for number, (between, tokens, _, _) in enumerate(arrivals):
        moment += between
        total = dice.choice([0, tokens])
        here.append(with_key(waiting(f"{number:02}", moment, tokens), predicted_total=total))
        queue.push(here[-1])
        while here and dice.random() < 0.4:
            gone = queue.pop(moment)
            here.remove(gone)
            unknown = [
                it
                for it in here
                if not (it.queue_key.predicted_total and gone.queue_key.predicted_total)
            ]
            assert all(gone.request_id < it.request_id for it in unknown)


def test_hrrn_is_fifo_without_a_time() -> None:
    """Routers report their requests in this order to a new leader."""
    queue = queue_of(
        HighestResponseRatio(), waiting("a", 1.0, 1000), waiting("b", 2.0, 1), waiting("c", 3.0, 9)
    )
    assert drain(queue) == ["a", "b", "c"]


def test_hrrn_removes_empty_lines() -> None:
    queue = queue_of(HighestResponseRatio(), *(waiting(str(n), 0.0, 2**n) for n in range(20)))
    drain(queue, 9.0)
    queue.push(waiting("a", 10.0))
    assert queue.peek(11.0) == waiting("a", 10.0)
    assert len(queue._classes._lanes[0]._heaps) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_lanes_discard_withdrawn_requests(policy: Policy) -> None:
    queue = queue_of(policy, waiting("stays", -1.0, 1, deadline=1e9))
    for number in range(20_000):
        queue.push(waiting(str(number), float(number), number % 999, deadline=1e6 + number))
        assert queue.withdraw(str(number), "g")
    assert _items(queue) <= 3000
    assert drain(queue, 30_000.0) == ["stays"]


def _items(queue: AdmissionQueue) -> int:
    """Return the number of entries of all heaps of all lanes, including outdated ones."""
    lines = []
    for lane in queue._classes._lanes.values():
        for part in (lane, getattr(lane, "_inner", None)):
            lines += [
                getattr(part, name)
                for name in ("_heap", "_by_arrival", "_by_key", "_by_place")
                if hasattr(part, name)
            ]
            lines += getattr(part, "_heaps", {}).values()
    return sum(len(line._items) for line in lines)


def test_starved_requests_are_popped_first_by_arrival() -> None:
    policy = StarvationLimit(ShortestWork(1000.0), 5.0)
    requests = [waiting(str(n), float(n), 100 - n) for n in range(6)]
    assert queue_of(policy, *requests).peek(4.9) == requests[5]
    queue = queue_of(policy, *requests)
    assert [queue.pop(6.0).request_id for _ in range(3)] == ["0", "1", "5"]


def test_class_floor_gives_lower_class_its_share_of_work() -> None:
    queue, served = AdmissionQueue(Fifo(), 0.1), {0: 0, 1: 0}
    for number in range(400):
        queue.push(waiting(f"high{number}", float(number), 50, priority=1))
        queue.push(waiting(f"low{number}", float(number), 20))
    for _ in range(300):
        gone = queue.pop(500.0)
        served[gone.priority] += gone.work_tokens
    assert 0.1 * served[1] - 20 <= served[0] <= 0.1 * served[1]


def test_class_floor_of_zero_ends_earned_credit() -> None:
    """Otherwise, a class would never spend the credit and would always precede higher classes."""
    queue = AdmissionQueue(Fifo(), 0.5)
    for number in range(4):
        queue.push(waiting(f"high{number}", float(number), 50, priority=1))
        queue.push(waiting(f"low{number}", float(number), 5))
    assert queue.pop(500.0).request_id == "high0"
    head = queue.peek(500.0)
    assert head is not None and head.request_id == "low0"
    queue.class_floor = 0.0
    assert drain(queue, 500.0) == [f"{it}{n}" for it in ("high", "low") for n in range(4)][1:]


def test_class_floor_gives_parked_requests_no_credit() -> None:
    queue = AdmissionQueue(Fifo(), 0.5)
    for number in range(40):
        queue.push(waiting(f"high{number}", float(number), 50, priority=1))
    queue.push(waiting("parked", 0.0, 5))
    queue.park("parked", Wait("", 0, 0.0, 0.0, 1.0))
    for _ in range(20):
        queue.pop(500.0)
    for number in range(20):
        queue.push(waiting(f"low{number}", 1.0 + number, 50))
    assert queue.pop(500.0).priority == 1, "the credit of 20 requests would put the class first"
    queue.unpark("parked", 1.0)
    assert [queue.pop(500.0).request_id for _ in range(2)] == ["parked", "high21"]


def test_class_floor_gives_batches_no_share() -> None:
    queue = AdmissionQueue(Fifo(), 0.5)
    for number in range(20):
        queue.push(waiting(f"high{number}", float(number), 50))
        queue.push(waiting(f"batch{number}", float(number), 1, priority=BATCH_PRIORITY))
        queue.push(waiting(f"low{number}", float(number), 50, priority=BATCH_PRIORITY + 1))
    order = drain(queue, 500.0)
    # Only the class above the batches earns a share.
    assert order[40:] == [f"batch{number}" for number in range(20)]
    assert order.index("low0") < order.index("high19")


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 100)), min_size=1, max_size=150),
    st.sampled_from([0.0, 0.05, 0.2]),
    st.randoms(use_true_random=False),
)
def test_class_floor_owes_at_most_one_request(
    arrivals: list[tuple[int, int]], floor: float, dice: random.Random
) -> None:
    queue = AdmissionQueue(Fifo(), floor)
    owed: dict[int, float] = {}
    here: list[Waiting] = []
    for number, (priority, tokens) in enumerate(arrivals):
        one = waiting(str(number), float(number), tokens, priority=priority)
        queue.push(one)
        here.append(one)
        while here and dice.random() < 0.45:
            gone = queue.pop(1e9)
            here.remove(gone)
            for each in {it.priority for it in (*here, gone)}:
                if each < gone.priority:
                    owed[each] = owed.get(each, 0.0) + floor * gone.work_tokens
            if any(it.priority > gone.priority for it in here):
                assert floor > 0
                owed[gone.priority] -= gone.work_tokens
                assert owed[gone.priority] > -1e-6
            owed = {it.priority: owed.get(it.priority, 0.0) for it in here}
            # The longest request, and the last increase from each of the four other classes.
            assert all(each <= 100 * (1 + 4 * floor) for each in owed.values())


def test_hrrn_is_fifo_if_the_clock_is_behind() -> None:
    """No request has waited yet, however long its output is."""
    queue = queue_of(HighestResponseRatio(), waiting("a", 10.0, 10), waiting("b", 10.1, 1000))
    first = queue.pop(9.9)
    assert (first.request_id, queue.pop(9.9).request_id) == ("a", "b")


def test_pop_without_a_time_orders_by_class_and_key() -> None:
    queue = AdmissionQueue(HighestResponseRatio(), 0.5)
    for number in range(4):
        queue.push(waiting(f"high{number}", float(number), 50, priority=1))
    queue.push(waiting("low", 0.0, 1))
    assert drain(queue) == ["high0", "high1", "high2", "high3", "low"]


def test_requeued_request_does_not_count_as_bypassing() -> None:
    queue = queue_of(Fifo(), waiting("a", 1.0))
    queue.push(waiting("back", 0.0, accepted=True))
    queue.push(waiting("higher", 2.0, priority=1))
    assert [_leave(queue) for _ in range(3)] == [0, 1, 1]


def _leave(queue: AdmissionQueue) -> int:
    """Dispatch the next request; return how many later ones left before it."""
    head = queue.peek()
    assert head is not None
    queue_wait = queue.queue_wait(head, "fifo", 0.0, is_fair=False)
    queue.dispatch(head, 0)
    return bypassed(queue_wait)
