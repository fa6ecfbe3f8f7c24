"""What work there is in the cluster, as its leader sees it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import fmean

from everlift.v1 import session_pb2
from router.admission.scheduler import Tenure
from router.admission.workers import WorkerView


def cluster_load(
    term: int, tenure: Tenure, workers: Iterable[WorkerView], now: float, ledger_now: float
) -> session_pb2.ClusterLoad:
    """``now`` and ``ledger_now`` as a tenure's. O(workers + tenants)."""
    staying = [worker for worker in workers if worker.is_open]
    rates = [worker.pace.full_rate for worker in staying if worker.pace.full_rate is not None]
    return session_pb2.ClusterLoad(
        term=term,
        workers=len(staying),
        queued=tenure.queued,
        queued_tokens=tenure.queued_tokens,
        waited_s=tenure.waited_s(now, ledger_now),
        running=sum(worker.load.num_running + worker.ahead for worker in staying),
        slots=sum(worker.slots for worker in staying),
        blocks_used=sum(worker.load.blocks_used for worker in staying),
        blocks_total=sum(worker.capacity.num_blocks for worker in staying),
        offered_tokens=tenure.offered_tokens,
        worker_rate=fmean(rates) if rates else 0.0,
        services=tenure.services(),
        service_gap=tenure.service_gap,
        wait_s=tenure.wait_s,
        class_queues=tenure.class_queues(),
        tenant_queues=tenure.tenant_queues(),
        ray_clusters=Counter(it.capacity.ray_cluster for it in staying if it.capacity.ray_cluster),
    )
