"""Loading of LoRA adapters into a decoder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from worker.engine.adapter_slots import first_digests
from worker.model.adapters import (
    Adapter,
    BadAdapter,
    adapted_linears,
    digest_of,
    read_adapters,
)
from worker.model.checkpoint import StoredTensor
from worker.model.decoder import Decoder
from worker.model.filling import read_exactly
from worker.model.layers import Placement
from worker.model.lora import LowRank, PackedParts
from worker.model.spec import ModelSpec

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_adapters(
    decoder: Decoder,
    spec: ModelSpec,
    texts: Sequence[str],
    model: Path,
    place: Placement,
    num_slots: int,
) -> list[Adapter]:
    """Give a decoder ``num_slots`` adapter slots, and fill them with the first adapters in order.

    Return all adapters of the setting ``adapters``, given as ``texts``; do nothing and return an
    empty list if ``num_slots`` is 0. Adapters with equal files share a slot. The layers must not be
    packed yet. A collective: all ranks must call it. Raises ModelUnavailable if files are missing,
    and ValueError if a text is invalid or a name occurs twice. Raises BadAdapter if files are
    invalid, do not fit the model, or differ from those of rank 0. Raises OSError if a file cannot
    be read.
    """
    if not num_slots:
        return []
    adapters = read_adapters(texts, model)
    _check_equal(adapters, place)
    decoder.add_adapter_slots(num_slots)
    by_digest = {adapter.digest: adapter for adapter in adapters}
    first = first_digests({adapter.name: adapter.digest for adapter in adapters}, num_slots)
    for number, digest in enumerate(first, 1):
        decoder.place_adapter(number, packed_adapter(decoder, spec, by_digest[digest]))
    for digest in by_digest.keys() - first:
        adapted_linears(by_digest[digest], spec)
    return adapters


def packed_adapter(decoder: Decoder, spec: ModelSpec, adapter: Adapter) -> list[PackedParts]:
    """Read an adapter's matrices; return this rank's share of them for ``Decoder.place_adapter``.

    May run in any thread. Raises BadAdapter if they are invalid, do not fit the model, or have
    changed since ``adapter`` was read. Raises OSError if a file cannot be read.
    """
    packed = decoder.packed_adapter(_matrices(adapter, spec))
    if digest_of(adapter.directory) != adapter.digest:
        raise BadAdapter(f"adapter {adapter.name!r}: its files changed while they were read")
    return packed


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
