"""Tiny random LoRA adapters in peft's format, and models with an adapter merged into them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

#: Linear layers with an adapter, and the names of their sections in a layer.
_TARGETS = {"q_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn", "up_proj": "mlp"}
_WEIGHTS = "model.safetensors"


def write_adapter(
    directory: Path, model: Path, *, seed: int, rank: int = 4, scale: float = 1.0, **config: Any
) -> Path:
    """Write a random adapter of a Llama model, and return its directory.

    ``scale`` multiplies its weights; ``config`` replaces fields of its configuration.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / _WEIGHTS).items():
        if name.split(".")[-2] in _TARGETS:
            base = f"base_model.model.{name.removesuffix('.weight')}"
            out_size, in_size = weight.shape
            first = torch.randn(rank, in_size, generator=generator) / in_size**0.5
            second = torch.randn(out_size, rank, generator=generator) * scale * weight.std().float()
            tensors[f"{base}.lora_A.weight"] = first
            tensors[f"{base}.lora_B.weight"] = second
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    facts = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [*_TARGETS],
        "bias": "none",
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(facts))
    return directory


def write_merged(directory: Path, model: Path, adapter: Path) -> Path:
    """Write the model with the weights of the adapter added, and return its directory."""
    shutil.copytree(model, directory)
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(model / _WEIGHTS)
    for name, weight in weights.items():
        base = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{base}.lora_A.weight" in factors:
            change = factors[f"{base}.lora_B.weight"] @ factors[f"{base}.lora_A.weight"]
            merged = weight.float() + config["lora_alpha"] / config["r"] * change
            weights[name] = merged
        else:
            weights[name] = weight.float()
    save_file(weights, directory / _WEIGHTS, {"format": "pt"})
    return directory
