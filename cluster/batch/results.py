"""Results of a batch: a file of JSON lines, to which each result is appended.

A batch can be interrupted at any moment and continued later.

    {"id": "a", "text": " 42", "finish_reason": "stop", "usage": {...}}
    {"id": "b", "choices": [{"text": ..., "finish_reason": ...}, ...], "usage": {...}}
    {"id": "d", "message": {"role": "assistant", ...}, "finish_reason": "stop", "usage": {...}}
    {"id": "c", "line": 3, "error": {"code": "out_of_range", "message": "..."}}

The id is null if it could not be read from the input line. The result of a retry is appended to the
file. When the file is closed or opened again, the retry's result replaces the earlier one. The
error of a later attempt has the number of the attempt ("attempt": 2). Each result is one write. If
a crash of the machine leaves an incomplete last line, it is cut off when the file is opened again.
A file that has other content is rejected and not changed.
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

#: Beginning of a result up to its id, and the texts that may follow the id.
_BEGINNING = re.compile(rb'\{"id": (?:null|"(?:\\.|[^"\\])*")')
_NEXT = (b', "text": ', b', "choices": ', b', "message": ', b', "line": ')
#: Beginnings of a result that may be cut off within its id.
_TORN = (b'{"id": null', b'{"id": "')


class Results(Container[Key]):
    """File of results, which one process at a time can have open.

    ``key in results`` tells whether the input line with this key is done, that is, has a result. A
    line's key is its id, or its number if no id can be read.
    """

    def __init__(self, path: Path, *, retry_failed: bool = False) -> None:
        """Open the file, create it if needed, and read the results of earlier runs.

        With ``retry_failed``, lines whose result is an error count as not done until they get a new
        result. Raises OSError, and BatchFailed if the file is not a file of results or is in use.
        """
        self.path = path
        self._keys: set[Key] = set()
        #: number of attempts of each line whose last attempt failed
        self._failed: dict[Key, int] = {}
        self._has_replaced = False
        self._descriptor = self._opened()
        try:
            self._read()
            self._replace()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._retrying = set(self._failed) if retry_failed else set[Key]()

    def __contains__(self, line: object) -> bool:
        """Return whether the input line with this key is done."""
        return line in self._keys and line not in self._retrying

    def attempt(self, line: Key) -> int:
        """Return the number of the next attempt of the line with this key, from 1."""
        return self._failed.get(line, 0) + 1

    def num_done(self, lines: Iterable[Key]) -> int:
        """Return how many of the lines with these keys are done."""
        return sum(line in self for line in lines)

    def num_failed(self, lines: Iterable[Key]) -> int:
        """Return how many of the lines with these keys are done with an error as their result."""
        return sum(line in self._failed and line in self for line in lines)

    def append(self, record: Mapping[str, object]) -> None:
        """Append the result of one line. Raises OSError if it cannot be written completely."""
        line = _key(record)
        if "error" in record and (attempt := self.attempt(line)) > 1:
            record = {**record, "attempt": attempt}
        _write(self._descriptor, _encoded(record), self.path)
        self._index(record)
        self._retrying.discard(line)

    def close(self) -> None:
        try:
            self._replace()
        finally:
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

    def _opened(self) -> int:
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                self._lock(descriptor)
                if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            # Another batch has replaced the file in the meantime.
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchFailed(f"another batch writes to {self.path}") from None

    def _replace(self) -> None:
        """Rewrite the file with only the last result of each line. Raises OSError.

        Do nothing if no line has several results.
        """
        if not self._has_replaced:
            return
        last: dict[Key, bytes] = {}
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            for data in file:
                last[_key(json.loads(data))] = data
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        try:
            self._lock(descriptor)
            _write(descriptor, b"".join(last.values()), new)
            os.fsync(descriptor)
            new.replace(self.path)
        except BaseException:
            os.close(descriptor)
            new.unlink(missing_ok=True)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._has_replaced = False

    def _read(self) -> None:
        valid_bytes = 0
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    if not valid_bytes and not _is_torn(data):
                        raise self._invalid_file(number)
                    break
                self._index(self._record(number, data))
                valid_bytes += len(data)
        os.ftruncate(self._descriptor, valid_bytes)

    def _record(self, number: int, data: bytes) -> dict[str, Any]:
        try:
            record = json.loads(data)
            if isinstance(record["id"] or "", str) and (record["id"] or record["line"]):
                return dict(record)
        except (ValueError, TypeError, KeyError):
            pass
        raise self._invalid_file(number)

    def _invalid_file(self, number: int) -> BatchFailed:
        return BatchFailed(f"{self.path} is not a file of results (line {number})")

    def _index(self, record: Mapping[str, Any]) -> None:
        line = _key(record)
        self._has_replaced |= line in self._keys
        self._keys.add(line)
        self._failed.pop(line, None)
        if "error" in record:
            self._failed[line] = record.get("attempt", 1)


def _key(record: Mapping[str, Any]) -> Key:
    key: Key = record["line"] if record["id"] is None else record["id"]
    return key


def _encoded(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _write(descriptor: int, data: bytes, path: Path) -> None:
    if os.write(descriptor, data) != len(data):
        raise OSError(f"{path}: the result was not written completely; the disk may be full")


def _is_torn(data: bytes) -> bool:
    if begun := _BEGINNING.match(data):
        rest = data[begun.end() :]
        return any(rest.startswith(field) or field.startswith(rest) for field in _NEXT)
    return data.startswith(_TORN[1]) or any(start.startswith(data) for start in _TORN)
