"""Other people's clients, in the environment that `make` makes for them: .venv-clients, or what
EVERLIFT_CLIENTS_VENV names."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_BIN = Path(os.environ.get("EVERLIFT_CLIENTS_VENV") or ROOT / ".venv-clients") / "bin"


def program(name: str) -> str:
    """A path of what is installed there: python, schemathesis."""
    path = _BIN / name
    assert path.exists(), f"{path} is missing: make .venv-clients/.installed"
    return str(path)
