"""The file of a picture that a command is to draw."""

from __future__ import annotations

from pathlib import Path

from everlift.errors import SettingsError

_SUFFIXES = (".png", ".svg", ".pdf", ".jpg")


def check(option: str, path: Path) -> None:
    """Check the suffix of a picture file. Raises SettingsError."""
    if path.suffix.lower() not in _SUFFIXES:
        raise SettingsError(f"{option}: must end with one of {' '.join(_SUFFIXES)}, not {path}")
