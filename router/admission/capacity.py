"""What the cluster can hold and do, and how much of it is in use. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from everlift.v1 import admin_pb2, session_pb2


def capacity(
    load: session_pb2.ClusterLoad | None,
    workers: Iterable[tuple[session_pb2.WorkerInfo, session_pb2.WorkerState]],
) -> admin_pb2.CapacityResponse:
    """``load`` is the leader's word, None where there is none by now; ``workers`` are all that are
    connected."""
    staying = [(info, state) for info, state in workers if not state.draining]
    answer = admin_pb2.CapacityResponse(
        workers=len(staying),
        slots=sum(info.max_num_seqs for info, _ in staying),
        slots_used=sum(state.num_running for _, state in staying),
        blocks=sum(info.num_blocks for info, _ in staying),
        blocks_used=sum(state.blocks_used for _, state in staying),
    )
    if load is not None:
        answer.tokens_per_s = load.worker_rate * len(staying)
        answer.queued, answer.queued_tokens = load.queued, load.queued_tokens
        if load.HasField("wait_s"):
            answer.wait_s = load.wait_s
    return answer
