"""Random LoRA adapters of small checkpoints, written by peft, and peft's own results."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.support.worker.families import Checkpoint, load_family

#: Settings of the adapters by name. Adapter ranks do not divide other sizes.
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"r": 5, "lora_alpha": 7},
    "patterns": {
        "r": 6,
        "lora_alpha": 3,
        "use_rslora": True,
        "rank_pattern": {"o_proj": 3, "1.self_attn.(q|qkv)_proj": 17},
        "alpha_pattern": {"layers.0.self_attn.o_proj": 11, ".*v_proj": 2.5},
    },
    "few": {"r": 1, "lora_alpha": 2, "layers_to_transform": [1]},
}
NUMBERS = {"": 0} | {name: number for number, name in enumerate(SETTINGS, 1)}


def targets(checkpoint: Checkpoint, name: str) -> list[str]:
    """Return the linear layers of the checkpoint that the adapter changes."""
    qkv, mlp = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]
    if checkpoint.model_type == "phi3":
        qkv, mlp = ["qkv_proj"], ["gate_up_proj"]
    if "num_experts_per_tok" in checkpoint.sizes:
        return [*qkv, "o_proj"]
    return {
        "all": [*qkv, "o_proj", *mlp, "down_proj"],
        "patterns": [qkv[0], qkv[-1], "o_proj", "down_proj"],
        "few": [qkv[-1], mlp[-1]],
    }[name]


def save_adapters(directory: Path, model: Path, checkpoint: Checkpoint) -> list[str]:
    """Write the adapters of SETTINGS; return the value of the setting ``adapters``."""
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        save_adapter(
            directory / name, model, seed, target_modules=targets(checkpoint, name), **settings
        )
    return [f"{name}={directory / name}" for name in SETTINGS]


def save_adapter(directory: Path, model: Path, seed: int, **settings: Any) -> Path:
    torch.manual_seed(seed)
    with _deprecations_ignored():
        adapted = get_peft_model(
            load_family(model), LoraConfig(init_lora_weights=False, **settings)
        )
        adapted.save_pretrained(str(directory))
    return directory


def peft_model(model: Path, adapter: Path) -> Any:
    with _deprecations_ignored():
        return PeftModel.from_pretrained(load_family(model), str(adapter)).eval()


@contextmanager
def _deprecations_ignored() -> Iterator[None]:
    """Ignore warnings that this version of peft uses names deprecated by transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
