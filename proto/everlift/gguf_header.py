"""Reader of the header of a GGUF file: metadata and table of tensors, with all sizes checked.

    magic "GGUF" | version (u32) | number of tensors (u64) | number of keys (u64)
    keys:     name (string) | type (u32) | value
    tensors:  name (string) | number of dimensions (u32) | dimensions (u64 each) | type (u32) |
              offset from the start of the data (u64)
    padding to general.alignment | data

A string is its length (u64) and its bytes. Numbers are little-endian. The format is that of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    number: struct.Struct(f"<{letter}")
    for number, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_U32, _U64 = _NUMBERS[4], _NUMBERS[10]
#: Maximum size of a header. A vocabulary of a million tokens with its merges takes a third of it.
_MAX_HEADER_BYTES = 100_000_000
_MAX_ELEMENTS = 8_000_000
_MAX_DIMENSIONS = 4
_MAX_SHOWN = 80
_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT = "general.alignment", 32


def is_gguf(name: str) -> bool:
    """Return whether a file's name, or a path, has the suffix of GGUF files."""
    return name.lower().endswith(SUFFIX)


def short_repr(value: object) -> str:
    """Return the text that stands for a value of a header in an error message.

    It is the value's ``repr``; "..." replaces what exceeds _MAX_SHOWN characters.
    """
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class BadGguf(ValueError):
    """Raised if a file is not GGUF, is truncated, or has missing or inconsistent content."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Name, shape, type and position of one tensor, which the header lists.

    ``shape`` is row-major, so that the last dimension is contiguous. ``type`` is the number of a
    ggml type. ``start`` is the position of the data in the file, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    start: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Header of the GGUF file ``path``; it takes the first ``size`` bytes, including padding."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    size: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of the file ``path``.

    Raises BadGguf if the header is invalid, and OSError if the file cannot be read.
    """
    with path.open("rb") as file:
        try:
            return _read(path, _Reader(file))
        except _Malformed as error:
            raise BadGguf(f"{path} {error}") from None


class _Malformed(Exception):
    pass


class _Reader:
    """Reader of the values in a header.

    Its methods raise _Malformed for an invalid value, and for one that ends after the end of the
    file or makes the header larger than allowed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.file_size = os.fstat(file.fileno()).st_size
        self.position = 0

    def bytes(self, count: int) -> bytes:
        if self.position + count > self.file_size:
            raise _Malformed("is truncated: its header ends beyond the file")
        self.position += count
        if self.position > _MAX_HEADER_BYTES:
            raise _Malformed(f"has a header of more than {_MAX_HEADER_BYTES} bytes")
        return self._file.read(count)

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.bytes(form.size))[0]

    def string(self) -> str:
        try:
            return self.bytes(self.number(_U64)).decode("utf-8")
        except UnicodeDecodeError:
            raise _Malformed("has a string that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _ARRAY:
            return self._array()
        if kind == _STRING:
            return self.string()
        return self.number(_number_form(kind))

    def _array(self) -> list[Any]:
        kind, count = self.number(_U32), self.number(_U64)
        if count > _MAX_ELEMENTS:
            raise _Malformed(f"has an array of {count} elements; at most {_MAX_ELEMENTS} are read")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        form = _number_form(kind)
        return [value for (value,) in form.iter_unpack(self.bytes(count * form.size))]


def _number_form(kind: int) -> struct.Struct:
    if kind not in _NUMBERS:
        raise _Malformed(f"has a value of type {kind}, which is not supported")
    return _NUMBERS[kind]


def _read(path: Path, reader: _Reader) -> GgufHeader:
    if reader.file_size < len(_MAGIC) or reader.bytes(len(_MAGIC)) != _MAGIC:
        raise _Malformed("is not a GGUF file")
    version = reader.number(_U32)
    if version not in _VERSIONS:
        raise _Malformed(f"has GGUF version {version}; supported: 2 and 3, little-endian")
    num_tensors, num_keys = reader.number(_U64), reader.number(_U64)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        name = reader.string()
        if name in metadata:
            raise _Malformed(f"has the key {short_repr(name)} twice")
        metadata[name] = reader.value(reader.number(_U32))
    entries: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        entry = _entry(reader)
        if entry.name in entries:
            raise _Malformed(f"has the tensor {short_repr(entry.name)} twice")
        entries[entry.name] = entry
    size = _padded(reader.position, metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT))
    tensors = (GgufTensor(t.name, t.shape, t.type, size + t.start) for t in entries.values())
    return GgufHeader(path, metadata, tuple(tensors), size)


def _entry(reader: _Reader) -> GgufTensor:
    name, num_dimensions = reader.string(), reader.number(_U32)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise _Malformed(f"has the tensor {short_repr(name)} with {num_dimensions} dimensions")
    shape = tuple(reader.number(_U64) for _ in range(num_dimensions))[::-1]
    if not 0 < math.prod(shape) < 1 << 63:
        raise _Malformed(f"has the tensor {short_repr(name)} with the impossible shape {shape}")
    return GgufTensor(name, shape, reader.number(_U32), reader.number(_U64))


def _padded(position: int, alignment: object) -> int:
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _Malformed(f"has the alignment {short_repr(alignment)}, which is not a power of two")
    return -(-position // alignment) * alignment
