"""Tensors of a safetensors file, as its header lists them. Does not import torch.

Layout of a file:

    header length (u64) | header (JSON): type, shape and offsets of each tensor | tensor data
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

#: Bytes per element of the types that parameters can be read from.
ITEM_SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I8": 1, "F8_E4M3": 1}
_LENGTH = struct.Struct("<Q")
#: Largest header, in bytes, that the safetensors library accepts.
_MAX_HEADER = 100_000_000
#: Largest number of dimensions of a tensor, and limit of each dimension.
_MAX_DIMENSIONS, _DIMENSION_LIMIT = 8, 1 << 63
_METADATA = "__metadata__"
_NAMES_IN_MESSAGE = 3


class BadCheckpoint(ValueError):
    """Raised if a checkpoint's files are missing or malformed, or do not match its config.json."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor in a file: the bytes of ``path`` from ``start`` to before ``end``.

    The elements are in row-major order. ``dtype`` is the name of their type in safetensors, such as
    BF16.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_tensors(path: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file in the order of their data.

    Raises BadCheckpoint if the file is missing, malformed or truncated, and OSError if it cannot be
    read.
    """
    try:
        header = read_header(path)
        size = path.stat().st_size
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is missing; weights are read from safetensors files") from None
    data = _LENGTH.size + len(header)
    tensors = [_tensor(path, name, entry, data) for name, entry in _entries(path, header)]
    cut = [tensor.name for tensor in tensors if tensor.end > size]
    if cut:
        raise BadCheckpoint(f"{path} is truncated: it ends before or within {some(cut)}")
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    for one, following in pairwise(tensors):
        if following.start < one.end:
            raise BadCheckpoint(f"{path}: {one.name} and {following.name} overlap")
    return tensors


def read_header(path: Path) -> bytes:
    """Return the JSON header of a safetensors file.

    Raises BadCheckpoint if the file has another format, and OSError if it cannot be read.
    """
    with path.open("rb") as file:
        prefix = file.read(_LENGTH.size)
        if len(prefix) == _LENGTH.size:
            (length,) = _LENGTH.unpack(prefix)
            header = file.read(length) if length <= _MAX_HEADER else b""
            if len(header) == length:
                return header
    raise BadCheckpoint(f"{path} is not a safetensors file")


def some(names: Collection[str]) -> str:
    """Return text for a message: the first few of ``names``, and the number of the others."""
    shown = ", ".join(sorted(names)[:_NAMES_IN_MESSAGE])
    more = len(names) - _NAMES_IN_MESSAGE
    return f"{shown} and {more} more" if more > 0 else shown


def _entries(path: Path, header: bytes) -> list[tuple[str, Any]]:
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        raise BadCheckpoint(f"{path} is not a safetensors file")
    return [(name, entry) for name, entry in entries.items() if name != _METADATA]


def _tensor(path: Path, name: str, entry: Any, data: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        start, end = map(int, entry["data_offsets"])
    except (TypeError, KeyError, ValueError, OverflowError):
        raise BadCheckpoint(f"{path}: the header's entry of {name} is invalid") from None
    item = ITEM_SIZES.get(dtype)
    # The shape is checked first, because a product of many huge integers takes minutes.
    is_fit = _is_shape(shape) and (item is None or end - start == item * math.prod(shape))
    if start < 0 or end < start or not is_fit:
        raise BadCheckpoint(f"{path}: the header's entry of {name} is invalid")
    return StoredTensor(name, path, dtype, shape, data + start, data + end)


def _is_shape(sizes: tuple[Any, ...]) -> bool:
    if len(sizes) > _MAX_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size < _DIMENSION_LIMIT for size in sizes)
