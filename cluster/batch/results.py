"""The results of a batch: a file of JSON lines that only grows, so that a batch can be cut off at
any moment and go on later.

    {"id": "a", "text": " 42", "finish_reason": "stop", "usage": {...}}
    {"id": "b", "choices": [{"text": ..., "finish_reason": ...}, ...], "usage": {...}}
    {"id": "c", "line": 3, "error": {"code": "out_of_range", "message": "..."}}

A line whose id cannot be read has null for it. Each line is one write; what a crash of the machine
leaves of the last one is cut off when the file is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cluster.batch.lines import Key
from cluster.errors import BatchFailed


class Results(Container[Key]):
    """Opened with what is in it already. One process at a time has it."""

    def __init__(self, path: Path) -> None:
        """Raises BatchFailed for a file that is something else, or another's now; OSError."""
        self.path = path
        self._keys: set[Key] = set()
        self._failed: set[Key] = set()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            self._read()
        except BaseException:
            self.close()
            raise

    def __contains__(self, line: object) -> bool:
        """Whether the line of this Key is done."""
        return line in self._keys

    def num_done(self, lines: Iterable[Key]) -> int:
        """How many of ``lines`` are in it."""
        return sum(line in self._keys for line in lines)

    def num_failed(self, lines: Iterable[Key]) -> int:
        """How many of ``lines`` are in it as failures."""
        return sum(line in self._failed for line in lines)

    def append(self, record: Mapping[str, object]) -> None:
        """Raises OSError where it cannot be written whole."""
        data = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        if os.write(self._descriptor, data) != len(data):
            raise OSError(f"{self.path}: no room for the next result")
        self._take(record)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchFailed(f"another batch writes to {self.path}") from None

    def _read(self) -> None:
        whole = 0
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    break
                self._take(self._record(number, data))
                whole += len(data)
        os.ftruncate(self._descriptor, whole)

    def _record(self, number: int, data: bytes) -> dict[str, Any]:
        try:
            record = json.loads(data)
            if isinstance(record["id"] or "", str) and (record["id"] or record["line"]):
                return dict(record)
        except (ValueError, TypeError, KeyError):
            pass
        raise BatchFailed(f"{self.path} holds something else than results (line {number})")

    def _take(self, record: Mapping[str, Any]) -> None:
        line: Key = record["line"] if record["id"] is None else record["id"]
        self._keys.add(line)
        if "error" in record:
            self._failed.add(line)
