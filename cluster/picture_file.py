"""Check of the name of the file into which a command draws a picture."""

from __future__ import annotations

from pathlib import Path

from everlift.errors import SettingsError

_SUFFIXES = (".png", ".svg", ".pdf", ".jpg")


def check(option: str, path: Path) -> None:
    """Raise SettingsError if ``path`` has no suffix of a picture format, such as ".png".

    ``option`` is the command line option with which ``path`` was given; the error names it.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise SettingsError(f"{option}: must end with one of {' '.join(_SUFFIXES)}, not {path}")
