"""What tells two copies of a model apart, without reading the weights.

SHA-256 over all files by name: of configuration and tokenizer the content, of weights the size and
the header (names, types and shapes of the tensors).
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

_TEXT_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})
_WEIGHTS_SUFFIX = ".safetensors"
_HEADER_LENGTH = struct.Struct("<Q")
#: safetensors' own bound on a header.
_MAX_HEADER = 100_000_000


def model_fingerprint(directory: Path) -> str:
    """Raises ValueError where there is no model."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"no model at {str(directory)!r}: config.json is missing there")
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in _TEXT_SUFFIXES:
            _add(digest, path, path.read_bytes())
        elif path.suffix == _WEIGHTS_SUFFIX:
            _add(digest, path, _weights_header(path))
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path, content: bytes) -> None:
    digest.update(f"{path.name}\0{path.stat().st_size}\0{len(content)}\0".encode())
    digest.update(content)


def _weights_header(path: Path) -> bytes:
    """A safetensors file begins with the length of its header, then the header in JSON."""
    with path.open("rb") as file:
        prefix = file.read(_HEADER_LENGTH.size)
        if len(prefix) < _HEADER_LENGTH.size:
            raise ValueError(f"{path} is no safetensors file")
        (length,) = _HEADER_LENGTH.unpack(prefix)
        if length > _MAX_HEADER:
            raise ValueError(f"{path} is no safetensors file")
        return file.read(length)
