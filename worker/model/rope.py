"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the half-split order of Llama."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.model.spec import LinearScaling, Llama3Scaling, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians a position for each of the ``head_dim / 2`` pairs, fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    match rope.scaling:
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case None:
            return plain


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Blends ``plain`` (share 1: short waves) with ``plain / factor`` (share 0: long waves)."""
    waves_in_context = scaling.original_context * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return share * plain + (1 - share) * plain / scaling.factor


class RotaryTable:
    """Cosines and sines of every position below ``length``, fp32, computed once."""

    def __init__(self, rope: Rope, head_dim: int, length: int, device: torch.device) -> None:
        positions = torch.arange(length, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
        self._cos = angles.cos().to(device)
        self._sin = angles.sin().to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine at ``positions`` [tokens], each [tokens, 1, head_dim / 2]."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(heads: Tensor, angle: tuple[Tensor, Tensor]) -> Tensor:
    """``heads`` [tokens, heads, head_dim], each pair (i, i + head_dim / 2) turned by its angle."""
    cos, sin = angle
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)
