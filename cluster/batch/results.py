"""Results of a batch: a file of JSON lines in the form of OpenAI's batches.

A batch can be interrupted at any moment and continued later.

    {"id": ..., "custom_id": "a", "response": {"status_code": 200, "body": {...}}, "error": null}
    {"id": ..., "custom_id": "b", "response": {"status_code": 400, "body": {...}}, "error": null}
    {"id": ..., "custom_id": "c", "response": null, "error": {"code": ..., "message": ...}}

The result of a retry is appended to the file. When the file is closed or opened again, the retry's
result replaces the earlier one. The result of a later attempt that fails also has the number of the
attempt, as a key of its own ("attempt": 2). Each result is one write. A last line that a crash of
the machine left incomplete is cut off when the file is opened again. A file that has other content
is rejected and not changed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cluster.errors import BatchFailed

#: Beginning of every result.
_BEGINNING = b'{"id": "batch_req_'
#: Suffix of the file that replaces the file of results.
_NEW = ".everlift-new"


class Results(Container[str]):
    """File of results, which one process at a time can have open.

    ``custom_id in results`` tells whether the input line with this id is done, that is, has a
    result.
    """

    def __init__(self, path: Path, *, retry_failed: bool = False) -> None:
        """Open the file, create it if needed, and read the results of earlier runs.

        With ``retry_failed``, lines whose result is an error count as not done until they get a new
        result. Raises OSError, and BatchFailed if the file is not a file of results or is in use.
        """
        self.path = path
        self._done: set[str] = set()
        #: number of attempts of each line whose last attempt failed
        self._failed: dict[str, int] = {}
        self._has_replaced = False
        self._descriptor = self._opened()
        try:
            self._read()
            self._replace()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._retrying = set(self._failed) if retry_failed else set[str]()

    def __contains__(self, line: object) -> bool:
        """Return whether the input line with this id is done."""
        return line in self._done and line not in self._retrying

    def has_failed(self, line: str) -> bool:
        """Return whether the last result of the line with this id is an error."""
        return line in self._failed

    def attempt(self, line: str) -> int:
        """Return the number of the next attempt of the line with this id, from 1."""
        return self._failed.get(line, 0) + 1

    def num_done(self, lines: Iterable[str]) -> int:
        """Return how many of the lines with these ids are done."""
        return sum(line in self for line in lines)

    def num_failed(self, lines: Iterable[str]) -> int:
        """Return how many of the lines with these ids are done with an error as their result."""
        return sum(line in self._failed and line in self for line in lines)

    def append(self, record: Mapping[str, object]) -> None:
        """Append the result of one line. Raises OSError if it cannot be written completely."""
        line = _key(record)
        if is_failure(record) and (attempt := self.attempt(line)) > 1:
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
        last: dict[str, bytes] = {}
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            for data in file:
                last[_key(json.loads(data))] = data
        new = self.path.with_name(self.path.name + _NEW)
        # A process that was killed here may have left it. No other process has it open, because
        # the file of results is locked.
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        try:
            self._lock(descriptor)
            # Not one write, which the kernel limits to 2 GiB.
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.writelines(last.values())
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
            is_failure(record)
            if isinstance(record["custom_id"], str):
                return dict(record)
        except (ValueError, TypeError, KeyError):
            pass
        raise self._invalid_file(number)

    def _invalid_file(self, number: int) -> BatchFailed:
        return BatchFailed(f"{self.path} is not a file of results (line {number})")

    def _index(self, record: Mapping[str, Any]) -> None:
        line = _key(record)
        self._has_replaced |= line in self._done
        self._done.add(line)
        self._failed.pop(line, None)
        if is_failure(record):
            self._failed[line] = record.get("attempt", 1)


def is_failure(record: Mapping[str, Any]) -> bool:
    """Return whether a result is an error."""
    return record["error"] is not None or record["response"]["status_code"] != 200


def _key(record: Mapping[str, Any]) -> str:
    key: str = record["custom_id"]
    return key


def _encoded(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _write(descriptor: int, data: bytes, path: Path) -> None:
    if os.write(descriptor, data) != len(data):
        raise OSError(f"{path}: the result was not written completely; the disk may be full")


def _is_torn(data: bytes) -> bool:
    return data.startswith(_BEGINNING) or _BEGINNING.startswith(data)
