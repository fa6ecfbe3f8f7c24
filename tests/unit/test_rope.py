"""Rotary embedding against transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from worker.model.rope import RotaryTable, rotate
from worker.model.spec import LinearScaling, Llama3Scaling, Rope

HEAD_DIM = 64
LENGTH = 3000


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (Rope(10000.0, None), {"rope_type": "default"}),
        (Rope(1e6, LinearScaling(4.0)), {"rope_type": "linear", "factor": 4.0}),
        (
            Rope(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 256)),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        ),
    ],
    ids=["default", "linear", "llama3"],
)
def test_heads_are_turned_as_transformers_turns_them(
    rope: Rope, parameters: dict[str, Any]
) -> None:
    positions = torch.tensor([0, 1, 31, 700, LENGTH - 1])
    heads = torch.randn(len(positions), 3, HEAD_DIM)
    table = RotaryTable(rope, HEAD_DIM, LENGTH, torch.device("cpu"))
    config = LlamaConfig(
        head_dim=HEAD_DIM,
        max_position_embeddings=LENGTH,
        rope_parameters=parameters | {"rope_theta": rope.theta},
    )
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    # Late positions are large angles, of which fp32 knows fewer digits.
    torch.testing.assert_close(rotate(heads, table.at(positions)), expected[0], atol=3e-4, rtol=0)


def test_the_dtype_of_the_heads_is_kept() -> None:
    table = RotaryTable(Rope(10000.0, None), HEAD_DIM, 8, torch.device("cpu"))
    heads = torch.randn(2, 1, HEAD_DIM, dtype=torch.bfloat16)
    assert rotate(heads, table.at(torch.tensor([0, 5]))).dtype is torch.bfloat16
