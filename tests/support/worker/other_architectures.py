"""Random small checkpoints of architectures that run through transformers.

Each has its architecture's peculiarities. Windows are shorter than the tests' prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.worker.families import MAX_POSITION, VOCAB

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 5,
}
_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
#: Partial rotary embedding.
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

#: By model type: config values that override the common sizes.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": {"rope_parameters": _PARTIAL, "use_parallel_residual": True},
    "opt": {"ffn_dim": 72, "word_embed_proj_dim": 20},
    "phi": {"rope_parameters": _PARTIAL, "qk_layernorm": True},
    "stablelm": {"rope_parameters": _PARTIAL, "qk_layernorm": True, "use_qkv_bias": True},
    "starcoder2": {"sliding_window": 20},
    "cohere": {"logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.3, "sliding_window": 20, "layer_types": _MIXED_LAYERS},
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_oss": {
        "head_dim": 14,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "layer_types": _MIXED_LAYERS,
    },
    "glm4": {"head_dim": 16, "rope_parameters": _PARTIAL},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gemma": {"head_dim": 14},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "phimoe": {"num_local_experts": 5, "num_experts_per_tok": 2},
}


def save_other(directory: Path, model_type: str, **changes: Any) -> Path:
    """Save a random model whose logits are spread wide enough to make near ties rare."""
    torch.manual_seed(20)
    config = AutoConfig.for_model(model_type, **(_SIZES | CONFIGS[model_type] | changes))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for module in model.modules():
            is_norm = "Norm" in type(module).__name__
            for name, parameter in module.named_parameters(recurse=False):
                parameter.normal_(std=0.2 if is_norm else 0.25).add_(is_norm and name == "weight")
    model.save_pretrained(directory)
    return directory


def save_config(directory: Path, model_type: str, architecture: str, **config: Any) -> Path:
    """Save a configuration without weights, which is enough for dummy weights."""
    made = AutoConfig.for_model(model_type, **(_SIZES | config))
    made.architectures = [architecture]
    made.save_pretrained(directory)
    return directory
