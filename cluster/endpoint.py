"""Where a cluster that runs on this machine is found: a file in its state directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_FILE = "endpoint.json"


@contextmanager
def published(state_dir: Path, addresses: Sequence[str]) -> Iterator[None]:
    """The file, for as long as this process says."""
    path = state_dir / _FILE
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps({"addresses": list(addresses), "pid": os.getpid()}))
    written.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find(state_dir: Path) -> list[str]:
    """The routers' addresses; none when no cluster of this state directory runs."""
    try:
        known = json.loads((state_dir / _FILE).read_text())
    except (OSError, ValueError):
        return []
    return list(known["addresses"]) if _is_alive(known["pid"]) else []


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
