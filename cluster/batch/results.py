"""The results of a batch: a file of JSON lines that only grows, so that a batch can be cut off at
any moment and go on later.

    {"id": "a", "text": " 42", "finish_reason": "stop", "usage": {...}}
    {"id": "b", "choices": [{"text": ..., "finish_reason": ...}, ...], "usage": {...}}
    {"id": "c", "line": 3, "error": {"code": "out_of_range", "message": "..."}}

A line whose id cannot be read has null for it. Each line is one write; what a crash of the machine
leaves of the last one is cut off when the file is opened again. A file that is something else is
refused as it is.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cluster.batch.lines import Key
from cluster.errors import BatchFailed

#: A line of ours as far as its id, and what may come behind that.
_BEGINNING = re.compile(rb'\{"id": (?:null|"(?:\\.|[^"\\])*")')
_NEXT = (b', "text": ', b', "choices": ', b', "line": ')
#: The same, torn within the id.
_TORN = (b'{"id": null', b'{"id": "')


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
                    if not whole and not _is_torn(data):
                        raise self._something_else(number)
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
        raise self._something_else(number)

    def _something_else(self, number: int) -> BatchFailed:
        return BatchFailed(f"{self.path} holds something else than results (line {number})")

    def _take(self, record: Mapping[str, Any]) -> None:
        line: Key = record["line"] if record["id"] is None else record["id"]
        self._keys.add(line)
        if "error" in record:
            self._failed.add(line)


def _is_torn(data: bytes) -> bool:
    """Whether it may be the beginning of a line of ours."""
    if begun := _BEGINNING.match(data):
        rest = data[begun.end() :]
        return any(rest.startswith(each) or each.startswith(rest) for each in _NEXT)
    return data.startswith(_TORN[1]) or any(each.startswith(data) for each in _TORN)
