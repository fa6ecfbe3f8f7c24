"""Pickles that run a program when they are loaded."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path


class _Left:
    """Object that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> object:
        return Path.touch, (self._marker,)


def leaving(marker: Path, protocol: int = pickle.DEFAULT_PROTOCOL) -> bytes:
    """Return a pickle that creates the file ``marker`` when it is loaded."""
    return pickle.dumps(_Left(marker), protocol)


def saved(marker: Path) -> bytes:
    """Return a torch.save file whose pickle creates the file ``marker`` when it is loaded."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("archive/data.pkl", leaving(marker, 2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return held.getvalue()
