"""Published configurations of models, and the specs that are read from them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging

from worker.model.huggingface.families import read_spec
from worker.model.spec import (
    Experts,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelSpec,
    TensorNames,
    YarnScaling,
)

logging.set_verbosity_error()

Json = dict[str, Any]


def config(name: str, model_type: str, sizes: tuple[int, ...], **others: Any) -> Json:
    """Return a configuration with ``sizes``: vocabulary, hidden, MLP, layers, heads, KV heads."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    keys += ("num_attention_heads", "num_key_value_heads")
    return {"architectures": [name], "model_type": model_type} | dict(
        zip(keys, sizes, strict=True), **others
    )


LLAMA_2 = config(
    "LlamaForCausalLM",
    "llama",
    (32000, 4096, 11008, 32, 32, 32),
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    rope_scaling=None,
)
del LLAMA_2["num_key_value_heads"]
LLAMA_3_1 = config(
    "LlamaForCausalLM",
    "llama",
    (128256, 4096, 14336, 32, 32, 8),
    attention_bias=False,
    mlp_bias=False,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling={
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
)
MISTRAL_V0_1 = config(
    "MistralForCausalLM",
    "mistral",
    (32000, 4096, 14336, 32, 32, 8),
    hidden_act="silu",
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    sliding_window=4096,
    tie_word_embeddings=False,
)
MISTRAL_V0_3 = MISTRAL_V0_1 | {"vocab_size": 32768, "sliding_window": None, "rope_theta": 1e6}
QWEN_2_5 = config(
    "Qwen2ForCausalLM",
    "qwen2",
    (152064, 3584, 18944, 28, 28, 4),
    max_position_embeddings=131072,
    max_window_layers=28,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    sliding_window=131072,
    use_sliding_window=False,
    tie_word_embeddings=False,
)
QWEN_2_5_YARN = QWEN_2_5 | {
    "max_position_embeddings": 32768,
    "rope_scaling": {
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "type": "yarn",
    },
}
QWEN_3 = config(
    "Qwen3ForCausalLM",
    "qwen3",
    (151936, 1024, 3072, 28, 16, 8),
    attention_bias=False,
    head_dim=128,
    max_position_embeddings=40960,
    max_window_layers=28,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    use_sliding_window=False,
    tie_word_embeddings=True,
)
GEMMA_2 = config(
    "Gemma2ForCausalLM",
    "gemma2",
    (256000, 4608, 36864, 46, 32, 16),
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    cache_implementation="hybrid",
    head_dim=128,
    hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=8192,
    query_pre_attn_scalar=144,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    sliding_window=4096,
    sliding_window_size=4096,
)
GEMMA_3_1B = config(
    "Gemma3ForCausalLM",
    "gemma3_text",
    (262144, 1152, 6912, 26, 4, 1),
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=32768,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-6,
    rope_local_base_freq=10000,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=512,
    sliding_window_pattern=6,
)
GEMMA_3_4B: Json = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}
PHI_3_MINI_128K = config(
    "Phi3ForCausalLM",
    "phi3",
    (32064, 3072, 8192, 32, 32, 32),
    max_position_embeddings=131072,
    original_max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling={"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.05] * 48},
    sliding_window=262144,
    tie_word_embeddings=False,
)
PHI_4_MINI = PHI_3_MINI_128K | {
    "vocab_size": 200064,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "long_factor": [2] * 48, "short_factor": [1] * 48},
    "tie_word_embeddings": True,
}
GRANITE_3 = config(
    "GraniteForCausalLM",
    "granite",
    (49155, 4096, 12800, 40, 32, 8),
    attention_bias=False,
    attention_multiplier=0.0078125,
    embedding_multiplier=12.0,
    logits_scaling=16.0,
    residual_multiplier=0.22,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=10000000.0,
    tie_word_embeddings=True,
)
MIXTRAL_8X7B = config(
    "MixtralForCausalLM",
    "mixtral",
    (32000, 4096, 14336, 32, 32, 8),
    hidden_act="silu",
    max_position_embeddings=32768,
    num_experts_per_tok=2,
    num_local_experts=8,
    output_router_logits=False,
    rms_norm_eps=1e-5,
    rope_theta=1000000.0,
    sliding_window=None,
    tie_word_embeddings=False,
)
GPT_OSS_20B = config(
    "GptOssForCausalLM",
    "gpt_oss",
    (201088, 2880, 2880, 24, 64, 8),
    attention_bias=True,
    head_dim=64,
    hidden_act="silu",
    initial_context_length=4096,
    layer_types=["sliding_attention", "full_attention"] * 12,
    max_position_embeddings=131072,
    num_experts_per_tok=4,
    num_local_experts=32,
    rms_norm_eps=1e-5,
    rope_scaling={
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    rope_theta=150000,
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
)
QWEN_1_5_MOE = config(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    (151936, 2048, 5632, 24, 16, 16),
    decoder_sparse_step=1,
    hidden_act="silu",
    max_position_embeddings=8192,
    max_window_layers=21,
    moe_intermediate_size=1408,
    norm_topk_prob=False,
    num_experts=60,
    num_experts_per_tok=4,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    shared_expert_intermediate_size=5632,
    sliding_window=32768,
    tie_word_embeddings=False,
    use_sliding_window=False,
)
QWEN_3_30B_A3B = config(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    (151936, 2048, 6144, 48, 32, 4),
    attention_bias=False,
    decoder_sparse_step=1,
    head_dim=128,
    hidden_act="silu",
    max_position_embeddings=40960,
    max_window_layers=48,
    mlp_only_layers=[],
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_experts=128,
    num_experts_per_tok=8,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=1000000.0,
    sliding_window=None,
    tie_word_embeddings=False,
    use_sliding_window=False,
)
OLMOE_1B_7B = config(
    "OlmoeForCausalLM",
    "olmoe",
    (50304, 2048, 1024, 16, 16, 16),
    attention_bias=False,
    clip_qkv=None,
    hidden_act="silu",
    max_position_embeddings=4096,
    norm_topk_prob=False,
    num_experts=64,
    num_experts_per_tok=8,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)

PUBLISHED: dict[str, Json] = {
    "Llama 2": LLAMA_2,
    "Llama 3.1": LLAMA_3_1,
    "Mistral 0.1": MISTRAL_V0_1,
    "Mistral 0.3": MISTRAL_V0_3,
    "Qwen 2.5": QWEN_2_5,
    "Qwen 2.5, YaRN": QWEN_2_5_YARN,
    "Qwen 3": QWEN_3,
    "Gemma 2": GEMMA_2,
    "Gemma 3 1B": GEMMA_3_1B,
    "Gemma 3 4B": GEMMA_3_4B,
    "Phi 3 mini 128k": PHI_3_MINI_128K,
    "Phi 4 mini": PHI_4_MINI,
    "Granite 3": GRANITE_3,
    "Mixtral 8x7B": MIXTRAL_8X7B,
    "gpt-oss 20B": GPT_OSS_20B,
    "Qwen 1.5 MoE": QWEN_1_5_MOE,
    "Qwen 3 30B-A3B": QWEN_3_30B_A3B,
    "OLMoE 1B-7B": OLMOE_1B_7B,
}
#: Keys that files may omit: their defaults depend on the family.
OPTIONAL = {
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
    "max_window_layers",
    "original_max_position_embeddings",
    "hidden_act",
    "hidden_activation",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
}


def read(content: Json, directory: Path) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(content))
    return read_spec(directory)


