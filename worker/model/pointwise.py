"""Pointwise operations of a layer: the result of a token depends on that token alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from worker.attention.backend import StepAttention
from worker.model.rope import Angle, rotate
from worker.model.spec import Activation

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


class Pointwise(Protocol):
    """Pointwise operations, computed in fp32 and rounded to the type of their inputs."""

    def norm(
        self, x: Tensor, weight: Tensor, eps: float, add_one: bool, added: Tensor | None = None
    ) -> Tensor:
        """Return x / rms(x) * weight, where rms(x) = sqrt(mean(x ** 2) + eps).

        The mean is taken over the last dimension. With ``add_one`` the factor is 1 + weight instead
        of weight. This sum is computed in fp32, because weights near 0 would lose digits in half
        precision. ``added``, of the shape of ``x``, is first added to ``x`` in place.
        """
        ...

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up, [T, n], or the result of ``gpt_oss`` (spec.Activation).

        ``gate_up`` [T, 2 * n] has the n features of gate before those of up.
        """
        ...

    def rotate(self, heads: Tensor, angle: Angle) -> Tensor:
        """Return ``heads`` [T, heads, head_dim] rotated by ``angle``; may overwrite ``heads``."""
        ...

    def rotate_and_write(
        self,
        rotated: Tensor,
        num_query: int,
        value: Tensor,
        angle: Angle,
        layer: int,
        attention: StepAttention,
    ) -> Tensor:
        """Rotate queries and keys, write keys and ``value`` to the cache, and return the queries.

        ``rotated`` [T, heads, head_dim] has ``num_query`` query heads followed by the key heads;
        ``value`` is [T, kv_heads, head_dim]. ``attention`` writes to its cache of ``layer``. May
        overwrite ``rotated``.
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
        if activation == "gpt_oss":
            gate, up = gate.float().clamp(max=7.0), up.float().clamp(-7.0, 7.0)
            return ((up + 1.0) * gate * (1.702 * gate).sigmoid()).to(gate_up.dtype)
        return _ACTIVATIONS[activation](gate).mul_(up)

    def rotate(self, heads: Tensor, angle: Angle) -> Tensor:
        return rotate(heads, angle)

    def rotate_and_write(
        self,
        rotated: Tensor,
        num_query: int,
        value: Tensor,
        angle: Angle,
        layer: int,
        attention: StepAttention,
    ) -> Tensor:
        query, key = self.rotate(rotated, angle).tensor_split([num_query], dim=1)
        attention.write(layer, key, value)
        return query


TORCH = TorchPointwise()
