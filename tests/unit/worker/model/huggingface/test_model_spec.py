"""Specs from config.json, and refused configurations."""

from __future__ import annotations

import json
from math import nan
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from worker.model.huggingface.families import ARCHITECTURES, read_spec
from worker.model.spec import (
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    Rope,
    UnsupportedArchitecture,
    UnsupportedModel,
)

#: Configuration of a Llama 3.1, as transformers 4 wrote it.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}


def write(directory: Path, **changes: Any) -> Path:
    """Write the configuration of LLAMA with ``changes``; None removes a key."""
    config = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_read_spec_reads_transformers_4_config(tmp_path: Path) -> None:
    rope = Rope(500000.0, 8, Llama3Scaling(8.0, 1.0, 4.0, 1024))
    assert read_spec(write(tmp_path)) == ModelSpec(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=96,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        layers=(LayerSpec(rope), LayerSpec(rope)),
        norm_eps=1e-5,
        max_position=4096,
        tied_embeddings=False,
        attention_scale=8**-0.5,
    )


def test_read_spec_reads_transformers_5_config(tmp_path: Path) -> None:
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "linear", "rope_theta": 2000.0, "factor": 2.0},
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ).save_pretrained(tmp_path)
    assert read_spec(tmp_path) == ModelSpec(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=1,
        head_dim=16,
        layers=(LayerSpec(Rope(2000.0, 16, LinearScaling(2.0))),),
        norm_eps=1e-6,
        max_position=128,
        tied_embeddings=True,
        attention_scale=16**-0.5,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def test_read_spec_distinguishes_unsupported_architecture(
    tmp_path: Path,
) -> None:
    with pytest.raises(UnsupportedArchitecture, match="OPTForCausalLM") as refused:
        read_spec(write(tmp_path, architectures=["OPTForCausalLM"]))
    assert all(name in str(refused.value) for name in ARCHITECTURES)
    with pytest.raises(UnsupportedArchitecture, match="none named"):
        read_spec(write(tmp_path, architectures=None))
    with pytest.raises(UnsupportedModel) as too_much:
        read_spec(write(tmp_path, hidden_act="relu"))
    assert not isinstance(too_much.value, UnsupportedArchitecture)


QWEN = {"architectures": ["Qwen2ForCausalLM"]}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"]}
MIXTRAL = {"architectures": ["MixtralForCausalLM"]}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "sliding_window": 16}
OLMOE = {"architectures": ["OlmoeForCausalLM"]}
QWEN_MOE = {"architectures": ["Qwen2MoeForCausalLM"]}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "rope_scaling": None}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {"rope_type": "longrope", "short_factor": [1] * 4, "long_factor": [2] * 4}
HUGE = 10**400


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "dynamic"}}, ["dynamic", "default, linear, llama3, yarn"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor"]),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1]}},
            ["short_factor", "4 numbers"],
        ),
        ({"rope_scaling": "none"}, ["rope_scaling", "none"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"hidden_act": "relu"}, ["hidden_act", "relu", "silu"]),
        ({"quantization_config": {"bits": 4}}, ["method None", "fp8, compressed-tensors, awq"]),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ["mxfp4", "only for gpt-oss"]),
        (
            GPT_OSS | {"quantization_config": {"quant_method": "fp8"}},
            ["fp8", "not for gpt-oss: mxfp4 is"],
        ),
        (GPT_OSS | {"swiglu_limit": 5.0}, ["swiglu_limit", "7.0"]),
        ({"attention_bias": 1}, ["attention_bias", "true or false"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"vocab_size": "many"}, ["vocab_size", "many"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps", "small"]),
        ({"num_key_value_heads": 3}, ["8 heads", "3 KV heads"]),
        ({"head_dim": 7}, ["7 features of a head"]),
        (QWEN | {"layer_types": ["full_attention"]}, ["layer_types", "1 layers", "2"]),
        (QWEN | {"layer_types": ["full_attention", "chunked"]}, ["chunked", "sliding_attention"]),
        (QWEN | {"layer_types": ["sliding_attention"] * 2}, ["sliding_window"]),
        (GEMMA3 | {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        (MIXTRAL | {"num_experts_per_tok": 9}, ["num_experts_per_tok 9", "8 experts"]),
        (OLMOE | {"head_dim": 16}, ["head_dim 16", "supported: 8"]),
        (OLMOE | {"clip_qkv": "some"}, ["clip_qkv", "positive number"]),
        (OLMOE | {"clip_qkv": nan}, ["clip_qkv", "positive number"]),
        (OLMOE | {"clip_qkv": HUGE}, ["clip_qkv", "positive number"]),
        (OLMOE | {"clip_qkv": 3.5e38}, ["clip_qkv", "positive number in the range of fp32"]),
        (OLMOE | {"clip_qkv": 1e-38}, ["clip_qkv", "positive number in the range of fp32"]),
        ({"max_position_embeddings": HUGE}, ["max_position_embeddings", "at most 2147483647"]),
        ({"hidden_size": 1 << 31}, ["hidden_size", "at most 2147483647"]),
        *(
            (family | {"partial_rotary_factor": factor}, ["partial_rotary_factor", words])
            for family in (PHI3, GEMMA3, QWEN, GPT_OSS)
            for factor, words in ((1.25, "must be at most 1, not 1.25"), (1e308, "positive number"))
        ),
        (PHI3 | {"partial_rotary_factor": 0.1}, ["0 features of a head", "even and at least 2"]),
        (
            {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 1}},
            ["original_max_position_embeddings must be above 1 for longrope"],
        ),
        (
            {"rope_scaling": LONGROPE | {"original_max_position_embeddings": HUGE}},
            ["original_max_position_embeddings", "at most 2147483647"],
        ),
        ({"rope_scaling": YARN, "rope_theta": 1}, ["rope_theta must be above 1", "yarn, not 1.0"]),
        ({"rope_scaling": YARN | {"factor": 1e308}}, ["factor", "positive number"]),
        ({"rope_scaling": YARN | {"beta_slow": 1e-308}}, ["beta_slow", "positive number"]),
        (QWEN_MOE | {"num_experts": 0}, ["num_experts", "positive"]),
        (QWEN_MOE | {"mlp_only_layers": "1"}, ["mlp_only_layers", "list of integers"]),
        (QWEN_MOE | {"norm_topk_prob": 1}, ["norm_topk_prob", "true or false"]),
    ],
    ids=lambda value: [*value][-1] if isinstance(value, dict) else "",
)
def test_read_spec_names_unsupported_setting(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        read_spec(write(tmp_path, **changes))
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    "text", [None, "{", "[]", "[" * 100_000], ids=["missing", "broken", "list", "deep"]
)
def test_read_spec_rejects_missing_or_malformed_config(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        read_spec(tmp_path)
