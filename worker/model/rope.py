"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the half-split order of Llama."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.model.spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)

#: The cosine of each feature's angle and, to multiply with its partner, the sine: negative for the
#: first of a pair. Each [tokens, 1, dim], fp32.
Angle = tuple[Tensor, Tensor]


class RotaryTable:
    """Cosines and sines of every position below ``length``, fp32, computed once.

    ``length`` is that of the longest sequence that is served, and for LongRopeScaling it settles
    which factors hold, for all sequences and for good: a key in the cache cannot be turned again
    when its sequence grows past the original context. (transformers goes by each call's longest
    sequence, and computes the keys anew where it changes.)
    """

    def __init__(self, rope: Rope, length: int, device: torch.device) -> None:
        positions = torch.arange(length, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, length))
        factor = attention_factor(rope)
        #: [length, dim / 2]
        self.cos = (angles.cos() * factor).to(device)
        self.sin = (angles.sin() * factor).to(device)

    def at(self, positions: Tensor) -> Angle:
        """Return the angles at ``positions`` [tokens]."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(heads: Tensor, angle: Angle) -> Tensor:
    """Return ``heads`` [tokens, heads, head_dim] with each pair (i, i + dim / 2) rotated.

    Features from ``dim`` on stay.
    """
    cos, sin = angle
    dim = cos.shape[-1]
    if dim < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :dim], angle), heads[..., dim:]), dim=-1)
    precise = heads.float()
    partners = precise.roll(dim // 2, dims=-1)
    return (precise * cos).addcmul_(partners, sin).to(heads.dtype)


def inverse_frequencies(rope: Rope, length: int) -> Tensor:
    """Return radians per position for the ``dim / 2`` pairs, fp32; ``length`` as in RotaryTable."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    plain = 1.0 / rope.theta**exponents
    match rope.scaling:
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, rope, scaling)
        case LongRopeScaling() as scaling:
            stretched = length > scaling.original_context
            return plain / torch.tensor(scaling.long if stretched else scaling.short)
        case None:
            return plain


def attention_factor(rope: Rope) -> float:
    """Factor of rotated queries and keys."""
    match rope.scaling:
        case YarnScaling(attention_factor=factor) | LongRopeScaling(attention_factor=factor):
            return factor
        case _:
            return 1.0


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    waves_in_context = scaling.original_context * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return share * plain + (1 - share) * plain / scaling.factor


def _yarn(plain: Tensor, rope: Rope, scaling: YarnScaling) -> Tensor:
    first = _pair_with_turns(rope, scaling, scaling.beta_fast)
    last = _pair_with_turns(rope, scaling, scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    width = last - first or 0.001  # a step, where both are one pair
    share = 1 - ((torch.arange(len(plain)) - first) / width).clamp(0, 1)
    return share * plain + (1 - share) * plain / scaling.factor


def _pair_with_turns(rope: Rope, scaling: YarnScaling, turns: float) -> float:
    waves = scaling.original_context / (turns * 2 * math.pi)
    return rope.dim * math.log(waves) / (2 * math.log(rope.theta))
