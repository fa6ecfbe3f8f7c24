"""Specification of a model for the decoder, without torch and without family names.

Families differ only in the values of its fields; ``huggingface/families.py`` sets them from
``config.json``, and refuses a model that the decoder does not support.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from worker.model.weight_format import WeightFormat

#: The result of a gated MLP's gate is activation(gate) * up. That of gpt_oss is
#: (u + 1) * g * sigmoid(1.702 * g) with g = min(gate, 7) and u = min(max(up, -7), 7).
Activation = Literal["silu", "gelu", "gelu_pytorch_tanh", "gpt_oss"]


class UnsupportedModel(ValueError):
    """Raised if Everlift does not support a model."""


class UnsupportedArchitecture(UnsupportedModel):
    """Raised if the decoder does not implement a model's architecture."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Linear scaling of rope: positions are divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3 scaling of rope: long wavelengths are stretched by ``factor``, short ones kept.

    A wavelength is long above ``original_context / low_freq_factor`` positions, and short below
    ``original_context / high_freq_factor``. Between these the two frequencies are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Yarn scaling of rope (arXiv 2309.00071).

    Wavelengths are stretched as in Llama3Scaling, but the blend is linear in the index of the pair:
    from the pair that makes ``beta_fast`` turns in ``original_context`` positions to the pair that
    makes ``beta_slow`` turns. ``truncate`` rounds both indices outwards to whole pairs. Rotated
    queries and keys are multiplied by ``attention_factor``.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_context: int
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Longrope: each pair's wavelength is stretched by its own factor (arXiv 2402.13753).

    The factors are ``long``, or ``short`` if no sequence is longer than ``original_context``
    tokens. Rotated queries and keys are also multiplied by ``attention_factor``.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of a head's first ``dim`` features; ``dim`` is even.

    Before scaling, pair i rotates by theta ** (-2i / dim) radians per position.
    """

    theta: float
    dim: int
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts, which replaces the MLP of a layer.

    A router, with a bias if ``router_bias``, computes the probabilities of the ``number`` experts.
    Each token is computed by the ``top_k`` most probable experts, which are MLPs with
    ``intermediate_size`` features. Results are weighted with the probabilities of these experts,
    which are first divided by their sum if ``normalised``. One more MLP, with ``shared_size``
    features, computes every token unless ``shared_size`` is None; its result is multiplied by the
    sigmoid of a gate.
    """

    number: int
    top_k: int
    intermediate_size: int
    normalised: bool
    shared_size: int | None = None
    router_bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Properties in which the layers of a model may differ.

    A token attends to the last ``window`` tokens including itself. Without a ``window`` it attends
    to itself and all tokens before it. Without ``experts`` the layer has one MLP for all tokens.
    """

    rope: Rope
    window: int | None = None
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Naming of a checkpoint's tensors: names begin with ``{model}.`` or are ``{head}.weight``.

    With ``fused``, the weights of linear layers with the same input (query, key and value; gate and
    up) are stored as one tensor. Tensors whose names begin with one of ``unread`` are ignored.
    ``mixture`` is the name of a layer's mixture of experts, ``router`` that of its router, and
    ``expert_linears`` are those of the gate, up and down projections of an expert. With
    ``stacked_experts``, the projections of all experts are two tensors with biases:
    ``gate_up_proj`` [experts, inputs, 2 * outputs], in which gate and up alternate, and
    ``down_proj`` [experts, inputs, outputs].
    """

    model: str = "model"
    head: str = "lm_head"
    fused: bool = False
    unread: tuple[str, ...] = ()
    mixture: str = "mlp"
    router: str = "gate"
    stacked_experts: bool = False
    expert_linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Decoder-only transformer; sizes are those of the whole model, before sharding.

    ``intermediate_size`` is that of the MLP in layers without experts.
    ``max_position`` is the length in tokens of the longest sequence that the model is made for. A
    softcap c replaces x by c * tanh(x / c).
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
    #: bias of the projection from the heads back to the hidden state
    out_bias: bool = False
    mlp_bias: bool = False
    #: norms of queries and keys before their rotation: of each head, or of all heads together
    qk_norm: Literal["head", "all"] | None = None
    #: largest magnitude of queries, keys and values, to which they are clipped before rotation
    qkv_clip: float | None = None
    #: every head has a sink: a score without a key, which takes part in the softmax
    sinks: bool = False
    activation: Activation = "silu"
    #: norms multiply by 1 + weight, and round only the final result
    norms_add_one: bool = False
    #: the outputs of attention and MLP are normed, as well as their inputs
    post_norms: bool = False
    embedding_multiplier: float = 1.0
    #: factor of what attention and MLP add to the hidden state
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    tensors: TensorNames = TensorNames()
    #: format of the linear layers' weights in a quantised checkpoint
    weight_format: WeightFormat | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)
