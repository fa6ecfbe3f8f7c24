"""Requests with a LoRA adapter reach only workers that serve it."""

from __future__ import annotations

from dataclasses import replace

from everlift.v1 import session_pb2
from router.admission.workers import Capacity, Load
from tests.support.router.admission_support import CAPACITY, Cluster, choose, paced, waiting

SERVING = replace(CAPACITY, adapters=frozenset({"sql"}))
BUSY = Load(1, num_running=2, committed_tokens=500)
FULL = Load(1, num_running=4, num_waiting=2, blocks_used=60)


def test_capacity_has_the_names_of_adapters() -> None:
    info = session_pb2.WorkerInfo(max_num_seqs=1, adapters={"sql": "digest"})
    capacity = Capacity.from_proto(info)
    assert capacity.serves("sql") and capacity.serves("") and not capacity.serves("other")


def test_placement_ignores_workers_without_the_adapter() -> None:
    cluster = Cluster()
    cluster.add_worker("idle", Load(1))
    cluster.add_worker("serving", BUSY, capacity=SERVING)
    assert choose(cluster.placement, waiting("r")) == "idle"
    assert choose(cluster.placement, waiting("r", adapter="sql")) == "serving"
    assert choose(cluster.placement, waiting("r", adapter="other")) is None


def test_request_without_a_serving_worker_blocks_no_other() -> None:
    cluster = Cluster()
    cluster.add_worker("w", Load(1))
    cluster.connect()
    cluster.enqueue("first", adapter="sql")
    cluster.enqueue("second", arrived=1.0)
    assert [it.waiting.request_id for it in cluster.place()] == ["second"]
    assert cluster.leader_state.queued == 1
    cluster.add_worker("serving", Load(1), capacity=SERVING)
    [placed] = cluster.place(now=1.5)
    assert (placed.waiting.request_id, placed.worker_id) == ("first", "serving")
    assert placed.queue_wait is not None and not placed.queue_wait.HasField("prefix")


def test_eviction_happens_only_where_the_adapter_is() -> None:
    cluster = Cluster()
    for name, capacity in (("w", CAPACITY), ("serving", SERVING)):
        cluster.add_worker(name, FULL, paced(), capacity)
    cluster.connect()
    for worker, names, known in (("w", "abcd", 10), ("serving", "efgh", 400)):
        cluster.slots[worker] = [*names]
        for name in names:
            cluster.runs(name, worker, known_tokens=known)
    cluster.enqueue("high", priority=1, ttft_deadline=10.0, adapter="sql")
    [placed] = cluster.place(ledger_now=9.9)
    assert placed.worker_id == "serving"
    assert {victim.worker_id for victim in placed.victims} == {"serving"}


def test_preempted_request_moves_only_where_its_adapter_is() -> None:
    starved = Load(1, num_running=3, num_waiting=1, blocks_used=100, pending_prefill_tokens=310)
    for capacity, moves in ((CAPACITY, []), (SERVING, [("r", "other")])):
        cluster = Cluster()
        cluster.add_worker("home", starved, paced(blocks_per_s=4), SERVING)
        cluster.add_worker("other", Load(1, num_running=1, blocks_used=20), paced(), capacity)
        cluster.connect()
        cluster.runs("r", "home", preempted=True, adapter="sql")
        assert cluster.moves() == moves
