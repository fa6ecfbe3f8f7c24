"""Report of a benchmark in build/bench: machine, versions, settings, raw figures and ratios."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def write(
    out: Path,
    *,
    packages: Sequence[str],
    settings: Mapping[str, Any],
    raw: Mapping[str, Any],
    ratios: Mapping[str, float],
) -> None:
    """Write the report to ``out``, and print its path and the ratios.

    ``packages`` are those on whose versions the figures depend. Raw figures are not printed,
    because they may have thousands of lines.
    """
    report = {
        "machine": machine(),
        "versions": {name: _version(name) for name in packages},
        "settings": settings,
        "raw": raw,
        "ratios": ratios,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{out}: {json.dumps(ratios, indent=2)}", flush=True)


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
