"""Pointwise operations of a layer, each token by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from worker.attention.backend import StepAttention
from worker.model.rope import Angle, rotate
from worker.model.spec import Activation

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


class Pointwise(Protocol):
    """Computed in fp32, rounded to the type of what comes in."""

    def norm(
        self, x: Tensor, weight: Tensor, eps: float, add_one: bool, added: Tensor | None = None
    ) -> Tensor:
        """Return x / rms(x) * weight over the last dimension, or with ``add_one`` * (1 + weight).

        The latter keeps more digits in half precision. ``added``, of the same shape, is first added
        to ``x`` in place.
        """
        ...

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up [T, n], of ``gate_up`` [T, 2 * n]."""
        ...

    def rotate(self, heads: Tensor, angle: Angle) -> Tensor:
        """Rotate as rope.rotate, possibly in the memory of ``heads``."""
        ...

    def rotate_and_write(
        self,
        turned: Tensor,
        num_query: int,
        value: Tensor,
        angle: Angle,
        layer: int,
        attention: StepAttention,
    ) -> Tensor:
        """Rotate ``turned`` [T, heads, head_dim] and write keys and ``value`` to the cache.

        The first ``num_query`` heads are queries, which are returned; the others are keys.
        """
        ...


class TorchPointwise:
    def norm(
        self, x: Tensor, weight: Tensor, eps: float, add_one: bool, added: Tensor | None = None
    ) -> Tensor:
        if added is not None:
            x.add_(added)
        if not add_one:
            return functional.rms_norm(x, weight.shape, weight, eps)
        factor = weight.float() + 1.0
        return functional.rms_norm(x.float(), factor.shape, factor, eps).to(x.dtype)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return _ACTIVATIONS[activation](gate).mul_(up)

    def rotate(self, heads: Tensor, angle: Angle) -> Tensor:
        return rotate(heads, angle)

    def rotate_and_write(
        self,
        turned: Tensor,
        num_query: int,
        value: Tensor,
        angle: Angle,
        layer: int,
        attention: StepAttention,
    ) -> Tensor:
        query, key = self.rotate(turned, angle).tensor_split([num_query], dim=1)
        attention.write(layer, key, value)
        return query


TORCH = TorchPointwise()
