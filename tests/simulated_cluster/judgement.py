"""Conditions that a simulated cluster must meet after all its faults.

A client has the output of the same request in a cluster without faults, or a prefix of it and an
error that has a reason. Every request is final in the ledger. No fenced-off process changed
anything there. Workers have no sequences left. No unexpected error was logged.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from cluster.chaos.checker import Living, examine
from everlift.errors import (
    Cancelled,
    DataLoss,
    EverliftError,
    UnknownRequest,
)
from everlift.v1 import inference_pb2 as pb
from router.ledger.entry import Entry
from router.ledger.listing import Audited
from router.requests.explanation import accepting_s
from tests.simulated_cluster.asked import ROUTERS, Asked, Wrong, undisturbed
from tests.simulated_cluster.client import Manners, Transcript
from tests.simulated_cluster.cluster import SimCluster

#: Time limit for a healed cluster to serve all clients, in virtual seconds.
_TIMEOUT_S = 120.0
#: Virtual seconds until remaining work has ended and unacknowledged reservations have expired.
_REST_S = 1.5


def finish(
    cluster: SimCluster,
    asked: Mapping[str, tuple[Asked, Manners]],
    complaints: Sequence[str],
    *,
    may_lose: bool = False,
    may_fail: Sequence[str] = (),
) -> None:
    """Wait until all clients are served, and judge; raise Wrong or TimeoutError.

    ``complaints`` are the logged errors. With ``may_lose``, requests may end with DataLoss or
    UnknownRequest, because the ledger lost data. The requests ``may_fail`` may end with any error.
    """
    cluster.settle(_TIMEOUT_S)
    _wait_for_the_forgotten(cluster)
    if cluster.ledger.breaches:
        raise Wrong(f"no fence: {cluster.ledger.breaches}")
    if cluster.clock.uncaught:
        raise Wrong(f"nobody caught {cluster.clock.uncaught}")
    if complaints:
        raise Wrong(f"logged: {complaints}")
    for request_id, (wish, manners) in asked.items():
        transcript = cluster.transcripts[request_id]
        _judge_tokens(transcript, undisturbed(wish))
        if request_id not in may_fail and not _has_reason(transcript.error, manners, may_lose):
            raise Wrong(f"{request_id} ended with {transcript.error!r}") from transcript.error
    _judge_ledger(cluster)
    _judge_explanations(cluster)
    _judge_credits(cluster)
    _judge_index(cluster)
    _judge_leaders(cluster)
    _judge_workers(cluster)


def _wait_for_the_forgotten(cluster: SimCluster) -> None:
    """Wait until requests that no client reads have ended too."""
    end = cluster.clock.now + _TIMEOUT_S
    while unfinished := _unfinished(cluster):
        if cluster.clock.now > end:
            raise Wrong(f"unfinished: {unfinished}")
        cluster.run_for(_REST_S)
    cluster.run_for(_REST_S)


def _unfinished(cluster: SimCluster) -> list[Entry]:
    entries = [item.entry for item in cluster.audit() if isinstance(item, Audited)]
    return [entry for entry in entries if not entry.state.is_final]


def _judge_tokens(transcript: Transcript, calm: Transcript) -> None:
    request_id = transcript.request_id
    if transcript.error is None and transcript.result() != calm.result():
        raise Wrong(f"{request_id} got {transcript.result()}, not {calm.result()}")
    for index, received in transcript.choices.items():
        right = calm.choices[index].tokens[: len(received.tokens)]
        if received.tokens != right:
            raise Wrong(f"{request_id}/{index} got {received.tokens}, not {right}")


def _has_reason(error: EverliftError | None, manners: Manners, may_lose: bool) -> bool:
    if isinstance(error, Cancelled):
        is_away_for_long = manners.leaves_after is not None and manners.away >= ROUTERS.grace
        return manners.cancels_after is not None or is_away_for_long
    return error is None or (isinstance(error, DataLoss | UnknownRequest) and may_lose)


def _judge_ledger(cluster: SimCluster) -> None:
    living = Living(
        gateways={router.router_id for _, router in cluster.ready_routers()},
        workers={worker.worker_id for worker in cluster.workers.values()},
    )
    findings = [finding for item in cluster.audit() for finding in examine(item, living)]
    if findings:
        raise Wrong(f"in the ledger: {findings}")


def _judge_explanations(cluster: SimCluster) -> None:
    """Check that the spans of each request add up to its total time, within 1 ms or 1 %.

    The time of storing and delivering the end is part of the explanation only if the gateway
    reported it; the ledger's events, which are compared here, lack it.
    """
    for item in cluster.audit():
        if isinstance(item, Audited):
            request_id = item.entry.request_id
            explanation = cluster.ledger.explained(request_id)
            explained_s = sum(span.seconds for span in explanation.spans)
            whole_s = accepting_s(explanation) + cluster.ledger.age_s(request_id)
            allowed_s = max(1e-3, 0.01 * whole_s)
            if not -allowed_s < explained_s - whole_s < allowed_s + _behind_s(explanation):
                raise Wrong(
                    f"{request_id} took {whole_s} s, {explained_s} s explained: {explanation}"
                )


def _behind_s(explanation: pb.Explanation) -> float:
    kinds = (pb.SPAN_KIND_LEDGER, pb.SPAN_KIND_CLIENT)
    return sum(span.seconds for span in explanation.spans[-2:] if span.kind in kinds)


def _judge_credits(cluster: SimCluster) -> None:
    for index, router in cluster.ready_routers():
        for worker_id, view in router.leader.views.items():
            if view.unacknowledged.tokens or view.unacknowledged.choices:
                raise Wrong(f"router {index} waits for {worker_id} to acknowledge something")


def _judge_index(cluster: SimCluster) -> None:
    """Compare each router's index of prefixes with the chunks that the workers have."""
    workers = {worker.worker_id: worker for worker in cluster.workers.values()}
    device = {worker_id: worker.device_chunks() for worker_id, worker in workers.items()}
    host = {worker_id: worker.host_chunks() for worker_id, worker in workers.items()}
    for number, router in cluster.ready_routers():
        index = router.leader._placements["fake"].index
        for tier, masks, chunks in (("device", index._device, device), ("host", index._host, host)):
            indexed = {chunk: {*index.workers(mask)} for chunk, mask in masks.items()}
            holders = defaultdict(set)
            for worker_id in router.leader.views:
                for chunk in chunks[worker_id]:
                    holders[chunk].add(worker_id)
            if indexed != holders:
                raise Wrong(f"router {number} has {indexed} on the {tier}, not {chunks}")


