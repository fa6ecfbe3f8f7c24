"""LoRA adapters in peft's format: their files, checked without torch.

An adapter fits a model if its layers exist there and have the model's hidden size.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everlift import model_files
from everlift.adapters import AdapterSource, parse_adapters
from everlift.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from worker.model.checkpoint import BadCheckpoint, StoredTensor, read_tensors

#: Largest rank that vLLM supports.
MAX_RANK = 512
#: Name of a tensor in a layer of the language model, and not in one of a vision tower, for example.
_LAYER = re.compile(r"base_model\.model\.(?:(?:model|language_model)\.)*layers\.(\d+)\.")
#: Names of linear layers whose input is the hidden state, in all model families.
_HIDDEN_INPUTS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
#: Parts of peft that vLLM does not compute, by their key in the configuration.
_UNSUPPORTED = ("use_dora", "modules_to_save", "lora_bias", "layer_replication", "use_qalora")


class BadAdapter(ValueError):
    """Raised if an adapter's files are invalid, or do not fit the model."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Checked adapter; ``rank`` is its largest, and ``digest`` a hash of its files."""

    name: str
    directory: Path
    rank: int
    digest: str


def read_adapters(texts: Iterable[str], model: Path) -> list[Adapter]:
    """Return the adapters of the setting ``adapters``, for the model in a directory.

    Raises ModelUnavailable if files are missing, and BadAdapter if they are invalid or do not fit
    the model.
    """
    return [_read(source, model) for source in parse_adapters(texts)]


def _read(source: AdapterSource, model: Path) -> Adapter:
    directory = model_files.locate_adapter(source)
    try:
        config = _config(directory / ADAPTER_CONFIG)
        tensors = read_tensors(directory / ADAPTER_WEIGHTS)
        rank = _rank(config, tensors)
        _check_base(tensors, _config(model / "config.json"))
    except (BadCheckpoint, BadAdapter) as error:
        raise BadAdapter(f"adapter {source.name!r}: {error}") from None
    return Adapter(source.name, directory, rank, _digest(directory))


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise BadAdapter(f"{path} is not a JSON object")
    nested = config.get("text_config")
    return {**nested, **config} if isinstance(nested, dict) else config


def _rank(config: dict[str, Any], tensors: list[StoredTensor]) -> int:
    """Return the largest rank of an adapter's layers; raise BadAdapter if it is no LoRA adapter."""
    if (kind := config.get("peft_type")) != "LORA":
        raise BadAdapter(f"{ADAPTER_CONFIG} has peft_type {kind!r}; only LORA is supported")
    used = [key for key in _UNSUPPORTED if config.get(key)]
    if config.get("bias", "none") != "none":
        used.append("bias")
    if used:
        raise BadAdapter(f"{ADAPTER_CONFIG} uses {', '.join(used)}, which vLLM does not support")
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise BadAdapter(f"{ADAPTER_CONFIG} must have a rank r of at least 1, not {rank!r}")
    ranks = [tensor.shape[0] for tensor in tensors if _is_first_factor(tensor)]
    if not ranks:
        raise BadAdapter(f"{ADAPTER_WEIGHTS} has no LoRA weights (lora_A)")
    if (largest := max(rank, *ranks)) > MAX_RANK:
        raise BadAdapter(f"rank {largest} is above vLLM's limit of {MAX_RANK}")
    return largest


def _is_first_factor(tensor: StoredTensor) -> bool:
    return tensor.name.endswith(".lora_A.weight") and len(tensor.shape) > 1


def _check_base(tensors: list[StoredTensor], model: dict[str, Any]) -> None:
    """Raise BadAdapter if a layer of an adapter does not exist in the model, or has another size.

    The name of the base model is not compared, because a model may have other names, and adapters
    fit its quantised variants.
    """
    num_layers, hidden_size = model.get("num_hidden_layers"), model.get("hidden_size")
    layers = [int(found[1]) for it in tensors if (found := _LAYER.match(it.name))]
    if isinstance(num_layers, int) and max(layers, default=0) >= num_layers:
        raise BadAdapter(
            f"made for another model: it adapts layer {max(layers)}, and the model has "
            f"{num_layers} layers"
        )
    for tensor in filter(_is_first_factor, tensors):
        name = tensor.name.removesuffix(".lora_A.weight")
        has_hidden_input = name.rpartition(".")[2] in _HIDDEN_INPUTS and _LAYER.match(name)
        if has_hidden_input and hidden_size not in (None, tensor.shape[1]):
            raise BadAdapter(
                f"made for another model: {name} has {tensor.shape[1]} inputs, and the "
                f"model's hidden size is {hidden_size}"
            )


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
