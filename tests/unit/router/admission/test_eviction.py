"""Eviction of running requests by a higher class that would otherwise miss its deadline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.admission.throughput import ThroughputEstimator
from router.admission.workers import Load
from router.config import RouterConfig
from tests.support.router.admission_support import CONFIG, Cluster, paced

FULL = Load(1, num_running=4, num_waiting=2, blocks_used=60)


def test_eviction_comes_in_time_despite_an_avoided_worker() -> None:
    cluster = full()
    cluster.add_worker("free", Load(1), paced())
    cluster.enqueue("high", priority=1, ttft_deadline=10.0, avoid="free", attempt=1, accepted=True)
    times = [9.0 + 0.05 * tick for tick in range(20)]
    assert any(placed.victims for at in times for placed in cluster.place(at, ledger_now=at))


def full(
    load: Load = FULL, throughput: ThroughputEstimator | None = None, config: RouterConfig = CONFIG
) -> Cluster:
    """Return a cluster whose only worker runs four requests; two more wait there."""
    cluster = Cluster(config)
    cluster.add_worker("w", load, throughput or paced())
    cluster.connect()
    for number, name in enumerate("abcd"):
        cluster.runs(name, "w", known_tokens=400 - number)
    for name in "ef":
        cluster.runs(name, "w", known_tokens=1)
    cluster.slots["w"] = list("abcd")
    return cluster


def victims(cluster: Cluster, now: float = 0.0) -> list[str]:
    """Place the next request; return its victims."""
    (placed,) = cluster.place(ledger_now=now)
    assert placed.waiting.request_id == "high"
    return [victim.request_id for victim in placed.victims]


def test_eviction_starts_when_first_token_would_be_late() -> None:
    cluster = full()
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    assert not cluster.place(ledger_now=9.0)
    assert victims(cluster, now=9.6) == ["d"]


def test_eviction_starts_earlier_if_blocks_free_slowly() -> None:
    cluster = full(Load(1, num_running=4, num_waiting=2, blocks_used=100), paced(blocks_per_s=1))
    cluster.enqueue("high", priority=1, ttft_deadline=10.0, prompt_tokens=160)
    assert not cluster.place(ledger_now=3.5)
    assert victims(cluster, now=4.5) == ["d"]


def test_eviction_timing_includes_prefill_time() -> None:
    cluster = full()
    cluster.enqueue("high", priority=1, ttft_deadline=10.0, prompt_tokens=1000)
    assert not cluster.place(ledger_now=8.4)
    assert victims(cluster, now=8.6)


def test_eviction_timing_includes_decode_time_for_deadline() -> None:
    cluster = full()
    cluster.enqueue("high", priority=1, deadline=10.0, max_tokens=500)
    assert not cluster.place(ledger_now=4.4)
    assert victims(cluster, now=4.6)


def test_eviction_starts_earlier_if_steps_are_long() -> None:
    cluster = full(throughput=paced(step_s=0.5))
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    assert not cluster.place(ledger_now=8.2)
    assert victims(cluster, now=8.4) == ["d"]


def test_eviction_timing_includes_prefill_ahead_at_worker() -> None:
    cluster = full(replace(FULL, pending_prefill_tokens=1500))
    cluster.runs("e", "w", priority=1, known_tokens=1000)
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    assert not cluster.place(ledger_now=8.4)
    assert victims(cluster, now=8.6) == ["d", "c"]


def test_eviction_timing_ignores_prefill_of_lower_classes() -> None:
    cluster = full(replace(FULL, pending_prefill_tokens=1500))
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    assert not cluster.place(ledger_now=9.4)
    assert victims(cluster, now=9.6) == ["d"]


def test_eviction_requires_a_future_deadline() -> None:
    for fields in ({}, {"ttft_deadline": 10.0}, {"deadline": 10.0}):
        cluster = full()
        cluster.enqueue("high", priority=1, **fields)
        assert not cluster.place(ledger_now=10.5)


def test_eviction_spares_the_same_class() -> None:
    cluster = full()
    cluster.enqueue("high", priority=0, ttft_deadline=10.0)
    assert not cluster.place(ledger_now=9.9)


def test_eviction_victim_is_of_the_lowest_class() -> None:
    cluster = full()
    cluster.runs("a", "w", priority=-1, known_tokens=900)
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    assert victims(cluster, now=9.9) == ["a"]


def test_eviction_frees_as_many_blocks_as_needed() -> None:
    cluster = full(Load(1, num_running=4, num_waiting=2, blocks_used=100))
    cluster.enqueue("high", priority=1, ttft_deadline=10.0, prompt_tokens=500)
    assert victims(cluster, now=9.9) == ["d", "c"]


def test_eviction_frees_a_slot_for_each_choice() -> None:
    cluster = full()
    cluster.enqueue("high", priority=1, ttft_deadline=10.0, choices=3)
    assert victims(cluster, now=9.9) == ["d", "c", "b"]


def test_eviction_is_skipped_if_all_victims_are_too_few() -> None:
    cluster = full()
    cluster.enqueue("high", priority=1, ttft_deadline=10.0, choices=5)
    assert not cluster.place(ledger_now=9.9)


def test_eviction_frees_room_for_higher_class_at_worker_too() -> None:
    cluster = full()
    cluster.runs("e", "w", priority=2, known_tokens=1)
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    assert victims(cluster, now=9.9) == ["d", "c"]


def test_eviction_is_not_needed_before_waiting_lower_classes() -> None:
    cluster = full(Load(1, num_running=3, num_waiting=3, blocks_used=60))
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    assert victims(cluster, now=9.9) == []


def test_eviction_does_not_repeat_a_recent_victim() -> None:
    cluster = full()
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    assert victims(cluster, now=9.9) == ["d"]
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    assert victims(cluster, now=9.9) == ["c"]


def test_eviction_burst_takes_one_victim_for_each_request() -> None:
    for names in ([["h1", "h2", "h3"]], [["h1"], ["h2"], ["h3"]]):
        cluster = full()
        placed = []
        for at_once in names:
            for name in at_once:
                cluster.enqueue(name, priority=1, ttft_deadline=10.0)
            placed += cluster.place(ledger_now=9.9)
        assert [[it.request_id for it in one.victims] for one in placed] == [["d"], ["c"], ["b"]]


def evicted(num_running: int = 4, num_waiting: int = 3, has_ended: bool = True) -> Cluster:
    """Return a cluster in which d was evicted for ``first``, which the worker has acknowledged.

    The worker's slots are reported as they were before. ``has_ended``: d is queued again.
    """
    cluster = full(config=replace(CONFIG, local_depth=0))
    cluster.enqueue("first", priority=1, ttft_deadline=10.0)
    (placed,) = cluster.place(ledger_now=9.9)
    cluster.placement.acknowledge("w", placed.epoch)
    load = Load(2, num_running=num_running, num_waiting=num_waiting, blocks_used=60)
    cluster.placement.report("w", load, now=0.0)
    if has_ended:
        cluster.enqueue("d", attempt=1, accepted=True)
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    return cluster


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize(("num_running", "num_waiting"), [(4, 3), (4, 2), (3, 3), (4, 0)])
def test_eviction_counts_its_predecessor_once(
    num_running: int, num_waiting: int, has_ended: bool
) -> None:
    """The predecessor waits at the worker or has the victim's slot, which is not reported yet."""
    cluster = evicted(num_running, num_waiting, has_ended)
    assert victims(cluster, now=9.9) == ["c"]


