"""Pointwise operations of a layer on a GPU, in Triton kernels (worker.kernels.pointwise)."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.attention.backend import StepAttention
from worker.attention.gpu import GpuStep
from worker.kernels.pointwise import gate_and_multiply, sum_and_norm
from worker.model.pointwise import TorchPointwise
from worker.model.rope import Angle
from worker.model.spec import Activation

#: Number of columns of a gate that one Triton program computes.
_GATE_BLOCK = 1024


class KernelPointwise(TorchPointwise):
    def norm(
        self, x: Tensor, weight: Tensor, eps: float, add_one: bool, added: Tensor | None = None
    ) -> Tensor:
        width = len(weight)
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows = x if x.dim() == 3 else x.unsqueeze(1)
        assert added is None or (x.is_contiguous() and added.is_contiguous())
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sum_and_norm[(rows.shape[0] * rows.shape[1],)](
            x,
            x if added is None else added,
            weight,
            out,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            eps,
            WIDTH=width,
            BLOCK=1 << (width - 1).bit_length(),
            ADDS=added is not None,
            ADD_ONE=add_one,
            num_warps=_warps(width),
        )
        return out

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if gate_up.stride(1) != 1:
            gate_up = gate_up.contiguous()
        tokens, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
        gate_and_multiply[(tokens, -(-width // _GATE_BLOCK))](
            gate_up,
            out,
            gate_up.stride(0),
            width,
            BLOCK=_GATE_BLOCK,
            ACTIVATION=activation,
            num_warps=4,
        )
        return out

    def rotate_and_write(
        self,
        rotated: Tensor,
        num_query: int,
        value: Tensor,
        angle: Angle,
        layer: int,
        attention: StepAttention,
    ) -> Tensor:
        if isinstance(attention, GpuStep):
            return attention.rotate_and_write(layer, rotated, num_query, value, angle)
        return super().rotate_and_write(rotated, num_query, value, angle, layer, attention)


def _warps(width: int) -> int:
    return min(16, max(1, width // 512))
