"""Adapters from a Hugging Face config to a ModelSpec, one per architecture.

A key that a published file omits has the default of the family's config class in transformers. A
feature that ModelSpec cannot express is refused, and the message names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from worker.model.huggingface.config import HfConfig, Json
from worker.model.huggingface.quantization import read_format
from worker.model.huggingface.rope import (
    DEFAULT_THETA,
    read_rope,
    rope_of,
    rope_parameters,
    rope_type,
)
from worker.model.spec import (
    Activation,
    Experts,
    LayerSpec,
    ModelSpec,
    Rope,
    TensorNames,
    UnsupportedArchitecture,
    UnsupportedModel,
    YarnScaling,
)

_SLIDING, _FULL = "sliding_attention", "full_attention"

#: Activations that a config may name.
_ACTIVATIONS: tuple[Activation, ...] = tuple(
    each for each in get_args(Activation) if each != "gpt_oss"
)

_LLAMA: Json = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_MISTRAL: Json = _LLAMA | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN: Json = _LLAMA | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3: Json = _QWEN | {"head_dim": 128}
_MIXTRAL: Json = _LLAMA | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN_MOE: Json = _LLAMA | {
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
_QWEN2_MOE: Json = _QWEN_MOE | {
    "num_key_value_heads": 16,
    "max_window_layers": 28,
    "qkv_bias": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
_QWEN3_MOE: Json = _QWEN_MOE | {
    "num_key_value_heads": 4,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_GPT_OSS: Json = _LLAMA | {
    "vocab_size": 201088,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_OLMOE: Json = _LLAMA | {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
_GEMMA: Json = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2: Json = _GEMMA | {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3: Json = _GEMMA | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
}
_PHI3: Json = _LLAMA | {
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_GRANITE: Json = _LLAMA | {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


def read_spec(directory: str | Path) -> ModelSpec:
    """Return the spec of the model whose ``config.json`` is in ``directory``.

    Raises UnsupportedModel if the file is missing or malformed, or has an unsupported value, and
    its subclass UnsupportedArchitecture if the architecture is unknown.
    """
    config = HfConfig.read(Path(directory) / "config.json")
    spec, weight_format = _adapter(config)(config), read_format(config)
    if weight_format is not None:
        is_stacked = weight_format.arrangement == "stacked"
        if spec.tensors.stacked_experts != is_stacked:
            where = "only for gpt-oss" if is_stacked else "not for gpt-oss: mxfp4 is"
            raise UnsupportedModel(f"{weight_format.title} weights are supported {where}")
        sizes, group = (spec.hidden_size, spec.intermediate_size), weight_format.group or 1
        if is_stacked and any(size % group for size in sizes):
            raise UnsupportedModel(
                f"{weight_format.title} weights require that hidden_size {sizes[0]} and "
                f"intermediate_size {sizes[1]} are multiples of {group}"
            )
    return replace(spec, weight_format=weight_format)


def _adapter(config: HfConfig) -> Callable[[HfConfig], ModelSpec]:
    name = (config.strings("architectures") or ("(none named)",))[0]
    if name not in _ADAPTERS:
        raise UnsupportedArchitecture(
            f"architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return _ADAPTERS[name]


def _llama(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(_LLAMA)
    rope = read_rope(config, _head_dim(config))
    return replace(
        _spec(config, _alike(config, rope, window=None)),
        qkv_bias=config.flag("attention_bias"),
        out_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
    )


def _mistral(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(_MISTRAL)
    rope = read_rope(config, _head_dim(config))
    return _spec(config, _alike(config, rope, config.optional_positive("sliding_window")))


def _qwen2(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(_QWEN)
    return replace(_spec(config, _qwen_layers(config)), qkv_bias=True)


def _qwen3(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(_QWEN3)
    return replace(
        _spec(config, _qwen_layers(config)),
        qk_norm="head",
        qkv_bias=config.flag("attention_bias"),
        out_bias=config.flag("attention_bias"),
    )


def _qwen_layers(config: HfConfig) -> list[LayerSpec]:
    window = _qwen_window(config)
    first = config.natural("max_window_layers")
    layers = range(config.positive("num_hidden_layers"))
    kinds = [_FULL if window is None or layer < first else _SLIDING for layer in layers]
    rope = read_rope(config, _head_dim(config))
    return _layers(config, kinds, window, {_SLIDING: rope, _FULL: rope})


def _mixtral(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(_MIXTRAL)
    rope = read_rope(config, _head_dim(config))
    size = config.positive("intermediate_size")
    experts = _experts(config, config.positive("num_local_experts"), size, normalised=True)
    layers = _alike(config, rope, config.optional_positive("sliding_window"))
    names = TensorNames(mixture="block_sparse_moe", expert_linears=("w1", "w3", "w2"))
    return replace(
        _spec(config, [replace(layer, experts=experts) for layer in layers]), tensors=names
    )


def _qwen2_moe(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(_QWEN2_MOE)
    experts = replace(
        _qwen_experts(config, config.positive("num_experts")),
        shared_size=config.positive("shared_expert_intermediate_size"),
    )
    window = _qwen_window(config)
    end = config.natural("max_window_layers")
    kinds = [
        _FULL if window is None or layer % 2 or layer >= end else _SLIDING
        for layer in range(config.positive("num_hidden_layers"))
    ]
    rope = read_rope(config, _head_dim(config))
    layers = _layers(config, kinds, window, {_SLIDING: rope, _FULL: rope})
    return replace(
        _spec(config, _with_experts(config, layers, experts)), qkv_bias=config.flag("qkv_bias")
    )


def _qwen3_moe(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(_QWEN3_MOE)
    number = config.positive("num_experts", config.positive("num_local_experts"))
    layers = _alike(config, read_rope(config, _head_dim(config)), _qwen_window(config))
    return replace(
        _spec(config, _with_experts(config, layers, _qwen_experts(config, number))),
        qk_norm="head",
        qkv_bias=config.flag("attention_bias"),
        out_bias=config.flag("attention_bias"),
    )


def _olmoe(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(_OLMOE)
    width = config.positive("hidden_size") // config.positive("num_attention_heads")
    config.refuse_unless("head_dim", width)
    experts = _experts(
        config,
        config.positive("num_experts"),
        config.positive("intermediate_size"),
        config.flag("norm_topk_prob"),
    )
    layers = _alike(config, read_rope(config, _head_dim(config)), window=None)
    return replace(
        _spec(config, [replace(layer, experts=experts) for layer in layers]),
        qk_norm="all",
        qkv_clip=config.optional_number("clip_qkv"),
        qkv_bias=config.flag("attention_bias"),
        out_bias=config.flag("attention_bias"),
    )


def _gpt_oss(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(_GPT_OSS)
    config.refuse_unless("swiglu_alpha", _GPT_OSS["swiglu_alpha"])
    config.refuse_unless("swiglu_limit", _GPT_OSS["swiglu_limit"])
    size = config.positive("intermediate_size")
    # A softmax over the chosen experts only is the normalised softmax over all.
    experts = _experts(config, config.positive("num_local_experts"), size, normalised=True)
    experts = replace(experts, router_bias=True)
    rope = read_rope(config, _head_dim(config))
    kinds = [
        _FULL if layer % 2 else _SLIDING for layer in range(config.positive("num_hidden_layers"))
    ]
    window = config.optional_positive("sliding_window")
    layers = _layers(config, kinds, window, {_SLIDING: rope, _FULL: rope})
    return replace(
        _spec(config, [replace(layer, experts=experts) for layer in layers]),
        activation="gpt_oss",
        sinks=True,
        qkv_bias=config.flag("attention_bias"),
        out_bias=config.flag("attention_bias"),
        mlp_bias=True,
        tensors=TensorNames(router="router", stacked_experts=True),
    )


def _qwen_experts(config: HfConfig, number: int) -> Experts:
    size = config.positive("moe_intermediate_size")
    return _experts(config, number, size, config.flag("norm_topk_prob"))


def _experts(config: HfConfig, number: int, size: int, normalised: bool) -> Experts:
    top_k = config.positive("num_experts_per_tok")
    if top_k > number:
        raise UnsupportedModel(f"num_experts_per_tok {top_k} is more than the {number} experts")
    return Experts(number, top_k, size, normalised)


def _with_experts(
    config: HfConfig, layers: Sequence[LayerSpec], experts: Experts
) -> list[LayerSpec]:
    """Return ``layers`` with ``experts``, except in those that the config makes dense."""
    step, dense = config.positive("decoder_sparse_step"), config.naturals("mlp_only_layers")
    return [
        layer if number in dense or (number + 1) % step else replace(layer, experts=experts)
        for number, layer in enumerate(layers)
    ]


def _qwen_window(config: HfConfig) -> int | None:
    return config.optional_positive("sliding_window") if config.flag("use_sliding_window") else None


def _gemma2(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(_GEMMA2)
    rope = read_rope(config, _head_dim(config))
    layers = _gemma_layers(config, {_SLIDING: rope, _FULL: rope}, full_every=2)
    softcap = config.optional_number("attn_logit_softcapping")
    return replace(_gemma(config, layers), attention_softcap=softcap)


def _gemma3(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(_GEMMA3)
    config.refuse_unless("attn_logit_softcapping")
    layers = _gemma_layers(config, _gemma3_ropes(config), config.positive("sliding_window_pattern"))
    return replace(_gemma(config, layers), qk_norm="head")


def _gemma3_multimodal(config: HfConfig) -> ModelSpec:
    text = config.section("text_config")
    spec = _gemma3(text)
    names = TensorNames(
        model="language_model.model",
        head="language_model.lm_head",
        unread=("vision_tower.", "multi_modal_projector."),
    )
    tied = config.with_defaults(_GEMMA3).flag("tie_word_embeddings")
    return replace(spec, tensors=names, tied_embeddings=tied)


def _gemma(config: HfConfig, layers: Sequence[LayerSpec]) -> ModelSpec:
    config.refuse_unless("use_bidirectional_attention", False)
    return replace(
        _spec(config, layers, activation="hidden_activation"),
        attention_scale=config.number("query_pre_attn_scalar") ** -0.5,
        qkv_bias=config.flag("attention_bias"),
        out_bias=config.flag("attention_bias"),
        norms_add_one=True,
        post_norms=True,
        embedding_multiplier=config.positive("hidden_size") ** 0.5,
        logits_softcap=config.optional_number("final_logit_softcapping"),
    )


def _gemma_layers(config: HfConfig, ropes: dict[str, Rope], full_every: int) -> list[LayerSpec]:
    numbers = range(1, config.positive("num_hidden_layers") + 1)
    kinds = [_SLIDING if number % full_every else _FULL for number in numbers]
    return _layers(config, kinds, config.optional_positive("sliding_window"), ropes)


def _gemma3_ropes(config: HfConfig) -> dict[str, Rope]:
    """Return the ropes by layer type: full attention and sliding window.

    Newer configs have one section of ``rope_parameters`` per layer type. In older ones,
    ``rope_scaling`` and ``rope_theta`` are for full-attention layers, and ``rope_local_base_freq``
    is the theta of sliding-window layers, which have no scaling.
    """
    head_dim = _head_dim(config)
    written = config.section("rope_parameters")
    full = config.section("rope_scaling") or written.section(_FULL)
    theta = config.number("rope_theta", 1_000_000.0)
    local_theta = config.number("rope_local_base_freq", 10_000.0)
    return {
        _FULL: rope_of(full, config, head_dim, theta),
        _SLIDING: rope_of(written.section(_SLIDING), config, head_dim, local_theta),
    }


def _phi3(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(_PHI3)
    layers = _alike(config, _phi3_rope(config), config.optional_positive("sliding_window"))
    return replace(_spec(config, layers), tensors=TensorNames(fused=True))


def _phi3_rope(config: HfConfig) -> Rope:
    parameters = rope_parameters(config)
    if rope_type(parameters) in ("su", "yarn"):  # names of longrope in the first Phi-3 files
        parameters = parameters.replaced({"rope_type": "longrope"})
    theta = config.number("rope_theta", DEFAULT_THETA)
    return rope_of(parameters, config, _head_dim(config), theta)


def _granite(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(_GRANITE)
    return replace(
        _llama(config),
        attention_scale=config.number("attention_multiplier"),
        embedding_multiplier=config.number("embedding_multiplier"),
        residual_multiplier=config.number("residual_multiplier"),
        logits_divisor=config.number("logits_scaling"),
    )


_ADAPTERS: dict[str, Callable[[HfConfig], ModelSpec]] = {
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_multimodal,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteForCausalLM": _granite,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "OlmoeForCausalLM": _olmoe,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
ARCHITECTURES = tuple(_ADAPTERS)


def _spec(
    config: HfConfig, layers: Sequence[LayerSpec], activation: str = "hidden_act"
) -> ModelSpec:
    heads = config.positive("num_attention_heads")
    kv_heads = config.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} heads cannot share {kv_heads} KV heads evenly")
    head_dim = _head_dim(config)
    return ModelSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        intermediate_size=config.positive("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(layers),
        norm_eps=config.number("rms_norm_eps"),
        max_position=max(_max_position(config, layer.rope) for layer in layers),
        tied_embeddings=config.flag("tie_word_embeddings"),
        attention_scale=head_dim**-0.5,
        activation=_activation(config, activation),
    )


def _activation(config: HfConfig, key: str) -> Activation:
    for supported in _ACTIVATIONS:
        if config.get(key) == supported:
            return supported
    raise UnsupportedModel(
        f"{key} {config.get(key)!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
    )


def _head_dim(config: HfConfig) -> int:
    heads = config.positive("num_attention_heads")
    return config.positive("head_dim", config.positive("hidden_size") // heads)


def _max_position(config: HfConfig, rope: Rope) -> int:
    written = config.positive("max_position_embeddings")
    if isinstance(rope.scaling, YarnScaling):
        return max(written, int(rope.scaling.factor * rope.scaling.original_context))
    return written


def _alike(config: HfConfig, rope: Rope, window: int | None) -> list[LayerSpec]:
    return [LayerSpec(rope, window)] * config.positive("num_hidden_layers")


def _layers(
    config: HfConfig, kinds: Sequence[str], window: int | None, ropes: dict[str, Rope]
) -> list[LayerSpec]:
    written = config.strings("layer_types") or tuple(kinds)
    if len(written) != len(kinds):
        raise UnsupportedModel(
            f"layer_types has {len(written)} layers, but the model has {len(kinds)}"
        )
    for kind in written:
        if kind not in ropes:
            supported = ", ".join(ropes)
            raise UnsupportedModel(f"layer type {kind} is not supported; supported: {supported}")
    if _SLIDING in written and window is None:
        raise UnsupportedModel(f"layer_types has {_SLIDING}, but there is no sliding_window")
    return [LayerSpec(ropes[kind], window if kind == _SLIDING else None) for kind in written]
