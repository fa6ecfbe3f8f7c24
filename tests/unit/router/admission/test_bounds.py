"""Refusals of new and queued requests by a leader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from everlift.step_time import StepSize
from everlift.v1 import session_pb2 as pb
from router.admission.load_shedding import Refusal
from router.admission.policy import Rules
from router.admission.workers import Load
from tests.support.router.admission_support import CONFIG, Cluster, paced

FULL = Load(1, num_running=4, num_waiting=2)


def cluster(weight_of: Callable[[str], float] | None = None, **settings: object) -> Cluster:
    """Return a cluster with one full worker, which computes 100 tokens per second."""
    made = Cluster(replace(CONFIG, **settings), weight_of)
    made.connect()
    throughput = paced()
    throughput.full_rate = 100.0
    made.add_worker("w", FULL, throughput)
    made.leader_state.update_estimates(0.0)
    return made


def learned(**settings: object) -> Cluster:
    """Return the same cluster with known step times: 25 ms for steps of any size."""
    made = cluster(**settings)
    worker = made.placement.workers["w"]
    worker.throughput = paced(tokens_per_s=1000.0, rows_per_s=100.0)
    worker.throughput.full_rate = 100.0
    for size in range(1, 20):
        worker.step_time.observe(StepSize(size, size, size, size), 0.025)
    worker.step_time.refit()
    made.leader_state.update_estimates(0.0)
    return made


def refusal(cluster: Cluster, **fields: object) -> Refusal:
    entry = pb.Waiting(**{"request_id": "late", "prompt_tokens": 100, "choices": 1} | fields)
    (refused,) = cluster.leader_state.on_message(
        "g", pb.GatewayMessage(enqueue=[entry]), 0.0
    ).refused
    return refused


def come(cluster: Cluster, name: str, **fields: object) -> dict[str, str]:
    """Add a request; return the refused requests and their errors."""
    entry = pb.Waiting(**{"request_id": name, "prompt_tokens": 100, "choices": 1} | fields)
    effects = cluster.leader_state.on_message("g", pb.GatewayMessage(enqueue=[entry]), 0.0)
    return {refusal.waiting.request_id: refusal.slug for refusal in effects.refused}


def expired(cluster: Cluster, moment: float) -> dict[str, str]:
    return {it.waiting.request_id: it.slug for it in cluster.leader_state.expire(moment)}


def test_full_queue_sheds_newest_of_lowest_class_for_higher() -> None:
    full = cluster()
    for name, priority in (("a", 0), ("b", -1), ("c", -1)):
        assert come(full, name, priority=priority) == {}
    assert come(full, "d", priority=-1) == {"d": "queue_full"}
    assert come(full, "e", priority=5) == {"c": "shed"}
    assert come(full, "f", priority=5) == {"b": "shed"}
    assert come(full, "g", priority=0) == {"g": "queue_full"}
    assert full.leader_state.queued == 3


def test_accepted_request_is_never_refused_on_arrival() -> None:
    full = cluster(refuse_late=True)
    for number in range(5):
        assert come(full, f"r{number}", attempt=1, accepted=True) == {}
    assert come(full, "accepted", accepted=True, ttft_deadline=0.1) == {}
    assert come(full, "high", priority=1) == {"accepted": "shed"}


def test_queue_ttl_refuses_requests_that_never_ran() -> None:
    some = cluster(queue_ttl=5.0)
    come(some, "a", arrived=0.0)
    come(some, "b", arrived=1.0, attempt=1, accepted=True)
    come(some, "c", arrived=2.0)
    assert expired(some, 4.9) == {}
    assert expired(some, 6.9) == {"a": "queue_timeout"}
    assert expired(some, 100.0) == {"c": "queue_timeout"}
    assert some.leader_state.queued == 1


def test_changed_wait_bound_holds_for_later_arrivals() -> None:
    some = cluster()
    come(some, "a", predicted_tokens=400)
    assert come(some, "late", ttft_deadline=3.9) == {}
    for _ in some.leader_state.apply_rules(
        replace(Rules.of(CONFIG), queue_ttl=5.0, refuse_late=True), now=0.0
    ):
        pass
    come(some, "b", arrived=2.0)
    assert come(some, "too late", ttft_deadline=3.9) == {"too late": "deadline_unmeetable"}
    assert expired(some, 100.0) == {"b": "queue_timeout"}
    assert some.leader_state.queued == 2


def test_bounds_refuse_late_first_token_if_configured() -> None:
    strict, lenient = cluster(refuse_late=True), cluster()
    for some in (strict, lenient):
        come(some, "a", predicted_tokens=400)
    # Five seconds of work are queued, so a request waits for at least 4 s. Its prompt takes 0.1 s.
    assert come(strict, "b", ttft_deadline=3.9) == {"b": "deadline_unmeetable"}
    assert come(strict, "c", deadline=3.9) == {"c": "deadline_unmeetable"}
    assert come(strict, "d", ttft_deadline=4.2) == {}
    assert come(lenient, "b", ttft_deadline=3.9) == {}
    assert expired(strict, 4.2) == {"d": "queue_timeout"}
    assert expired(lenient, 1000.0) == {}


def test_bounds_refuse_late_output_if_configured() -> None:
    """The wait is at least 4 s, the prompt takes 30 ms, and the output 100 steps of 20 ms."""
    strict, lenient = learned(refuse_late=True), learned()
    for some in (strict, lenient):
        come(some, "a", predicted_tokens=400)
    assert come(strict, "b", deadline=6.0, least_tokens=101) == {"b": "deadline_unmeetable"}
    assert come(strict, "c", deadline=6.2, least_tokens=101) == {}
    assert come(strict, "d", deadline=6.0) == {}, "it may end with its first token"
    assert come(lenient, "b", deadline=6.0, least_tokens=101) == {}
    assert expired(strict, 4.13) == {}
    assert expired(strict, 4.15) == {"c": "queue_timeout"}
    assert expired(strict, 5.93) == {}
    assert expired(strict, 5.95) == {"d": "queue_timeout"}


def test_refusal_reports_output_length_that_would_be_late() -> None:
    strict = learned(refuse_late=True)
    come(strict, "a", predicted_tokens=400)
    refusals = [refusal(strict, deadline=it, least_tokens=101) for it in (4.0, 6.0)]
    assert [it.least_tokens for it in refusals] == [0, 101], "of the first not a token would come"
    assert refusals[1].retry_after_s == pytest.approx(0.03, abs=0.01)


def test_long_output_is_refused_even_with_an_empty_queue() -> None:
    idle = learned(refuse_late=True)
    assert refusal(idle, deadline=1.9, least_tokens=101).retry_after_s == 0.0
    assert come(idle, "b", deadline=2.1, least_tokens=101) == {}
    assert come(idle, "c", prompt_tokens=50_000, priority=1, deadline=2.1) == {}, "it may be known"
    assert expired(idle, 0.0) == {}


def test_idle_cluster_keeps_request_that_it_can_start_in_time() -> None:
    """The prompt takes 0.6 s; a request behind others must leave 1.2 s before its deadline."""
    idle = Cluster(replace(CONFIG, refuse_late=True))
    idle.connect()
    throughput = paced(tokens_per_s=1000.0)
    throughput.full_rate = 1000.0
    idle.add_worker("w", Load(1), throughput)
    idle.leader_state.update_estimates(0.0)
    assert come(idle, "a", prompt_tokens=600, ttft_deadline=1.0) == {}
    assert expired(idle, 0.0) == {}
    assert come(idle, "b", prompt_tokens=600, ttft_deadline=1.5) == {}
    assert expired(idle, 0.3) == {"b": "queue_timeout"}
    assert expired(idle, 0.98) == {"a": "queue_timeout"}


def test_queue_estimate_learns_from_reported_tpot_ratios() -> None:
    some = learned()
    before = some.queue.queue_estimate().least_tpot_s
    some.receive(pb.GatewayMessage(tpot_ratios=[pb.TpotRatio(ratio=0.4)] * 100))
    assert some.queue.queue_estimate().least_tpot_s == pytest.approx(before / 2, rel=0.1)


def test_refusal_retry_after_is_when_queue_is_short_enough() -> None:
    strict = cluster(refuse_late=True)
    come(strict, "a", predicted_tokens=400)
    assert refusal(strict, ttft_deadline=1.0).retry_after_s == pytest.approx(3.1, abs=0.01)


def test_deadline_check_counts_only_work_ahead_of_the_class() -> None:
    strict = cluster(refuse_late=True)
    come(strict, "a", predicted_tokens=400)
    assert come(strict, "b", priority=1, ttft_deadline=0.5) == {}


def test_fair_bound_ignores_flood_of_another_tenant() -> None:
    weights = {"heavy": 4.0}
    crowded = cluster(weight_of=lambda it: weights.get(it, 1.0), refuse_late=True, max_queued=1000)
    for number in range(100):
        come(crowded, f"flood/{number}")
    assert come(crowded, "flood/late", ttft_deadline=20.0) == {"flood/late": "deadline_unmeetable"}
    assert come(crowded, "light/1", ttft_deadline=0.5) == {}
    # The tenant has 1 s of queued work, and two tenants alternate: at least 1.6 s, and the prompt.
    assert come(crowded, "light/2", ttft_deadline=1.6) == {"light/2": "deadline_unmeetable"}
    assert come(crowded, "light/3", ttft_deadline=1.8) == {}
    crowded.receive(pb.GatewayMessage(withdraw=["light/1", "light/3"]))
    come(crowded, "higher/1", priority=1, predicted_tokens=100)
    assert come(crowded, "light/4", ttft_deadline=1.6) == {"light/4": "deadline_unmeetable"}
    assert come(crowded, "light/5", ttft_deadline=1.8) == {}
    crowded.receive(pb.GatewayMessage(withdraw=["light/5", "higher/1"]))
    # The tenant's own work takes 1 s, and the flood's share 0.25 s, by weight.
    assert come(crowded, "heavy/1") == {}
    assert come(crowded, "heavy/2", ttft_deadline=1.0) == {"heavy/2": "deadline_unmeetable"}
    assert come(crowded, "heavy/3", ttft_deadline=1.2) == {}


def test_deadline_check_accepts_if_throughput_is_unknown() -> None:
    strict = Cluster(replace(CONFIG, refuse_late=True))
    strict.connect()
    come(strict, "a", predicted_tokens=400)
    assert come(strict, "b", ttft_deadline=0.1) == {}


def test_queue_estimate_reports_wait_and_work_by_class() -> None:
    some = cluster()
    assert some.queue.queue_estimate() == pb.QueueEstimate(tokens_per_s=100.0)
    come(some, "a", priority=1, predicted_tokens=100)
    come(some, "b", priority=-1, predicted_tokens=100)
    some.leader_state.update_estimates(0.2)
    queue_estimate = some.queue.queue_estimate()
    assert queue_estimate.lowest == -1
    waits = [(it.priority, it.wait_s, it.work_tokens) for it in queue_estimate.waits]
    assert waits == [(1, pytest.approx(1.6), 200), (-1, pytest.approx(3.2), 400)]


def test_dispatch_carries_predicted_wait_and_ttft() -> None:
    some = cluster()
    come(some, "a", predicted_tokens=400)
    come(some, "b")
    some.placement.report("w", Load(2), 1.0)
    first, second = some.place(1.0, 1.0)
    assert (first.waiting.predicted_wait_s, second.waiting.predicted_wait_s) == (0.0, 5.0)
    assert second.waiting.predicted_ttft_s == pytest.approx(5.1, abs=0.01)
