"""Specification of a model for the decoder, without torch and without family names.

Differences between families are fields; ``families.py`` fills them from ``config.json`` and refuses
what the decoder does not do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]


class UnsupportedModel(ValueError):
    """Checkpoint that this engine does not run."""


class UnsupportedArchitecture(UnsupportedModel):
    """The decoder does not know the architecture that the checkpoint names."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long waves are stretched by ``factor``, short ones kept, those between blended.

    A wave is long above ``original_context / low_freq_factor`` positions, short below
    ``original_context / high_freq_factor``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Yarn scaling of rope (arXiv 2309.00071).

    As Llama3Scaling, but the blend goes by pairs, from the one that turns ``beta_fast`` times in
    ``original_context`` positions to the one that turns ``beta_slow`` times. ``truncate`` rounds
    both outwards to whole pairs. Results are multiplied by ``attention_factor``.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_context: int
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Longrope: each pair's wave is stretched by its own factor (arXiv 2402.13753).

    By ``long``, or ``short`` if no sequence is longer than ``original_context``.

    What is turned is also multiplied by ``attention_factor``.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of a head's first ``dim`` features, which is even.

    Before scaling, pair i of them turns by theta ** (-2i / dim) a position.
    """

    theta: float
    dim: int
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Differences between layers.

    A token sees ``window`` tokens, itself the last; without one, all.
    """

    rope: Rope
    window: int | None = None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of the checkpoint's tensors: ``{model}.layers.0...``, ``{head}.weight``.

    With ``fused``, linears with the same input are one tensor. Names that begin with one of
    ``unread`` are ignored.
    """

    model: str = "model"
    head: str = "lm_head"
    fused: bool = False
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer; sizes are those of the whole model, before any sharding.

    ``max_position`` is the most tokens of one sequence that the model was made for. A softcap c
    makes x to c * tanh(x / c).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_position: int
    tied_embeddings: bool
    attention_scale: float
    attention_softcap: float | None = None
    qkv_bias: bool = False
    #: of the projection from the heads back to the hidden state
    out_bias: bool = False
    mlp_bias: bool = False
    #: a norm over each head of queries and keys, before they are turned
    qk_norm: bool = False
    activation: Activation = "silu"
    #: norms multiply by 1 + weight, and round once, after it
    norms_add_one: bool = False
    #: what attention and MLP give is normed as well as what they take
    post_norms: bool = False
    embedding_multiplier: float = 1.0
    #: of what attention and MLP add to the hidden state
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    tensors: TensorNames = TensorNames()

    @property
    def num_layers(self) -> int:
        return len(self.layers)
