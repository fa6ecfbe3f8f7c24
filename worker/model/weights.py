"""From safetensors into a rank's parameters: of each tensor only the rank's slice is read, once."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from worker.model.decoder import Decoder
from worker.model.layers import Piece

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")
#: What a checkpoint may hold beside the parameters: derived tables, and a head that is tied.
_REDUNDANT = re.compile(r"rotary_emb\.inv_freq$|^lm_head\.weight$")
_NAMES_IN_MESSAGE = 3


class BadCheckpoint(ValueError):
    """The tensors of the checkpoint are not those that its config.json promises."""


def load(decoder: Decoder, directory: str | Path) -> int:
    """Fills every parameter of ``decoder``; returns their bytes. Raises BadCheckpoint."""
    pieces = {piece.name: piece for piece in decoder.pieces()}
    held = sum(piece.into.nbytes for piece in pieces.values())
    unexpected: list[str] = []
    for path in _files(Path(directory)):
        unexpected += _read_file(path, pieces)
    if pieces:
        raise BadCheckpoint(f"{directory} lacks {_some(pieces)}")
    if unexpected:
        raise BadCheckpoint(f"{directory} has tensors that the model does not: {_some(unexpected)}")
    return held


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.exists():
        return [directory / _SINGLE]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadCheckpoint(f"{index} is not an index of safetensors files") from None
    return [directory / name for name in sorted(names)]


def _read_file(path: Path, pieces: dict[str, Piece]) -> list[str]:
    """Takes from ``pieces`` those that ``path`` holds; returns the names of its other tensors."""
    unexpected = []
    try:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():
                piece = pieces.pop(name, None)
                if piece is not None:
                    _read_piece(tensors.get_slice(name), piece)
                elif not _REDUNDANT.search(name):
                    unexpected.append(name)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is missing (only safetensors are read)") from None
    except SafetensorError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}") from None
    return unexpected


def _read_piece(tensor: Any, piece: Piece) -> None:
    shape = tuple(tensor.get_shape())
    if shape != piece.shape:
        raise BadCheckpoint(f"{piece.name} has shape {shape}; the config makes it {piece.shape}")
    if tensor.get_dtype() not in _DTYPES:
        raise BadCheckpoint(
            f"{piece.name} is {tensor.get_dtype()}; supported: {', '.join(_DTYPES)}"
        )
    piece.into.copy_(tensor[piece.slices])


def _some(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMES_IN_MESSAGE])
    more = len(names) - _NAMES_IN_MESSAGE
    return f"{shown} and {more} more" if more > 0 else shown
