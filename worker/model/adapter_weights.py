"""Loading of LoRA adapters into a decoder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from worker.model.adapters import Adapter, BadAdapter, adapted_linears, read_adapters
from worker.model.checkpoint import StoredTensor
from worker.model.decoder import Decoder
from worker.model.filling import read_exactly
from worker.model.layers import Placement
from worker.model.lora import LowRank
from worker.model.spec import ModelSpec

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_adapters(
    decoder: Decoder, spec: ModelSpec, texts: Sequence[str], model: Path, place: Placement
) -> list[Adapter]:
    """Load the adapters of the setting ``adapters`` into a decoder whose layers are not packed yet.

    Return them in the order of their numbers. A collective: all ranks must call it. Raises
    ModelUnavailable if files are missing, and BadAdapter if they are invalid, do not fit the model,
    or differ from those of rank 0.
    """
    if not texts:
        return []
    adapters = read_adapters(texts, model)
    _check_equal(adapters, place)
    decoder.add_adapters([_matrices(adapter, spec) for adapter in adapters])
    return adapters


def _matrices(adapter: Adapter, spec: ModelSpec) -> dict[str, LowRank]:
    return {
        name: LowRank(_read(linear.a), _read(linear.b), linear.scaling)
        for name, linear in adapted_linears(adapter, spec).items()
    }


def _read(tensor: StoredTensor) -> Tensor:
    values = torch.empty(tensor.shape, dtype=_DTYPES[tensor.dtype])
    with tensor.path.open("rb", buffering=0) as file:
        buffer = values.view(-1).view(torch.uint8).numpy().data
        if not read_exactly(file.fileno(), buffer, tensor.start):
            raise BadAdapter(f"{tensor.path} became shorter while it was read")
    if not values.isfinite().all():
        raise BadAdapter(f"{tensor.path}: {tensor.name} has weights that are infinite or NaN")
    return values


def _check_equal(adapters: Sequence[Adapter], place: Placement) -> None:
    digest = hashlib.sha256("".join(adapter.digest for adapter in adapters).encode()).digest()
    own = int.from_bytes(digest[:7])
    first = place.group.broadcast(torch.tensor([own], device=place.device)).item()
    if not place.group.agree(first == own):
        raise BadAdapter("the files of adapters differ between the ranks of the worker")
