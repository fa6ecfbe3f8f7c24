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

#: Factors of a rotation, (cos, sin), each fp32 [tokens, 1, dim]. A rotated feature is cos times the
#: feature plus sin times the other feature of its pair. For the first feature of a pair, sin is the
#: negated sine of the angle.
Angle = tuple[Tensor, Tensor]


class RotaryTable:
    """Cosines and sines of every position below ``length``, in fp32, computed once.

    Both are multiplied by the scaling's ``attention_factor``, and thus rotated heads are too. With
    LongRopeScaling, ``context`` (default: ``length``) decides, once for all sequences, whether the
    long or the short factors apply: a key in the cache cannot be rotated again when its sequence
    grows past the original context. (transformers decides by the longest sequence of each call, and
    recomputes keys on a change.)
    """

    def __init__(
        self, rope: Rope, length: int, device: torch.device, context: int | None = None
    ) -> None:
        positions = torch.arange(length, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, context or length))
        factor = attention_factor(rope)
        #: [length, dim / 2]
        self.cos = (angles.cos() * factor).to(device)
        self.sin = (angles.sin() * factor).to(device)

    def at(self, positions: Tensor) -> Angle:
        """Return the angles at ``positions`` [tokens], for ``rotate``."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(heads: Tensor, angle: Angle) -> Tensor:
    """Return ``heads`` [tokens, heads, head_dim] with each pair (i, i + dim / 2) rotated.

    ``angle`` has the angles of the tokens (RotaryTable.at), and ``dim`` is its width. The pairs are
    also multiplied by the attention factor that ``angle`` contains. Features from ``dim`` on are
    unchanged.
    """
    cos, sin = angle
    dim = cos.shape[-1]
    if dim < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :dim], angle), heads[..., dim:]), dim=-1)
    precise = heads.float()
    partners = precise.roll(dim // 2, dims=-1)
    return (precise * cos).addcmul_(partners, sin).to(heads.dtype)


def inverse_frequencies(rope: Rope, context: int) -> Tensor:
    """Return the rotation of each pair in radians per position, fp32 [dim / 2].

    The factors of a LongRopeScaling are the long ones if ``context``, in tokens, is longer than its
    original context.
    """
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
            stretched = context > scaling.original_context
            return plain / torch.tensor(scaling.long if stretched else scaling.short)
        case None:
            return plain


def attention_factor(rope: Rope) -> float:
    """Return the factor by which rotated queries and keys are multiplied; 1 for most scalings."""
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
    first = _correction_dim(rope, scaling, scaling.beta_fast)
    last = _correction_dim(rope, scaling, scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    width = last - first or 0.001  # if both are the same pair, the blend becomes a step
    share = 1 - ((torch.arange(len(plain)) - first) / width).clamp(0, 1)
    return share * plain + (1 - share) * plain / scaling.factor


def _correction_dim(rope: Rope, scaling: YarnScaling, num_rotations: float) -> float:
    waves = scaling.original_context / (num_rotations * 2 * math.pi)
    return rope.dim * math.log(waves) / (2 * math.log(rope.theta))
