"""What is read from config.json, and what is refused there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig

from worker.model.spec import LinearScaling, Llama3Scaling, ModelSpec, Rope, UnsupportedModel

#: As transformers 4 wrote a Llama 3.1.
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
    "eos_token_id": [7, 9],
}


def write(directory: Path, **changes: Any) -> Path:
    """A value of None takes the key away."""
    config = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_config_of_transformers_4_is_read(tmp_path: Path) -> None:
    assert ModelSpec.from_hf(write(tmp_path)) == ModelSpec(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        norm_eps=1e-5,
        rope=Rope(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 1024)),
        max_position=4096,
        tied_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        eos_token_ids=(7, 9),
    )


def test_a_config_of_transformers_5_is_read(tmp_path: Path) -> None:
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
        eos_token_id=4,
    ).save_pretrained(tmp_path)
    assert ModelSpec.from_hf(tmp_path) == ModelSpec(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=1,
        head_dim=16,
        norm_eps=1e-6,
        rope=Rope(2000.0, LinearScaling(2.0)),
        max_position=128,
        tied_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        eos_token_ids=(4,),
    )


def test_what_an_old_config_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    left_out = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta")
    write(tmp_path, **dict.fromkeys([*left_out, "rope_scaling", "eos_token_id"]))
    spec, config = ModelSpec.from_hf(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.max_position == config.max_position_embeddings
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.rope == Rope(config.rope_parameters["rope_theta"], None)
    assert spec.eos_token_ids == (config.eos_token_id,)
    assert spec.tied_embeddings == config.tie_word_embeddings


def test_the_generation_config_knows_the_end_tokens_better(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2, 3]}')
    assert ModelSpec.from_hf(write(tmp_path)).eos_token_ids == (1, 2, 3)


def test_a_generation_config_without_end_tokens_leaves_the_configs(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{}")
    assert ModelSpec.from_hf(write(tmp_path)).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["OPTForCausalLM"]}, ["OPTForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None}, ["none named", "LlamaForCausalLM"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["yarn", "default, linear, llama3"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear", "factor"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"vocab_size": "many"}, ["vocab_size", "many"]),
        ({"num_key_value_heads": 3}, ["8 heads", "3 KV heads"]),
        ({"head_dim": 7}, ["head_dim 7"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_decoder_does_not_do_is_refused_by_name(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        ModelSpec.from_hf(write(tmp_path, **changes))
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("text", [None, "{", "[]"], ids=["missing", "broken", "list"])
def test_a_directory_without_a_config_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        ModelSpec.from_hf(tmp_path)
