"""Check of the interpreter of ranks under Ray; scripts take the place of interpreters."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
import ray

from worker.serving.interpreter import UnusableInterpreter, check_interpreter

RAY = "2.60.0"
OWN = platform.python_version()


def interpreter(directory: Path, output: str) -> str:
    path = directory / "python"
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (f'["{OWN}", ""]', r"which lacks ray: run .*python -m pip install ray==2\.60\.0"),
        (f'["{OWN}", "2.59.0"]', r"which has ray 2\.59\.0: run .*ray==2\.60\.0"),
        (f'["3.10.1", "{RAY}"]', r"with Python 3\.10\.1, but Ray requires"),
        ("Segmentation fault", "does not run"),
    ],
)
def test_unusable_interpreter_is_refused(tmp_path: Path, output: str, cause: str) -> None:
    with pytest.raises(UnusableInterpreter, match=cause):
        check_interpreter(interpreter(tmp_path, output), RAY)


def test_missing_interpreter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInterpreter, match=r"does not run: .*No such file"):
        check_interpreter(str(tmp_path / "python"), RAY)


def test_own_interpreter_is_usable() -> None:
    check_interpreter(sys.executable, ray.__version__)
