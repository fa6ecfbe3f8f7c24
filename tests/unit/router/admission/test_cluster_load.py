"""Load reports of a leader."""

from __future__ import annotations

from everlift.v1 import session_pb2 as pb
from router.admission.workers import Capacity, Load
from tests.support.router.admission_support import Cluster, paced


def say(cluster: Cluster, ledger_now: float = 0.0) -> pb.ClusterLoad:
    """Return the load; the leader's clock is 100 s behind the ledger's."""
    return cluster.queue.load(ledger_now - 100.0, ledger_now)


def test_cluster_load_is_empty_without_workers_or_requests() -> None:
    assert say(Cluster()) == pb.ClusterLoad(wait_s=0.0)


def test_cluster_load_reports_queued_tokens_and_longest_wait() -> None:
    cluster = Cluster()
    cluster.connect()
    cluster.enqueue("a", arrived=5.0, prompt_tokens=30, predicted_tokens=12)
    cluster.enqueue("b", arrived=4.0, prompt_tokens=20, predicted_tokens=8)
    load = say(cluster, ledger_now=6.5)
    assert (load.queued, load.queued_tokens, load.waited_s) == (2, 70, 2.5)
    assert load.offered_tokens == 70


def test_cluster_load_measures_requeued_wait_from_requeue() -> None:
    """The wait since the first arrival would show the autoscaler a queue of ten minutes."""
    cluster = Cluster()
    cluster.connect()
    entry = pb.Waiting(request_id="a", arrived=5.0, prompt_tokens=30, attempt=1, accepted=True)
    cluster.leader_state.on_message("g", pb.GatewayMessage(enqueue=[entry]), now=500.0)
    assert say(cluster, ledger_now=600.5).waited_s == 0.5


def test_cluster_load_counts_withdrawn_arrivals_once() -> None:
    cluster = Cluster()
    cluster.connect()
    cluster.enqueue("a", prompt_tokens=30, predicted_tokens=10)
    cluster.enqueue("a", prompt_tokens=30, predicted_tokens=10)
    cluster.receive(pb.GatewayMessage(withdraw=["a"]))
    # An accepted request arrived under another leader, or returns from its worker.
    cluster.enqueue("b", prompt_tokens=50, predicted_tokens=1, accepted=True)
    load = say(cluster)
    assert (load.queued_tokens, load.offered_tokens) == (51, 40)


def test_cluster_load_sums_workers_except_draining() -> None:
    cluster = Cluster()
    loads = (
        Load(1, num_running=3, num_waiting=1, blocks_used=10),
        Load(1, num_running=4, blocks_used=20),
        Load(1, num_running=4, blocks_used=40, draining=True),
    )
    for number, load in enumerate(loads):
        throughput = paced()
        throughput.full_rate = (100.0, None, 900.0)[number]
        capacity = Capacity(max_num_seqs=4, num_blocks=64, ray_cluster=("a", "b", "b")[number])
        cluster.add_worker(f"w{number}", load, throughput, capacity)
    said = say(cluster)
    assert (said.workers, said.running, said.slots) == (2, 8, 8)
    assert (said.blocks_used, said.blocks_total) == (30, 128)
    assert said.worker_rate == 100.0
    assert said.ray_clusters == {"a": 1, "b": 1}


def test_cluster_load_reports_service_counters_by_tenant() -> None:
    cluster = Cluster(weight_of=lambda tenant: 2.0 if tenant == "b" else 1.0)
    cluster.connect()
    for name in ("a/1", "b/1"):
        cluster.enqueue(name, accepted=True)
    served = [
        pb.ServedTokens(tenant="b", tokens=7),
        pb.ServedTokens(tenant="gone", priority=1, tokens=4),
    ]
    cluster.receive(pb.GatewayMessage(served=served))
    load = say(cluster)
    assert [(it.tenant, it.priority, it.counter) for it in load.services] == [
        ("b", 0, 7.0),
        ("gone", 1, 8.0),
    ]
    assert load.service_gap == 7.0


def test_cluster_load_counts_queue_by_class_and_tenant() -> None:
    cluster = Cluster(weight_of=lambda tenant: 1.0)
    cluster.connect()
    for name, priority in (("a/1", 1), ("a/2", 0), ("a/3", 0), ("b/1", 0)):
        cluster.enqueue(name, priority=priority, accepted=True)
    load = say(cluster)
    assert [(it.priority, it.queued) for it in load.class_queues] == [(1, 1), (0, 3)]
    assert [(it.tenant, it.priority, it.queued) for it in load.tenant_queues] == [
        *(("a", 0, 2), ("b", 0, 1), ("a", 1, 1))
    ]
    cluster.receive(pb.GatewayMessage(withdraw=["a/1", "b/1"]))
    load = say(cluster)
    assert [(it.priority, it.queued) for it in load.class_queues] == [(0, 2)]
    assert [it.tenant for it in load.tenant_queues] == ["a"]


def test_cluster_load_lists_only_the_longest_tenant_queues() -> None:
    cluster = Cluster(weight_of=lambda tenant: 1.0)
    cluster.connect()
    for number in range(80):
        cluster.enqueue(f"t{number}/1", accepted=True)
    cluster.enqueue("t7/2", accepted=True)
    queues = say(cluster).tenant_queues
    assert (len(queues), queues[0].tenant, queues[0].queued) == (64, "t7", 2)


def test_cluster_load_without_fair_share_counts_only_classes() -> None:
    cluster = Cluster()
    cluster.connect()
    cluster.enqueue("a")
    load = say(cluster)
    assert [it.queued for it in load.class_queues] == [1] and not load.tenant_queues


def test_cluster_load_counts_batches_apart() -> None:
    cluster = Cluster()
    cluster.connect()
    cluster.enqueue("a", prompt_tokens=30, predicted_tokens=12)
    cluster.enqueue("b", prompt_tokens=20, predicted_tokens=8, priority=-10)
    load = say(cluster)
    assert (load.queued, load.queued_tokens, load.batch_tokens) == (2, 70, 28)
    assert load.offered_tokens == 42


def test_cluster_load_has_no_wait_while_a_batch_line_is_next() -> None:
    """A request that waits for its adapter is parked, so the batch line heads the queue."""
    cluster = Cluster()
    cluster.connect()
    cluster.add_worker("w", Load(1, num_running=4, num_waiting=2))
    cluster.enqueue("line", priority=-10, arrived=0.0)
    assert say(cluster, ledger_now=60.0).waited_s == 0.0
    cluster.enqueue("chat", adapter="sql", arrived=60.0, accepted=True)
    assert say(cluster, ledger_now=61.0).waited_s == 1.0
    assert not cluster.place(61.0, 61.0)
    load = say(cluster, ledger_now=62.0)
    assert load.queued_tokens > load.batch_tokens > 0
    assert load.waited_s == 0.0
