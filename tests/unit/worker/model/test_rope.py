"""Rotary embedding against transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb
from transformers.utils import logging

from worker.config import WorkerConfig
from worker.model.decoder import Decoder
from worker.model.huggingface.families import read_spec
from worker.model.rope import RotaryTable, rotate
from worker.model.spec import Rope
from worker.parallel.group import Group
from worker.runner.build import build_runner

logging.set_verbosity_error()  # transformers warns of such parameters

HEAD_DIM = 64
LENGTH = 3000
CPU = torch.device("cpu")

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
    "yarn, every word": {
        "rope_type": "yarn",
        "factor": 6.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 20,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "yarn, its attention factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 0.8,
    },
    "yarn, a step in place of a ramp": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2,
    },
}


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * pair for pair in range(24)],
    "long_factor": [2.0 + pair for pair in range(24)],
}


def rope_of(config: LlamaConfig | Phi3Config, directory: Path) -> Rope:
    """Return the rope that is read from a configuration."""
    config.save_pretrained(directory)
    return read_spec(directory).layers[0].rope


def llama(**parameters: Any) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": 5000.0} | parameters,
    )


def phi3(original_context: int, **parameters: Any) -> Phi3Config:
    return Phi3Config(
        architectures=["Phi3ForCausalLM"],
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=LENGTH,
        original_max_position_embeddings=original_context,
        rope_parameters={"rope_theta": 5000.0} | parameters,
    )


def turned(heads: Tensor, positions: Tensor, embedding: nn.Module) -> Tensor:
    """Return ``heads`` rotated by transformers."""
    cos, sin = embedding(heads, positions[None])
    return apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)[0][0]


@pytest.mark.parametrize("parameters", KINDS.values(), ids=KINDS)
def test_rope_matches_transformers(parameters: dict[str, Any], tmp_path: Path) -> None:
    config = llama(**parameters)
    positions = torch.tensor([0, 1, 31, 700, LENGTH - 1])
    heads = torch.randn(len(positions), 3, HEAD_DIM)
    expected = turned(heads, positions, LlamaRotaryEmbedding(config))
    table = RotaryTable(rope_of(config, tmp_path), LENGTH, CPU)
    # Late positions have large angles, which are less accurate in fp32.
    torch.testing.assert_close(rotate(heads, table.at(positions)), expected, atol=3e-4, rtol=0)


@pytest.mark.parametrize("served", [400, 401, LENGTH])
@pytest.mark.parametrize("written", [{}, {"factor": 3.0}, {"attention_factor": 0.9}], ids=str)
def test_longrope_factors_follow_max_served_length(
    written: dict[str, float], served: int, tmp_path: Path
) -> None:
    """The result matches transformers for a sequence of that length.

    A part of each head is not rotated.
    """
    config = phi3(400, **LONGROPE | written)
    heads = torch.randn(3, 2, HEAD_DIM)
    positions = torch.tensor([5, 399, served - 1])
    expected = turned(heads, positions, Phi3RotaryEmbedding(config))
    table = RotaryTable(rope_of(config, tmp_path), served, CPU)
    got = rotate(heads, table.at(positions))
    torch.testing.assert_close(got, expected, atol=3e-4, rtol=0)
    assert torch.equal(got[..., 48:], heads[..., 48:])


@pytest.mark.parametrize(
    ("pool", "served", "is_long"),
    [
        ({"num_blocks": 12}, 384, True),
        ({"num_blocks": 13}, 416, True),
        ({"num_blocks": 13, "max_model_len": 400}, 400, False),
        ({"kv_cache_mib": 1}, 1024, True),
    ],
    ids=str,
)
def test_longrope_factors_do_not_follow_the_pool(
    pool: dict[str, int], served: int, is_long: bool, tmp_path: Path
) -> None:
    """1 MiB holds 32 blocks of a layer with two heads of 64, in fp32."""
    config = phi3(400, **LONGROPE)
    config.save_pretrained(tmp_path)
    threads = torch.get_num_threads()
    runner = build_runner(
        WorkerConfig(
            model=str(tmp_path), device="cpu", dtype="float32", load_format="dummy", **pool
        ),
        Group.single(),
    )
    torch.set_num_threads(threads)
    assert runner.max_model_len == served
    decoder = runner._model
    assert isinstance(decoder, Decoder)
    (table,) = decoder.layer_by_layer.tables
    heads, last = torch.randn(3, 2, HEAD_DIM), 1023 if is_long else 399
    positions = torch.tensor([5, served - 1])
    expected = turned(heads, torch.tensor([5, served - 1, last]), Phi3RotaryEmbedding(config))
    got = rotate(heads[:2], table.at(positions))
    torch.testing.assert_close(got, expected[:2], atol=3e-4, rtol=0)


def test_rope_keeps_dtype_of_heads() -> None:
    for dim in (HEAD_DIM, HEAD_DIM // 2):
        table = RotaryTable(Rope(10000.0, dim), 8, CPU)
        heads = torch.randn(2, 1, HEAD_DIM, dtype=torch.bfloat16)
        assert rotate(heads, table.at(torch.tensor([0, 5]))).dtype is torch.bfloat16
