"""State and decisions of a leader, from its election on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from everlift.v1 import inference_pb2
from everlift.v1 import session_pb2 as pb
from router.admission.handover import HandoverSender
from router.admission.model_queue import Placed
from router.admission.policy import Rules, key_of, policy_of
from router.admission.request import Key, Waiting
from router.admission.workers import Capacity, Load
from router.config import Order
from tests.support.router.admission_support import CONFIG, Cluster, waiting

HUGE = Capacity(max_num_seqs=100_000, num_blocks=10_000_000)


def names(cluster: Cluster) -> list[str]:
    return [placed.waiting.request_id for placed in cluster.place()]


def test_leader_state_orders_by_class_then_arrival() -> None:
    cluster = Cluster()
    cluster.connect()
    for name, priority, arrived in (("c", 0, 1.0), ("a", 1, 3.0), ("d", -1, 0.0), ("b", 1, 4.0)):
        cluster.enqueue(name, priority=priority, arrived=arrived, accepted=True)
    cluster.add_worker("w", Load(1), capacity=HUGE)
    assert names(cluster) == ["a", "b", "c", "d"]


def test_leader_state_refuses_only_new_requests_when_full() -> None:
    cluster = Cluster()
    cluster.connect()
    entries = [pb.Waiting(request_id=name) for name in ("a", "b", "c", "d", "a")]
    entries.append(pb.Waiting(request_id="adopted", accepted=True))
    assert cluster.receive(pb.GatewayMessage(enqueue=entries)) == (["d"], [])
    assert cluster.leader_state.queued == 4


def test_requeued_or_withdrawn_request_is_no_longer_running() -> None:
    cluster = Cluster()
    cluster.connect()
    for name in ("a", "b", "c"):
        cluster.runs(name, "w")
    cluster.enqueue("a")
    cluster.receive(pb.GatewayMessage(withdraw=["b"]))
    cluster.receive(pb.GatewayMessage(withdraw=["c"]), gateway="stranger")
    assert (cluster.leader_state.running, cluster.leader_state.queued) == (1, 1)
    cluster.runs("a", "w")
    assert (cluster.leader_state.running, cluster.leader_state.queued) == (2, 0)
    cluster.leader_state.disconnect("g")
    assert cluster.leader_state.running == 0


def test_withdrawn_request_reports_its_wait_and_cause() -> None:
    cluster = Cluster()
    cluster.connect()
    cluster.leader_state.note_workers(0.0)
    for name in ("a", "b"):
        cluster.enqueue(name)
    cluster.add_worker("w", Load(1))
    cluster.leader_state.note_workers(3.0)
    cluster.leader_state.place(3.0, 3.0, 1, lambda: 7)
    message = pb.GatewayMessage(withdraw=["a", "b", "stranger"])
    assert not cluster.leader_state.on_message("other", message, 4.0).withdrawn
    (withdrawn,) = cluster.leader_state.on_message("g", message, 5.0).withdrawn
    queue = inference_pb2.QueueBypass(found=1, earlier=1, order="fifo", before=["a"])
    queue_wait = pb.QueueWait(seconds=5.0, no_worker_s=3.0, queue=queue)
    assert withdrawn == pb.Withdrawn(request_id="b", queue_wait=queue_wait)
    assert not cluster.leader_state.on_message("g", message, 6.0).withdrawn


def test_dispatch_runs_for_the_gateway_in_the_ledger() -> None:
    cluster = Cluster()
    cluster.connect()
    cluster.enqueue("r")
    cluster.add_worker("w", Load(1))
    (placed,) = cluster.leader_state.place(0.0, 0.0, 1, lambda: 7)
    cluster.leader_state.on_dispatched(placed, "owner")
    cluster.leader_state.disconnect("g")
    assert cluster.leader_state.running == 1
    cluster.leader_state.disconnect("owner")
    assert cluster.leader_state.running == 0


def reserve(cluster: Cluster, request_id: str = "new", **fields: object) -> Placed | None:
    return cluster.leader_state.reserve(waiting(request_id, **fields), 0.0, lambda: 7)


def test_request_avoiding_the_only_free_worker_blocks_no_other() -> None:
    cluster = Cluster()
    cluster.connect()
    full = Load(1, num_running=4, num_waiting=2)
    for name, load in (("free", Load(1)), ("full", full)):
        cluster.add_worker(name, load)
    cluster.enqueue("first", avoid="free", attempt=1, accepted=True)
    cluster.enqueue("second", arrived=1.0)
    assert [(it.waiting.request_id, it.worker_id) for it in cluster.place()] == [("second", "free")]
    # The request takes the next capacity of another worker before all that were queued later.
    cluster.enqueue("third", arrived=2.0)
    cluster.placement.report("free", Load(2, num_running=4, num_waiting=2), 0.1)
    cluster.placement.report("full", Load(2, num_running=4, num_waiting=1), 0.1)
    assert [(it.waiting.request_id, it.worker_id) for it in cluster.place(0.1)] == [
        ("first", "full")
    ]


def test_parked_requests_are_tried_by_class_and_block_no_other() -> None:
    cluster = Cluster()
    cluster.connect()
    for name, load in (("free", Load(1)), ("full", Load(1, num_running=4, num_waiting=2))):
        cluster.add_worker(name, load)
    avoiding: dict[str, Any] = {"avoid": "free", "attempt": 1, "accepted": True}
    cluster.enqueue("unserved", adapter="sql", accepted=True)
    for name, priority in (("low", 0), ("high", 1)):
        assert not cluster.place()
        cluster.enqueue(name, priority=priority, **avoiding)
    assert not cluster.place()
    cluster.placement.report("full", Load(2, num_running=4, num_waiting=1), 0.1)
    assert [(it.waiting.request_id, it.worker_id) for it in cluster.place(0.1)] == [
        ("high", "full")
    ]


def test_request_waits_in_order_if_the_avoided_worker_is_full() -> None:
    cluster = Cluster()
    cluster.connect()
    for name in ("a", "b"):
        cluster.add_worker(name, Load(1, num_running=4, num_waiting=2))
    cluster.enqueue("first", avoid="a", attempt=1, accepted=True)
    cluster.enqueue("second", arrived=1.0)
    assert not cluster.place()
    cluster.placement.report("b", Load(2, num_running=4, num_waiting=1), 0.1)
    assert names(cluster) == ["first"]


def test_reserve_places_request_if_queue_is_empty() -> None:
    cluster = Cluster()
    cluster.connect()
    assert reserve(cluster) is None
    cluster.add_worker("w", Load(1))
    placed = reserve(cluster)
    assert placed is not None and (placed.worker_id, placed.epoch) == ("w", 7)
    assert cluster.queue.offered_tokens == placed.waiting.work_tokens
    cluster.leader_state.on_dispatched(placed, "g")
    assert (cluster.leader_state.running, cluster.leader_state.queued) == (1, 0)


def test_reservation_counts_until_it_is_released() -> None:
    cluster = Cluster()
    cluster.connect()
    cluster.add_worker("w", Load(1))
    epochs = iter(range(1, 100))
    reserved = [
        cluster.leader_state.reserve(waiting(f"r{n}"), 0.0, lambda: next(epochs)) for n in range(5)
    ]
    assert [it is not None for it in reserved] == [True] * 4 + [False]
    assert reserved[0] is not None
    offered = cluster.queue.offered_tokens
    cluster.leader_state.cancel_reservation(reserved[0])
    assert cluster.queue.offered_tokens == offered - reserved[0].waiting.work_tokens
    assert cluster.leader_state.reserve(waiting("again"), 0.0, lambda: 99) is not None


def test_reserve_fails_behind_queued_or_preempted_requests() -> None:
    cluster = Cluster()
    cluster.connect()
    cluster.add_worker("w", Load(1))
    cluster.enqueue("waits")
    assert reserve(cluster) is None
    assert names(cluster) == ["waits"]
    assert reserve(cluster) is not None
    cluster.runs("preempted", "w", preempted=True)
    assert reserve(cluster, "other") is None


def test_reserve_fails_until_handover_completes() -> None:
    cluster = Cluster()
    cluster.add_worker("w", Load(1))
    cluster.leader_state.connect("g", 0.0)
    assert reserve(cluster) is None
    cluster.receive(pb.GatewayMessage(is_complete=True))
    assert reserve(cluster) is not None


def test_dispatch_waits_until_handover_order_is_known() -> None:
    cluster = Cluster()
    cluster.add_worker("w", Load(1), capacity=HUGE)
    cluster.leader_state.connect("g", 0.0)
    cluster.enqueue("b", arrived=2.0, accepted=True)
    cluster.connect("other")
    cluster.enqueue("c", gateway="other", arrived=3.0)
    assert names(cluster) == ["b"]
    assert names(cluster) == []
    cluster.receive(pb.GatewayMessage(is_complete=True))
    assert names(cluster) == ["c"]


def key(order: Order, waiting: Waiting) -> Key:
    return key_of(policy_of(order, CONFIG), waiting)


class Handover:
    """Gateway with requests, ``late`` of which arrive while it hands over the others."""

    def __init__(
        self, name: str, waiting: list[tuple[int, float]], late: int, order: Order
    ) -> None:
        self.name = name
        self.waiting: dict[str, Waiting] = {}
        for priority, arrived in waiting:
            request_id = f"{name}{len(self.waiting)}"
            self.waiting[request_id] = Waiting(
                request_id,
                name,
                arrived,
                prefill_tokens=0,
                max_tokens=0,
                priority=priority,
                accepted=True,
                deadline=arrived * 7 % 11 or inf,
            )
        self.late = [self.waiting[name] for name in list(self.waiting)[:late]]
        early = [it for it in self.waiting.values() if it not in self.late]
        early.sort(key=lambda it: key(order, it))
        self.sender = HandoverSender(name, early, (), "", policy_of(order, CONFIG))

    def parts(self) -> Iterator[pb.GatewayMessage]:
        while self.sender:
            yield self.sender.next_message()
            if self.late:
                self.sender.enqueue(self.late.pop())


@given(
    st.lists(
        st.lists(st.tuples(st.integers(-1, 1), st.floats(0, 100)), max_size=40),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
    st.sampled_from(["fifo", "deadline"]),
)
def test_order_holds_however_gateways_interleave(
    gateways: list[list[tuple[int, float]]], late: int, dice: random.Random, order: Order
) -> None:
    """Requests that arrive during the handover may leave out of order; all others may not."""
    with patch.multiple("router.admission.handover", _FIRST_SIZE=1, _MAX_SIZE=3):
        _check_handover_order(gateways, late, dice, order)


def _check_handover_order(
    gateways: list[list[tuple[int, float]]], late: int, dice: random.Random, order: Order
) -> None:
    cluster = Cluster(replace(CONFIG, order=order))
    cluster.add_worker("w", Load(1), capacity=HUGE)
    handovers = [Handover(f"g{n}-", waiting, late, order) for n, waiting in enumerate(gateways)]
    cluster.leader_state.handover.set_live_gateways([handover.name for handover in handovers])
    late_ones = {it.request_id for handover in handovers for it in handover.late}
    sending = {handover.name: handover.parts() for handover in handovers}
    sent: list[str] = []
    left: list[str] = []
    while sending:
        name = dice.choice(sorted(sending))
        part = next(sending[name], None)
        if part is None:
            del sending[name]
        elif part.router_id:
            cluster.leader_state.connect(name, 0.0)
        if part is not None:
            sent.extend(it.request_id for it in part.enqueue)
            cluster.receive(part, name)
        left.extend(names(cluster))
    everything = {k: v for handover in handovers for k, v in handover.waiting.items()}
    assert sorted(sent) == sorted(left) == sorted(everything)
    in_time = [name for name in left if name not in late_ones]
    assert in_time == sorted(in_time, key=lambda name: key(order, everything[name]))


def obey(cluster: Cluster, order: Order = "fifo", max_queued: int = 100) -> None:
    for _ in cluster.leader_state.apply_rules(
        Rules.of(replace(CONFIG, order=order, max_queued=max_queued)), now=0.0
    ):
        pass


def test_rules_change_fair_share_and_class_floor_while_queued() -> None:
    cluster = Cluster(weight_of=lambda tenant: 1.0)
    cluster.connect()
    for number in range(12):
        tenant = "a" if number < 8 else "b"
        cluster.enqueue(f"{tenant}/{number}", arrived=float(number), accepted=True)
    cluster.enqueue("a/low", priority=-1, accepted=True)
    cluster.add_worker("w", Load(1), capacity=HUGE)

    def leave(rules: Rules) -> list[str]:
        for _ in cluster.leader_state.apply_rules(rules, now=0.0):
            pass
        placed = cluster.leader_state.place(1.0, 20.0, 4, lambda: 7)
        return [it.waiting.request_id for it in placed]

    by_turns = Rules.of(CONFIG)
    assert leave(replace(by_turns, fair_share=False)) == ["a/0", "a/1", "a/2", "a/3"]
    assert leave(by_turns) == ["b/8", "b/9", "b/10", "b/11"]
    assert leave(replace(by_turns, class_floor=0.5)) == ["a/4", "a/5", "a/low", "a/6"]


def test_reservation_is_charged_when_confirmed() -> None:
    cluster = Cluster(weight_of=lambda tenant: 1.0)
    cluster.connect()
    cluster.add_worker("w", Load(1), capacity=HUGE)
    kept, given_back = reserve(cluster, "a/1"), reserve(cluster, "b/1")
    assert kept is not None and given_back is not None
    cluster.leader_state.confirm_reservation(kept, "g", 0.0)
    cluster.leader_state.cancel_reservation(given_back)
    assert cluster.leader_state.running == 1
    for name in ("a/2", "b/2"):
        cluster.enqueue(name)
    assert cluster.queue.service_gap == kept.waiting.prefill_tokens


def test_attained_order_counts_prompts_and_reported_outputs() -> None:
    cluster = Cluster(replace(CONFIG, order="attained", max_queued=100))
    cluster.connect()
    cluster.add_worker("w", Load(1), capacity=HUGE)
    reserved = reserve(cluster, "0", session=1, prefill_tokens=400)
    assert reserved is not None
    cluster.leader_state.confirm_reservation(reserved, "g", 0.0)
    cluster.enqueue("1", session=2, prompt_tokens=50)
    assert names(cluster) == ["1"]
    cluster.receive(pb.GatewayMessage(session_outputs=[pb.SessionOutput(session=3, tokens=100)]))
    for number, session in enumerate((1, 3, 2, 0)):
        cluster.enqueue(
            f"next of {session}", session=session, estimated_wait_s=9.0, arrived=0.01 * number
        )
    assert names(cluster) == [f"next of {session}" for session in (0, 2, 3, 1)]


def test_attained_order_does_not_hold_back_returning_requests() -> None:
    cluster = Cluster(replace(CONFIG, order="attained", max_queued=100))
    cluster.connect()
    cluster.receive(pb.GatewayMessage(session_outputs=[pb.SessionOutput(session=1, tokens=100)]))
    cluster.enqueue("other", arrived=2.0, estimated_wait_s=9.0)
    cluster.enqueue("new", session=1, arrived=1.0, estimated_wait_s=9.0)
    cluster.enqueue("lost its worker", session=1, arrived=1.5, estimated_wait_s=9.0, attempt=1)
    cluster.add_worker("w", Load(1), capacity=HUGE)
    assert names(cluster) == ["lost its worker", "other", "new"]


def test_rules_reorder_already_queued_requests() -> None:
    cluster = Cluster()
    cluster.connect()
    for name, arrived, deadline in (("a", 1.0, 0.0), ("b", 2.0, 50.0), ("c", 3.0, 40.0)):
        cluster.enqueue(name, arrived=arrived, deadline=deadline)
    obey(cluster, "deadline")
    cluster.enqueue("d", arrived=4.0, deadline=30.0)
    cluster.add_worker("w", Load(1), capacity=HUGE)
    assert names(cluster) == ["d", "c", "b", "a"]


def test_rules_change_queue_limit_for_new_requests() -> None:
    cluster = Cluster()
    cluster.connect()
    for name in "abc":
        cluster.enqueue(name)
    obey(cluster, max_queued=2)
    entries = [pb.Waiting(request_id="d"), pb.Waiting(request_id="a", accepted=True)]
    assert cluster.receive(pb.GatewayMessage(enqueue=entries)) == (["d"], [])
    assert cluster.leader_state.queued == 3


def test_handover_does_not_await_gateway_in_another_order() -> None:
    """The gateway's next report may precede its last one."""
    cluster = Cluster(replace(CONFIG, order="deadline"))
    cluster.add_worker("w", Load(1), capacity=HUGE)
    cluster.leader_state.connect("g", 0.0)
    cluster.enqueue("a", deadline=9.0, accepted=True)
    cluster.enqueue("b", deadline=5.0, accepted=True)
    entry = pb.Waiting(request_id="c", deadline=7.0, choices=1, accepted=True)
    cluster.leader_state.connect("other", 0.0)
    cluster.receive(pb.GatewayMessage(order="fifo", enqueue=[entry]), "other")
    assert names(cluster) == ["b", "c", "a"]


