"""File in the state directory with the addresses of the local cluster, for commands.

The process that started the cluster holds a lock on the file. The lock ends with the process,
however the process ends, so a file that a killed process left behind names no cluster. The id of a
process would not tell: in a container, every new process has the id of the one before it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_FILE = "endpoint.json"


@contextmanager
def published(state_dir: Path, addresses: Sequence[str]) -> Iterator[None]:
    """Context manager: keep the routers' ``addresses`` in a file of the state directory.

    If several clusters use the state directory, the file contains the last one that was started.
    At the end, the file is deleted unless it is another cluster's.
    """
    path = state_dir / _FILE
    text = json.dumps({"addresses": list(addresses), "pid": os.getpid()})
    written = path.with_suffix(f".{os.getpid()}")
    with written.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(text)
        file.flush()
        written.replace(path)
        try:
            yield
        finally:
            # By now, the file may be another cluster's, or deleted.
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    path.unlink()


@dataclass(frozen=True, slots=True)
class Running:
    """Running cluster: its routers' addresses and the id of the process that started it."""

    addresses: list[str]
    pid: int


def find(state_dir: Path) -> list[str]:
    """Return the routers' addresses of the cluster that runs with this state directory.

    The list is empty if no such cluster runs.
    """
    cluster = running(state_dir)
    return cluster.addresses if cluster is not None else []


def running(state_dir: Path) -> Running | None:
    """Return the cluster that runs with this state directory, or None if none runs."""
    try:
        with (state_dir / _FILE).open() as file:
            if _is_locked(file):
                match json.loads(file.read()):
                    case {"addresses": [*addresses], "pid": int(pid)}:
                        return Running(addresses, pid)
    except (OSError, ValueError):
        # No cluster was started in this state directory, or its file is invalid.
        pass
    return None


def _is_locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
