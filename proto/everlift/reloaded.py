"""Objects that are created from files and recreated when the files change, such as certificates.

If a changed file is incomplete, missing or invalid, the object stays the same and the error is
logged once. An object that is created from several files of a Kubernetes Secret is consistent,
because these files change together through a symbolic link.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from everlift import logs
from everlift.errors import SettingsError

log = logs.get_logger(__name__)

T = TypeVar("T")
#: For each file: device, inode, time of the last change in ns, and size in bytes.
_Versions = list[tuple[int, int, int, int]]

#: Number of attempts to read files that change while they are being read.
_TRIES = 5


class Reloaded(Generic[T]):
    """Value that is reloaded when one of its files changes. Thread-safe."""

    def __init__(self, files: Sequence[str], load: Callable[[], T]) -> None:
        """Load the value for the first time.

        ``load`` reads ``files`` and returns the value, or raises SettingsError or OSError. If it
        raises one of these, the constructor raises SettingsError.
        """
        self._files = tuple(files)
        self._load = load
        self._last_logged_error = ""
        self._lock = threading.Lock()
        self._versions, self._value = self._load_consistent()

    def current(self) -> T:
        """Return the current value, which is the same object until a file changes.

        This method blocks while it checks the files. It never fails.
        """
        with self._lock:
            try:
                if self._file_versions() != self._versions:
                    self._versions, self._value = self._load_consistent()
                    log.info("configuration files reloaded", files=self._files)
                self._last_logged_error = ""
            except (SettingsError, OSError) as error:
                self._log_error_once(str(error))
            return self._value

    def _log_error_once(self, cause: str) -> None:
        if cause != self._last_logged_error:
            log.error("changed files are invalid: their previous contents stay in use", cause=cause)
        self._last_logged_error = cause

    def _file_versions(self) -> _Versions:
        found = map(os.stat, self._files)
        return [(stat.st_dev, stat.st_ino, stat.st_ctime_ns, stat.st_size) for stat in found]

    def _load_consistent(self) -> tuple[_Versions, T]:
        for _ in range(_TRIES):
            try:
                before = self._file_versions()
                value = self._load()
                if self._file_versions() == before:
                    return before, value
            except OSError as error:
                raise SettingsError(f"{error.filename}: cannot be read: {error.strerror}") from None
        raise SettingsError(f"{self._files[0]}: the file changes while it is being read")
