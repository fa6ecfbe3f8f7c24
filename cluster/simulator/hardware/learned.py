"""Content of a JSON file (see kind_file.py) that describes a kind of worker of a running cluster.

The step times in the file are those that the cluster has learned.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import ForecastFailed
from everlift.v1 import admin_pb2 as pb

#: Minimum overhead of a step. If all observed steps had the same number of rows, the fit may have
#: attributed all of their time to the rows, but an overhead of 0 is impossible.
_LEAST_OVERHEAD_S = 1e-6


def content(kind: pb.WorkerKind) -> dict[str, object]:
    """Return the JSON content of a file (kind_file.py) that describes this kind of worker.

    Raises ForecastFailed if the cluster has not learned the step time yet.
    """
    if not kind.HasField("step_time"):
        raise ForecastFailed(
            "the cluster has not learned its step times yet: send some requests first"
        )
    parts, policy = kind.step_time, kind.engine_policy
    return {
        "step_time": {
            "overhead_s": max(parts.overhead_s, _LEAST_OVERHEAD_S),
            # Included in the overhead, because every observed step read the weights.
            "weights_s": 0.0,
            "token_s": parts.token_s,
            "kv_token_s": parts.kv_token_s,
            "pair_s": parts.pair_s,
            "row_s": parts.row_s,
        },
        "worker": {
            "num_blocks": kind.num_blocks,
            "max_model_len": kind.max_model_len,
            "max_num_seqs": kind.max_num_seqs,
            "max_num_batched_tokens": kind.max_num_batched_tokens,
            # Workers of older versions do not report it.
            **({"scheduling": {"policy": policy}} if policy else {}),
        },
        "learned": {
            "device": kind.device,
            "tensor_parallel": kind.tensor_parallel,
            "error": parts.error if parts.HasField("error") else None,
        },
    }


def only(kinds: Sequence[pb.WorkerKind], device: str | None) -> pb.WorkerKind:
    """Return the most common kind of worker; with ``device``, the most common one on this device.

    ``kinds`` begin with the most common one. Raises ForecastFailed if there is no such kind, or if
    ``device`` is None and the kinds run on different devices.
    """
    found = [kind for kind in kinds if device in (None, kind.device)]
    if not found:
        raise ForecastFailed(f"no worker runs on {device}" if kinds else "no worker is connected")
    if device is None and len({kind.device for kind in found}) > 1:
        names = ", ".join(sorted({kind.device for kind in found}))
        raise ForecastFailed(f"workers run on {names}: select one with --device")
    return found[0]
