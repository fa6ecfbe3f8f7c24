"""What the cluster can hold and do, and how much of it is in use. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from everlift.step_fit import FittedStepTime
from everlift.v1 import admin_pb2, session_pb2


class Connected(NamedTuple):
    """A worker, and how long the steps of its kind take; None: nothing was learned of it."""

    info: session_pb2.WorkerInfo
    state: session_pb2.WorkerState
    step_time: FittedStepTime | None = None


def capacity(
    load: session_pb2.ClusterLoad | None, workers: Iterable[Connected]
) -> admin_pb2.CapacityResponse:
    """``load`` is the leader's word, None where there is none by now; ``workers`` are all that are
    connected."""
    staying = [worker for worker in workers if not worker.state.draining]
    answer = admin_pb2.CapacityResponse(
        workers=len(staying),
        slots=sum(worker.info.max_num_seqs for worker in staying),
        slots_used=sum(worker.state.num_running for worker in staying),
        blocks=sum(worker.info.num_blocks for worker in staying),
        blocks_used=sum(worker.state.blocks_used for worker in staying),
        kinds=_kinds(staying),
    )
    if load is not None:
        answer.tokens_per_s = load.worker_rate * len(staying)
        answer.queued, answer.queued_tokens = load.queued, load.queued_tokens
        if load.HasField("wait_s"):
            answer.wait_s = load.wait_s
    return answer


def _kinds(workers: Sequence[Connected]) -> list[admin_pb2.WorkerKind]:
    """Those of most workers first."""
    kinds: dict[bytes, admin_pb2.WorkerKind] = {}
    for worker in workers:
        kind = _kind(worker)
        kinds.setdefault(kind.SerializeToString(deterministic=True), kind).workers += 1
    return sorted(kinds.values(), key=lambda kind: -kind.workers)


def _kind(worker: Connected) -> admin_pb2.WorkerKind:
    info = worker.info
    return admin_pb2.WorkerKind(
        device=info.device,
        tensor_parallel=info.tensor_parallel,
        max_num_seqs=info.max_num_seqs,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        max_num_batched_tokens=info.max_num_batched_tokens,
        step_time=_model(worker.step_time),
        engine_policy=worker.state.engine_policy,
    )


def _model(step_time: FittedStepTime | None) -> admin_pb2.StepTimeModel | None:
    if step_time is None or not step_time.is_known:
        return None
    overhead_s, each = step_time.coefficients
    return admin_pb2.StepTimeModel(
        overhead_s=overhead_s,
        row_s=each.num_rows,
        token_s=each.num_tokens,
        kv_token_s=each.kv_tokens,
        pair_s=each.num_pairs,
        error=step_time.error,
    )