def windows(spec: ModelSpec) -> Counter[int | None]:
    return Counter(layer.window for layer in spec.layers)


@pytest.mark.parametrize(
    "content",
    [*PUBLISHED.values(), *({k: c[k] for k in c if k not in OPTIONAL} for c in PUBLISHED.values())],
    ids=[*PUBLISHED, *(f"{name}, cut short" for name in PUBLISHED)],
)
def test_published_config_matches_transformers(content: Json, tmp_path: Path) -> None:
    spec = read(content, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    text = config.get_text_config()
    assert sizes(spec) == {key: getattr(text, key) for key in sizes(spec)}
    written = getattr(text, "head_dim", None)
    assert spec.head_dim == (written or spec.hidden_size // spec.num_heads)
    assert spec.tied_embeddings == config.tie_word_embeddings
    assert [layer.window for layer in spec.layers] == windows_of(text)
    assert spec.logits_softcap == getattr(text, "final_logit_softcapping", None)
    assert spec.attention_softcap == getattr(text, "attn_logit_softcapping", None)
    named = getattr(text, "hidden_activation", getattr(text, "hidden_act", ""))
    assert spec.activation == ("gpt_oss" if config.model_type == "gpt_oss" else named)
    assert {layer.experts for layer in spec.layers} == {experts_of(text)}
    assert {layer.rope.theta for layer in spec.layers} == thetas_of(text)


def sizes(spec: ModelSpec) -> Json:
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.norm_eps,
    }


def windows_of(config: PreTrainedConfig) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    every = ["sliding_attention"] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or every
    return [window if kind == "sliding_attention" else None for kind in kinds]


def experts_of(config: PreTrainedConfig) -> Experts | None:
    if not hasattr(config, "num_experts_per_tok"):
        return None
    return Experts(
        getattr(config, "num_experts", 0),
        config.num_experts_per_tok,
        getattr(config, "moe_intermediate_size", config.intermediate_size),
        normalised=getattr(config, "norm_topk_prob", True),
        shared_size=getattr(config, "shared_expert_intermediate_size", None),
        router_bias=config.model_type == "gpt_oss",
    )


def thetas_of(config: PreTrainedConfig) -> set[float]:
    written = config.rope_parameters
    sections = [written] if "rope_theta" in written else written.values()
    return {section["rope_theta"] for section in sections}


def test_llama_config_has_rope_scaling(tmp_path: Path) -> None:
    spec = read(LLAMA_3_1, tmp_path)
    assert {layer.rope.scaling for layer in spec.layers} == {Llama3Scaling(8.0, 1.0, 4.0, 8192)}
    assert spec.attention_scale == 128**-0.5


def test_mistral_v0_1_config_has_sliding_window(tmp_path: Path) -> None:
    assert windows(read(MISTRAL_V0_1, tmp_path)) == {4096: 32}
    assert windows(read(MISTRAL_V0_3, tmp_path)) == {None: 32}


def test_qwen_config_has_implicit_qkv_bias(tmp_path: Path) -> None:
    spec = read(QWEN_2_5, tmp_path)
    assert (spec.qkv_bias, spec.out_bias, spec.mlp_bias) == (True, False, False)
    assert windows(spec) == {None: 28}
    assert windows(
        read(QWEN_2_5 | {"use_sliding_window": True, "max_window_layers": 21}, tmp_path)
    ) == {
        None: 21,
        131072: 7,
    }


def test_yarn_config_extends_context(tmp_path: Path) -> None:
    spec = read(QWEN_2_5_YARN, tmp_path)
    assert spec.max_position == 131072
    assert spec.layers[0].rope.scaling == YarnScaling(
        4.0, 32.0, 1.0, 32768, attention_factor=pytest.approx(1.1386294), truncate=True
    )


def test_qwen3_config_has_qk_norm_and_wide_heads(
    tmp_path: Path,
) -> None:
    spec = read(QWEN_3, tmp_path)
    assert (spec.qk_norm, spec.head_dim, spec.qkv_bias) == ("head", 128, False)


def test_gemma2_config_has_scales_softcaps_and_windows(tmp_path: Path) -> None:
    spec = read(GEMMA_2, tmp_path)
    assert spec.attention_scale == 144**-0.5
    assert (spec.attention_softcap, spec.logits_softcap) == (50.0, 30.0)
    assert spec.embedding_multiplier == 4608**0.5
    assert (spec.norms_add_one, spec.post_norms) == (True, True)
    assert [layer.window for layer in spec.layers[:3]] == [4096, None, 4096]


@pytest.mark.parametrize(
    ("content", "window", "local", "scaling"),
    [(GEMMA_3_1B, 512, 22, None), (GEMMA_3_4B, 1024, 29, LinearScaling(8.0))],
    ids=["1B", "4B"],
)
def test_gemma3_config_has_global_layer_in_six(
    content: Json, window: int, local: int, scaling: LinearScaling | None, tmp_path: Path
) -> None:
    spec = read(content, tmp_path)
    assert windows(spec) == {window: local, None: spec.num_layers - local}
    assert spec.layers[5].window is None
    for layer in spec.layers:
        expected = (1e6, scaling) if layer.window is None else (1e4, None)
        assert (layer.rope.theta, layer.rope.scaling) == expected


def test_gemma3_multimodal_config_prefixes_tensor_names(tmp_path: Path) -> None:
    spec = read(GEMMA_3_4B, tmp_path)
    assert spec.tensors == TensorNames(
        "language_model.model",
        "language_model.lm_head",
        unread=("vision_tower.", "multi_modal_projector."),
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)


def test_phi_config_has_partial_longrope(tmp_path: Path) -> None:
    three, four = read(PHI_3_MINI_128K, tmp_path), read(PHI_4_MINI, tmp_path)
    assert three.tensors.fused
    assert three.layers[0].rope.dim == three.head_dim == 96
    assert three.layers[0].rope.scaling == LongRopeScaling(
        (1.05,) * 48, (1.5,) * 48, 4096, attention_factor=pytest.approx(1.1902381)
    )
    assert (four.head_dim, four.layers[0].rope.dim) == (128, 96)


def test_phi_config_accepts_su_as_longrope(tmp_path: Path) -> None:
    scaling = PHI_3_MINI_128K["rope_scaling"]
    first = PHI_3_MINI_128K | {"rope_scaling": scaling | {"type": "su"}}
    assert read(first, tmp_path) == read(PHI_3_MINI_128K, tmp_path)


def test_granite_config_has_multipliers(tmp_path: Path) -> None:
    spec = read(GRANITE_3, tmp_path)
    assert spec.attention_scale == 0.0078125
    assert (spec.embedding_multiplier, spec.residual_multiplier) == (12.0, 0.22)
    assert spec.logits_divisor == 16.0


def test_mixtral_config_has_experts_in_all_layers(tmp_path: Path) -> None:
    spec = read(MIXTRAL_8X7B, tmp_path)
    assert {layer.experts for layer in spec.layers} == {Experts(8, 2, 14336, normalised=True)}
    assert spec.tensors == TensorNames(
        mixture="block_sparse_moe", expert_linears=("w1", "w3", "w2")
    )


def test_qwen_moe_configs_have_experts_and_dense_layers(tmp_path: Path) -> None:
    two, three = read(QWEN_1_5_MOE, tmp_path), read(QWEN_3_30B_A3B, tmp_path)
    assert {layer.experts for layer in two.layers} == {Experts(60, 4, 1408, False, 5632)}
    assert {layer.experts for layer in three.layers} == {Experts(128, 8, 768, True)}
    sparse = QWEN_3_30B_A3B | {"decoder_sparse_step": 3, "mlp_only_layers": [2, 7]}
    layers = enumerate(read(sparse, tmp_path).layers)
    assert [number for number, layer in layers if layer.experts] == [5, *range(8, 48, 3)]


def test_qwen3_moe_config_accepts_either_name_of_the_experts(tmp_path: Path) -> None:
    renamed = QWEN_3_30B_A3B | {"num_local_experts": QWEN_3_30B_A3B["num_experts"] // 2}
    del renamed["num_experts"]
    (experts,) = {layer.experts for layer in read(renamed, tmp_path).layers}
    assert experts is not None and experts.number == 64


def test_olmoe_config_has_norms_of_all_heads_and_clip(tmp_path: Path) -> None:
    spec = read(OLMOE_1B_7B, tmp_path)
    assert (spec.qk_norm, spec.qkv_clip, spec.qkv_bias) == ("all", None, False)
    assert {layer.experts for layer in spec.layers} == {Experts(64, 8, 1024, normalised=False)}
    assert read(OLMOE_1B_7B | {"clip_qkv": 8.0}, tmp_path).qkv_clip == 8.0
