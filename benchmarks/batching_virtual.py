"""Runner in virtual time: it computes nothing, and a step takes the time of a given model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import numpy as np

from everlift.step_time import Roofline, StepSize, StepTime
from worker.device.device_kind import DeviceKind
from worker.engine.plan import Plan, RowResult

#: Weights of a model of 8 billion parameters in bf16, with 8 KV heads of 128 in 32 layers, on an
#: H200: read at 3.66 TB/s, multiplied at 592 TFLOP/s.
H200_8B = Roofline(
    overhead_s=0.7e-3, weights_s=16e9 / 3.66e12, token_s=14e9 / 592e12, kv_token_s=131072 / 3.66e12
)
_TOKEN, _NOTHING = RowResult((1,)), RowResult()


class VirtualRunner:
    """Runner whose clock ``now``, in seconds, advances only in steps and in ``sleep``."""

    vocab_size = 32000
    max_model_len = 4096
    num_host_blocks = 0
    host_load_s = 0.0
    device_kind = DeviceKind.LARGE_GPU
    adapters: Mapping[str, str] = MappingProxyType({})
    adapter_slots = None

    def __init__(self, num_blocks: int, step_time: StepTime) -> None:
        self.num_blocks = num_blocks
        self.now = 0.0
        self._step_time = step_time

    def execute(self, plan: Plan) -> list[RowResult]:
        rows = plan.rows
        kv_tokens = int(np.sum(rows.starts) + np.sum(rows.counts))
        self.now += self._step_time.seconds(
            StepSize(len(rows), plan.num_tokens, kv_tokens, num_pairs=0)
        )
        return [_TOKEN if samples else _NOTHING for samples in rows.samples.tolist()]

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def unready_slots(self) -> frozenset[int]:
        return frozenset()

    def release(self, slots: Collection[int]) -> None:
        pass

    def close(self) -> None:
        pass
