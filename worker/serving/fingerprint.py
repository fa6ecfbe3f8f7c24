"""Fingerprint of a model, computed without reading its weights.

The fingerprint is a SHA-256 over the files of the model, sorted by name. For configuration and
tokenizer files it covers the content. For weight files (safetensors or GGUF) it covers the size and
the header, which has the names, types and shapes of the tensors.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from everlift.gguf_directory import LINK
from everlift.gguf_header import read_gguf_header
from worker.model.checkpoint import read_header

_TEXT_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})
_WEIGHTS_SUFFIX = ".safetensors"


def model_fingerprint(directory: Path) -> str:
    """Return the fingerprint of the model in ``directory``, in hexadecimal.

    Raises ValueError if ``directory`` has no config.json, and BadCheckpoint or BadGguf if the
    header of a weight file is invalid.
    """
    if not (directory / "config.json").is_file():
        raise ValueError(f"no model at {str(directory)!r}: config.json is missing there")
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in _TEXT_SUFFIXES:
            _add(digest, path, path.read_bytes())
        elif path.suffix == _WEIGHTS_SUFFIX:
            _add(digest, path, read_header(path))
        elif path.name == LINK:
            with path.open("rb") as file:
                _add(digest, path, file.read(read_gguf_header(path).size))
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path, content: bytes) -> None:
    digest.update(f"{path.name}\0{path.stat().st_size}\0{len(content)}\0".encode())
    digest.update(content)