def test_handover_is_not_awaited_after_order_change() -> None:
    cluster = Cluster()
    cluster.add_worker("w", Load(1), capacity=HUGE)
    cluster.leader_state.connect("g", 0.0)
    cluster.receive(pb.GatewayMessage(order="fifo"))
    for name, deadline in (("b", 9.0), ("a", 5.0)):
        cluster.enqueue(name, deadline=deadline, accepted=True)
    obey(cluster, "deadline")
    assert names(cluster) == ["a", "b"]


def test_move_order_prefers_earlier_deadline_over_arrival() -> None:
    cluster = Cluster(replace(CONFIG, order="deadline"))
    cluster.connect()
    cluster.runs("old", "home", preempted=True, arrived=1.0)
    cluster.runs("due", "home", preempted=True, arrived=2.0, due=50.0)
    moving = cluster.queue._move_policy.candidates(
        cluster.queue._running.preempted(), None, cluster.queue._key
    )
    assert [running.request_id for running, _ in moving] == ["due", "old"]


def test_attained_rank_is_kept_when_a_request_is_reported_again() -> None:
    cluster = Cluster(replace(CONFIG, order="attained", max_queued=100))
    cluster.connect()
    cluster.receive(pb.GatewayMessage(session_outputs=[pb.SessionOutput(session=7, tokens=100)]))
    cluster.enqueue("a", session=7)
    before = cluster.queue._queue.get("a", "g")
    cluster.receive(pb.GatewayMessage(session_outputs=[pb.SessionOutput(session=7, tokens=900)]))
    for number in range(9):
        cluster.enqueue(f"other{number}")
    cluster.enqueue("a", session=7)
    after = cluster.queue._queue.get("a", "g")
    assert before is not None and after is not None
    assert before.attained_rank == after.attained_rank > 0