def test_eviction_that_never_happens_frees_nothing_for_long() -> None:
    for later, expected in ((2.0, ["c"]), (2.1, ["c", "b"])):
        cluster = evicted(has_ended=False)
        cluster.leader_state.prune(now=later)
        assert victims(cluster, now=9.9) == expected


def test_evicted_request_that_has_returned_frees_nothing() -> None:
    cluster = evicted()
    cluster.runs("d", "w", epoch=99)
    assert victims(cluster, now=9.9) == ["c", "b"]


def test_eviction_counts_running_requests_once() -> None:
    """Three requests of the same class took slots after the worker reported its slots."""
    cluster = full(replace(FULL, num_waiting=0), config=replace(CONFIG, local_depth=0))
    cluster.slots["w"] = ["a", "b"]
    for number in range(3):
        cluster.runs(f"running{number}", "w", priority=1, epoch=100 + number)
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    assert victims(cluster, now=9.9) == ["b"]


def test_evicted_request_is_spared_until_recomputed() -> None:
    """The request's 397 tokens take 4 s to recompute."""
    cluster = full(throughput=paced(tokens_per_s=100))
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    assert victims(cluster, now=9.9) == ["d"]
    cluster.leader_state.prune(now=11.0)
    assert "d" in cluster.queue._spared
    cluster.leader_state.prune(now=12.0)
    assert not cluster.queue._spared


