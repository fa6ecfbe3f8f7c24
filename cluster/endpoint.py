"""File in the state directory that tells commands where the local cluster is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_FILE = "endpoint.json"


@contextmanager
def published(state_dir: Path, addresses: Sequence[str]) -> Iterator[None]:
    """Publish the addresses in a file until the context ends.

    Of several clusters the last one is found.
    """
    path = state_dir / _FILE
    text = json.dumps({"addresses": list(addresses), "pid": os.getpid()})
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(text)
    written.replace(path)
    try:
        yield
    finally:
        # It may be another cluster's by now, or gone.
        with suppress(FileNotFoundError):
            if path.read_text() == text:
                path.unlink()


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster by its routers' addresses and the process that started it."""

    addresses: list[str]
    pid: int


def find(state_dir: Path) -> list[str]:
    """Return the routers' addresses; none when no cluster of this state directory runs."""
    cluster = running(state_dir)
    return cluster.addresses if cluster is not None else []


def running(state_dir: Path) -> Running | None:
    """Return the cluster of this state directory that runs."""
    try:
        match json.loads((state_dir / _FILE).read_text()):
            case {"addresses": [*addresses], "pid": int(pid)} if _is_alive(pid):
                return Running(addresses, pid)
    except (OSError, ValueError):
        # None was started here, or its file is just being written.
        pass
    return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        # It is there, and another user's.
        pass
    return True