def _judge_leaders(cluster: SimCluster) -> None:
    """Check that leaders have no queued or running requests left."""
    for index, router in cluster.ready_routers():
        leader = router.leader
        if leader.queued or leader.running:
            has = f"{leader.queued} waiting, {leader.running} running"
            raise Wrong(f"leader {index} still has {has}")


def _judge_workers(cluster: SimCluster) -> None:
    for worker in cluster.workers.values():
        worker.engine.check_integrity()
        load = worker.engine.load()
        if load.blocks_used or load.num_running or load.num_waiting:
            raise Wrong(f"{worker.worker_id} still has {load}")
        if not worker.sessions.is_idle:
            raise Wrong(f"{worker.worker_id} still has claims")
        chunks = worker.sessions._chunks
        if chunks._num_holders or chunks._chunks.keys() != chunks.on_device | chunks.on_host:
            raise Wrong(f"{worker.worker_id} keeps other prompts than its cache has")


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collect what is logged as an error; lower levels are off, because faults log much there."""
    handler, root = _Errors(), logging.getLogger()
    before = root.manager.disable
    root.addHandler(handler)
    logging.disable(logging.WARNING)
    try:
        yield handler.texts
    finally:
        logging.disable(before)
        root.removeHandler(handler)


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        self.setFormatter(logging.Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))