def test_evicted_request_is_spared_for_a_minimum_time() -> None:
    cluster = full()
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    assert victims(cluster, now=9.9) == ["d"]
    cluster.leader_state.prune(now=4.9)
    assert "d" in cluster.queue._spared
    cluster.leader_state.prune(now=5.0)
    assert not cluster.queue._spared


def test_eviction_chooses_the_least_recomputation() -> None:
    cluster = full()
    cluster.add_worker("cheap", FULL)
    cluster.slots["cheap"] = ["x"]
    cluster.runs("x", "cheap", known_tokens=100)
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    (placed,) = cluster.place(ledger_now=9.9)
    assert placed.worker_id == "cheap"
    assert [victim.request_id for victim in placed.victims] == ["x"]


def test_eviction_for_higher_class_works_on_lower_class_turn() -> None:
    cluster = full(config=replace(CONFIG, class_floor=0.5))
    cluster.enqueue("before", priority=1, ttft_deadline=10.0, prompt_tokens=1000)
    cluster.enqueue("low", priority=-1)
    (before,) = cluster.leader_state.place(0.0, 9.0, 1, lambda: 77)
    assert before.waiting.request_id == "before"
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    turn = cluster.queue._queue.peek(9.6)
    assert turn is not None and turn.request_id == "low"
    assert victims(cluster, now=9.6)
    assert cluster.leader_state.queued == 1


def test_eviction_cannot_bypass_same_class_pending_prefill() -> None:
    """Slots and blocks are free; only prefill of the request's own class delays it."""
    pending = CONFIG.max_pending_prefill
    cluster = Cluster(CONFIG)
    cluster.connect()
    for name in ("first", "second"):
        load = Load(1, num_running=1, pending_prefill_tokens=pending)
        cluster.add_worker(name, load, paced())
        cluster.runs(f"at {name}", name, priority=1, known_tokens=pending)
        cluster.slots[name] = [f"at {name}"]
    cluster.enqueue("high", priority=1, ttft_deadline=10.0, prompt_tokens=100)
    assert not cluster.place(ledger_now=9.9)


def test_eviction_prefers_the_worker_with_least_pending() -> None:
    cluster = Cluster(CONFIG)
    cluster.connect()
    for name, pending in (("a", CONFIG.max_pending_prefill), ("b", CONFIG.max_pending_prefill - 9)):
        load = Load(1, num_running=1, pending_prefill_tokens=pending)
        cluster.add_worker(name, load, paced())
        cluster.runs(f"at {name}", name, known_tokens=pending)
    cluster.enqueue("high", priority=1, ttft_deadline=10.0, prompt_tokens=100)
    (placed,) = cluster.place(ledger_now=9.9)
    assert (placed.worker_id, placed.victims) == ("b", ())


def test_eviction_spares_a_worker_that_tries_a_suspect() -> None:
    cluster = full()
    cluster.placement.workers["w"].trial = 7
    cluster.enqueue("high", priority=1, ttft_deadline=10.0)
    assert not cluster.place(ledger_now=9.9)
    cluster.placement.workers["w"].trial = 0
    assert victims(cluster, now=9.9) == ["d"]


def test_eviction_avoids_an_unreachable_worker_unless_alone() -> None:
    cluster = full()
    cluster.enqueue("high", priority=1, ttft_deadline=10.0, avoid="w")
    cluster.add_worker("other", FULL)
    assert not cluster.place(ledger_now=9.9)
    cluster.placement.report("other", replace(FULL, sequence_number=2, draining=True), 0.0)
    assert victims(cluster, now=9.9) == ["d"]
