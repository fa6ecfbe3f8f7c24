"""Third-party clients, in the environment that `make` creates for them.

It is .venv-clients, or the directory that EVERLIFT_CLIENTS_VENV names.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_BIN = Path(os.environ.get("EVERLIFT_CLIENTS_VENV") or ROOT / ".venv-clients") / "bin"


def program(name: str) -> str:
    """Return the path of a program that is installed there, such as python or schemathesis."""
    path = _BIN / name
    assert path.exists(), f"{path} is missing: make .venv-clients/.installed"
    return str(path)
