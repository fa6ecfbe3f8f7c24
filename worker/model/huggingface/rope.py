"""Rotary position embedding, read from a Hugging Face config.

transformers 5 writes ``rope_parameters``; transformers 4 wrote ``rope_theta`` and ``rope_scaling``.
The defaults, and which key has precedence if a value is given twice, are those of transformers'
``modeling_rope_utils``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from worker.model.huggingface.config import HfConfig
from worker.model.spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    Scaling,
    UnsupportedModel,
    YarnScaling,
)

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class _Written:
    """Section ``parameters`` of ``config`` about a rope that rotates ``dim`` features of a head."""

    parameters: HfConfig
    config: HfConfig
    dim: int

    @property
    def original_context(self) -> int:
        """Return the context length in tokens that the model had before it was extended."""
        key = "original_max_position_embeddings"
        max_position = self.config.positive("max_position_embeddings")
        return self.config.positive(key, self.parameters.positive(key, max_position))

    @property
    def factor(self) -> float:
        stretched = self.config.positive("max_position_embeddings") / self.original_context
        return self.parameters.number("factor", stretched)


def read_rope(config: HfConfig, head_dim: int) -> Rope:
    """Return the rope of a model in which all layers have the same one.

    Raises UnsupportedModel if a value of ``config`` is malformed, the type of scaling is
    unsupported, or only a part of each head is rotated.
    """
    theta = config.number("rope_theta", DEFAULT_THETA)
    rope = rope_of(rope_parameters(config), config, head_dim, theta)
    if rope.dim != head_dim:
        raise UnsupportedModel("partial_rotary_factor other than 1 is unsupported in this family")
    return rope


def rope_parameters(config: HfConfig) -> HfConfig:
    """Return the section ``rope_scaling`` of ``config``, or ``rope_parameters`` if it has none.

    A section that is missing, null or empty counts as none. Without either, the result is empty.
    """
    return config.section("rope_scaling") or config.section("rope_parameters")


def rope_type(parameters: HfConfig) -> str:
    return str(parameters.get("rope_type", parameters.get("type", "default")))


def rope_of(parameters: HfConfig, config: HfConfig, head_dim: int, theta: float) -> Rope:
    """Return the rope that ``parameters``, a section of ``config``, describes.

    The rope may rotate only a part of each head's ``head_dim`` features. ``theta`` is the base of
    the frequencies unless ``parameters`` has one. Raises UnsupportedModel if a value is malformed,
    the type of scaling is unsupported, or the number of rotated features is not an even number
    from 2 to ``head_dim``.
    """
    share = config.number("partial_rotary_factor", 1.0)
    share = parameters.number("partial_rotary_factor", share)
    if share > 1:
        raise UnsupportedModel(f"partial_rotary_factor must be at most 1, not {share}")
    dim = int(head_dim * share)
    if dim % 2 or dim == 0:
        raise UnsupportedModel(
            f"{dim} features of a head are rotated: the number must be even and at least 2"
        )
    kind = rope_type(parameters)
    if kind not in _SCALINGS:
        supported = ", ".join(_SCALINGS)
        raise UnsupportedModel(f"rope type {kind} is not supported; supported: {supported}")
    theta = parameters.number("rope_theta", theta)
    if kind == "yarn" and theta <= 1:
        raise UnsupportedModel(f"rope_theta must be above 1 with rope type yarn, not {theta}")
    return Rope(theta, dim, _SCALINGS[kind](_Written(parameters, config, dim)))


def _linear(rope: _Written) -> LinearScaling:
    return LinearScaling(rope.parameters.number("factor"))


def _llama3(rope: _Written) -> Llama3Scaling:
    return Llama3Scaling(
        factor=rope.parameters.number("factor"),
        low_freq_factor=rope.parameters.number("low_freq_factor"),
        high_freq_factor=rope.parameters.number("high_freq_factor"),
        original_context=rope.original_context,
    )


def _yarn(rope: _Written) -> YarnScaling:
    return YarnScaling(
        factor=rope.factor,
        beta_fast=rope.parameters.number("beta_fast", 32.0),
        beta_slow=rope.parameters.number("beta_slow", 1.0),
        original_context=rope.original_context,
        attention_factor=rope.parameters.number("attention_factor", _yarn_attention(rope)),
        truncate=rope.parameters.with_defaults({"truncate": True}).flag("truncate"),
    )


def _yarn_attention(rope: _Written) -> float:
    """Return yarn's attention_factor for a config that has none (arXiv 2309.00071, sec. 3.4)."""
    written = rope.parameters
    if written.get("mscale") and written.get("mscale_all_dim"):
        every = _mscale(rope.factor, written.number("mscale_all_dim"))
        return _mscale(rope.factor, written.number("mscale")) / every
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rope: _Written) -> LongRopeScaling:
    pairs = rope.dim // 2
    return LongRopeScaling(
        short=rope.parameters.numbers("short_factor", pairs),
        long=rope.parameters.numbers("long_factor", pairs),
        original_context=rope.original_context,
        attention_factor=rope.parameters.number("attention_factor", _longrope_attention(rope)),
    )


def _longrope_attention(rope: _Written) -> float:
    if rope.factor <= 1:
        return 1.0
    if rope.original_context == 1:
        raise UnsupportedModel("original_max_position_embeddings must be above 1 for longrope")
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))


_SCALINGS: dict[str, Callable[[_Written], Scaling | None]] = {
    "default": lambda rope: None,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
