"""Objects made from files and made again when these change: certificates, lists of keys.

A file that is half written, missing or wrong changes nothing and is logged once. The files of a
Kubernetes Secret change together through a symbolic link, so an object made of several is
consistent.
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
#: Of each file: who it is, when it was changed, how long it is.
_Versions = list[tuple[int, int, int, int]]

#: Files that change while they are read are read again so often.
_TRIES = 5


class Reloaded(Generic[T]):
    """Value that is reloaded when its file changes. Thread-safe."""

    def __init__(self, files: Sequence[str], make: Callable[[], T]) -> None:
        """Create the object.

        ``make`` reads the files and raises SettingsError or OSError; so does this.
        """
        self._files = tuple(files)
        self._make = make
        self._complaint = ""
        self._lock = threading.Lock()
        self._versions, self._value = self._made()

    def current(self) -> T:
        """Return the object, which is the same while the files are.

        It looks at them, and blocks for that; it does not fail.
        """
        with self._lock:
            try:
                if self._look() != self._versions:
                    self._versions, self._value = self._made()
                    log.info("configuration files reloaded", files=self._files)
                self._complaint = ""
            except (SettingsError, OSError) as error:
                self._complain(str(error))
            return self._value

    def _complain(self, cause: str) -> None:
        if cause != self._complaint:
            log.error("changed files are invalid: the previous ones stay in use", cause=cause)
        self._complaint = cause

    def _look(self) -> _Versions:
        found = map(os.stat, self._files)
        return [(it.st_dev, it.st_ino, it.st_ctime_ns, it.st_size) for it in found]

    def _made(self) -> tuple[_Versions, T]:
        for _ in range(_TRIES):
            try:
                before = self._look()
                value = self._make()
                if self._look() == before:
                    return before, value
            except OSError as error:
                raise SettingsError(f"{error.filename}: cannot be read: {error.strerror}") from None
        raise SettingsError(f"{self._files[0]}: changes while it is read")
