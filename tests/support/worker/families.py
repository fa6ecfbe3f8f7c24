"""Random small checkpoints of every family with its peculiarities, and transformers' results.

Sizes do not divide each other: neither do ranks divide heads, KV heads, MLP features or the
vocabulary, nor heads the hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
)
from transformers.utils import logging

from tests.support.worker.llama_support import Reference

logging.disable_progress_bar()

VOCAB = 211
MAX_POSITION = 256

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 50,
    "intermediate_size": 70,
    "num_hidden_layers": 3,
    "max_position_embeddings": MAX_POSITION,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 5,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def _longrope(pairs: int, **changes: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 0.7 * pair for pair in range(pairs)],
        "attention_factor": 1.2,
    } | changes


@dataclass(frozen=True)
class Checkpoint:
    """Config of ``model_type``; ``sizes`` override the common ones."""

    model_type: str
    heads: int
    kv_heads: int
    head_dim: int
    sizes: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        heads = {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }
        return _SIZES | heads | self.sizes


CHECKPOINTS = {
    "llama, biases, llama3 rope": Checkpoint(
        "llama",
        *(6, 2, 12),
        {
            "hidden_size": 48,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _LLAMA3,
        },
    ),
    "llama, tied, linear rope": Checkpoint(
        "llama",
        *(3, 3, 16),
        {
            "hidden_size": 48,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        },
    ),
    "mistral, window": Checkpoint("mistral", 9, 3, 8, {"sliding_window": 20}),
    "mistral, tied, wide window, yarn": Checkpoint(
        "mistral",
        *(4, 1, 10),
        {"sliding_window": 65, "tie_word_embeddings": True, "rope_parameters": _YARN},
    ),
    "qwen2, windows in the last layers": Checkpoint(
        "qwen2",
        *(7, 7, 8),
        {"use_sliding_window": True, "sliding_window": 25, "max_window_layers": 1},
    ),
    "qwen2, tied, yarn": Checkpoint(
        "qwen2", 6, 3, 8, {"tie_word_embeddings": True, "rope_parameters": _YARN}
    ),
    "qwen3, biases": Checkpoint("qwen3", 10, 5, 6, {"attention_bias": True}),
    "qwen3, tied, mixed layers": Checkpoint(
        "qwen3",
        *(4, 2, 14),
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": _MIXED_LAYERS,
        },
    ),
    "gemma2, softcaps": Checkpoint(
        "gemma2",
        *(5, 5, 10),
        {
            "sliding_window": 17,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma2, untied, biases, no softcap of scores": Checkpoint(
        "gemma2",
        *(10, 1, 8),
        {
            "sliding_window": 33,
            "query_pre_attn_scalar": 8,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3, two ropes": Checkpoint(
        "gemma3_text",
        *(5, 1, 12),
        {
            "sliding_window": 20,
            "query_pre_attn_scalar": 9,
            "layer_types": _MIXED_LAYERS,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma3, untied, biases, softcap": Checkpoint(
        "gemma3_text",
        *(10, 5, 8),
        {
            "sliding_window": 45,
            "query_pre_attn_scalar": 8,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 12.0,
        },
    ),
    "gemma3 that could see": Checkpoint(
        "gemma3", 5, 5, 8, {"sliding_window": 30, "query_pre_attn_scalar": 8}
    ),
    "phi3, part of a head, long longrope": Checkpoint(
        "phi3",
        *(6, 2, 16),
        {
            "hidden_size": 96,
            "original_max_position_embeddings": 64,
            "rope_parameters": _longrope(6, partial_rotary_factor=0.75),
        },
    ),
    "phi3, tied, window, short longrope": Checkpoint(
        "phi3",
        *(5, 5, 12),
        {
            "hidden_size": 60,
            "sliding_window": 30,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": MAX_POSITION,
            "rope_parameters": _longrope(6),
        },
    ),
    "granite, biases": Checkpoint(
        "granite",
        *(9, 3, 8),
        {
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.7,
        },
    ),
    "granite, tied": Checkpoint(
        "granite",
        *(5, 1, 10),
        {
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
            "logits_scaling": 0.9,
        },
    ),
    "mixtral, window": Checkpoint(
        "mixtral",
        *(9, 3, 8),
        {
            "intermediate_size": 37,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 20,
        },
    ),
    "mixtral, tied, all experts": Checkpoint(
        "mixtral",
        *(4, 1, 10),
        {
            "intermediate_size": 21,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe, a dense layer": Checkpoint(
        "qwen2_moe",
        *(7, 7, 8),
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 23,
            "shared_expert_intermediate_size": 31,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe, windows, normalised, no biases": Checkpoint(
        "qwen2_moe",
        *(6, 3, 8),
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 15,
            "shared_expert_intermediate_size": 42,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 25,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe, few features, normalised": Checkpoint(
        "qwen3_moe",
        *(10, 5, 6),
        {
            "num_experts": 9,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 9,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe, dense layers, biases, window": Checkpoint(
        "qwen3_moe",
        *(4, 2, 14),
        {
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 33,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 40,
        },
    ),
    "olmoe": Checkpoint(
        "olmoe",
        *(5, 5, 10),
        {
            "intermediate_size": 17,
            "num_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
    "olmoe, one KV head, clip, biases, normalised": Checkpoint(
        "olmoe",
        *(5, 1, 10),
        {
            "intermediate_size": 25,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "clip_qkv": 0.9,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": Checkpoint(
        "gpt_oss",
        *(10, 5, 6),
        {
            "intermediate_size": 27,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "sliding_window": 20,
            "layer_types": _MIXED_LAYERS,
            "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    "gpt_oss, tied, no biases, one expert for a token": Checkpoint(
        "gpt_oss",
        *(10, 5, 8),
        {
            "intermediate_size": 21,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "sliding_window": 45,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
}
#: Smallest vision tower, so that the checkpoint has its tensors.
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def save_family(directory: Path, checkpoint: Checkpoint) -> Path:
    """Save a random model whose logits are spread wide enough to make near ties rare."""
    torch.manual_seed(20)
    model = _random_model(checkpoint)
    around = 0.0 if checkpoint.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(std=0.2 if is_norm else 0.25).add_(around if is_norm else 0.0)
    model.save_pretrained(directory)
    return directory


def _random_model(checkpoint: Checkpoint) -> PreTrainedModel:
    if checkpoint.model_type == "gemma3":
        text = {"model_type": "gemma3_text"} | checkpoint.config()
        config = AutoConfig.for_model("gemma3", text_config=text, vision_config=_VISION)
        return Gemma3ForConditionalGeneration(config)
    config = AutoConfig.for_model(checkpoint.model_type, **checkpoint.config())
    return AutoModelForCausalLM.from_config(config)


def load_family(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the checkpoint with transformers.

    Attention and experts are eager: other implementations of attention omit softcaps, and those of
    experts refuse odd sizes.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    if getattr(model.config, "original_max_position_embeddings", MAX_POSITION) < MAX_POSITION:
        # A worker that serves longer sequences uses the long factors for all sequences.
        model.config.original_max_position_embeddings = 1
        model.config.standardize_rope_params()
    return model


@torch.inference_mode()
def all_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Return transformers' logits [tokens, vocab] after each of ``tokens``."""
    return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


def greedy(model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> Reference:
    """Return the tokens that transformers selects after each prefix of ``output``.

    They equal greedy decoding up to the first difference. A margin is the gap between the two
    largest logits.
    """
    logits = all_logits(model, [*prompt, *output])[len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.unbind(-1)
    return Reference(logits.argmax(-1).tolist(), (best - second).tolist())
