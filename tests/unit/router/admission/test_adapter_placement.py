"""Requests with a LoRA adapter reach only workers that serve it."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from everlift.v1 import session_pb2
from router.admission.request import Waiting
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


def test_avoided_worker_takes_request_if_it_alone_serves_adapter() -> None:
    cluster = Cluster()
    cluster.add_worker("plain", Load(1))
    cluster.add_worker("serving", Load(1), capacity=SERVING)
    assert choose(cluster.placement, waiting("r", adapter="sql", avoid="serving")) == "serving"
    cluster.add_worker("other", FULL, capacity=SERVING)
    assert choose(cluster.placement, waiting("r", adapter="sql", avoid="serving")) is None


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


LOADING = replace(CAPACITY, adapter_slots=2)


def loaded(*names: str, used: int = 0, load_s: float = 0.5) -> session_pb2.LoadedAdapters:
    """Return the adapters in memory; the first ``used`` of them have sequences."""
    adapters = [
        session_pb2.LoadedAdapter(name=name, digest=f"digest of {name}", sequences=int(i < used))
        for i, name in enumerate(names)
    ]
    return session_pb2.LoadedAdapters(adapters=adapters, load_s=load_s)


def sql(request_id: str = "r", digest: str = "digest of sql") -> Waiting:
    return waiting(request_id, adapter="sql", adapter_digest=digest)


def loading_cluster(**adapters: session_pb2.LoadedAdapters) -> Cluster:
    """Return workers of known speed; the first is idle, the others have some prompts to prefill."""
    cluster = Cluster()
    for i, (name, message) in enumerate(adapters.items()):
        load = Load(1, num_running=1, pending_prefill_tokens=100 * i, committed_tokens=500 * i)
        cluster.add_worker(name, load, paced(), LOADING)
        cluster.placement.report_adapters(name, message)
    return cluster


def test_placement_prefers_a_worker_with_the_adapter_loaded() -> None:
    cluster = loading_cluster(idle=loaded("a"), second=loaded("a", "b"), third=loaded("sql"))
    assert choose(cluster.placement, sql()) == "third"
    assert choose(cluster.placement, waiting("r")) == "idle"
    assert choose(cluster.placement, sql(digest="another")) == "idle"
    assert choose(cluster.placement, sql(digest="")) == "third"


def test_load_of_an_adapter_is_cheaper_than_a_long_wait() -> None:
    """The worker with the adapter has 0.2 s of prompts to compute first."""
    for load_s, chosen in ((0.1, "idle"), (0.4, "third")):
        cluster = loading_cluster(
            idle=loaded(load_s=load_s), second=loaded(load_s=load_s), third=loaded("sql")
        )
        assert choose(cluster.placement, sql()) == chosen


def test_placement_avoids_workers_whose_slots_are_in_use() -> None:
    cluster = loading_cluster(idle=loaded("a", "b", used=2), second=loaded("a", "b", used=1))
    assert choose(cluster.placement, sql()) == "second"
    cluster = loading_cluster(idle=loaded("a", "b", used=2), second=loaded("c", "d", used=2))
    assert choose(cluster.placement, sql()) == "idle"


def test_dispatch_takes_no_slot_if_its_adapter_is_in_use() -> None:
    message = loaded("running", "loading", "unused", used=1, load_s=0.5)
    message.adapters[1].loading = True
    cluster = Cluster()
    cluster.add_worker("w", BUSY, capacity=replace(CAPACITY, adapter_slots=3))
    cluster.placement.report_adapters("w", message)
    view = cluster.placement.workers["w"]
    for epoch, digest in enumerate(("digest of running", "", "digest of loading")):
        one = waiting("one", adapter=digest[10:] or "running", adapter_digest=digest)
        cluster.placement.reserve("w", epoch, one, now=1.0)
        assert view.adapter_s("sql", "digest of sql") == 0.5
    one = waiting("one", adapter="unused", adapter_digest="digest of unused")
    cluster.placement.reserve("w", 9, one, now=1.0)
    assert view.adapter_s("sql", "digest of sql") == inf


def test_dispatch_counts_as_a_load_until_it_is_acknowledged() -> None:
    cluster = loading_cluster(first=loaded(), second=loaded())
    placement = cluster.placement
    placement.reserve("second", 7, sql("one"), now=1.0)
    assert choose(placement, sql("two")) == "second"
    placement.acknowledge("second", 7)
    assert choose(placement, sql("two")) == "first"
    placement.reserve("second", 8, sql("one"), now=1.0)
    placement.cancel("second", 8)
    assert choose(placement, sql("two")) == "first"
