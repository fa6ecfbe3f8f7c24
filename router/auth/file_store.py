"""Store of keys and tenants in a YAML file.

The file contains only hashes of secrets, so that reading it reveals no key. Anyone who can write to
it could add a key.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from everlift import logs
from everlift.errors import SettingsError
from router.auth.document import Document, from_plain
from router.auth.store import Edit

log = logs.get_logger(__name__)

#: Values of stat() that change if the file is changed or replaced, or if a symbolic link to it
#: changes.
_Identity = tuple[int, ...]


def parse(text: str) -> Document:
    """Parse the text of a key file.

    Raises SettingsError if the text is not YAML, or if a key, a tenant or a limit is invalid.
    """
    try:
        plain = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        # The original message is not shown, because it would quote the file. An invalid date raises
        # ValueError.
        raise SettingsError("is not YAML") from None
    return from_plain(plain)


class FileStore:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: _Identity | None = None
        self._has_warned_of_mode = False

    async def read_if_changed(self) -> Document | None:
        identity = _identity(self._path.stat())
        if identity == self._identity:
            return None
        try:
            document = await asyncio.to_thread(self._read)
        except SettingsError:
            # The same invalid version is reported only once.
            self._identity = identity
            raise
        self._identity = identity
        return document

    async def change(self, edit: Edit) -> Document:
        return await asyncio.to_thread(self._change, edit)

    def _read(self) -> Document:
        with self._path.open(encoding="utf-8") as file:
            self._check_mode(os.fstat(file.fileno()).st_mode)
            try:
                return parse(file.read())
            except UnicodeDecodeError:
                raise SettingsError(f"{self._path} is not UTF-8") from None
            except SettingsError as error:
                raise SettingsError(f"{self._path}: {error}") from None

    def _check_mode(self, mode: int) -> None:
        if mode & stat.S_IWOTH:
            raise SettingsError(f"{self._path} is writable by everyone: chmod o-w")
        if mode & stat.S_IROTH and not self._has_warned_of_mode:
            self._has_warned_of_mode = True
            log.warning("key file is readable by everyone", path=str(self._path))

    def _change(self, edit: Edit) -> Document:
        with self._locked():
            before = self._read() if self._path.exists() else Document()
            after = edit(before)
            if after != before:
                self._write(after)
        return after

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, document: Document) -> None:
        """Replace the file atomically by one that only its owner can read.

        If the path is a symbolic link, its target is replaced.
        """
        path = self._path.resolve()
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                yaml.safe_dump(document.to_plain(), file, sort_keys=False, allow_unicode=True)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def _identity(found: os.stat_result) -> _Identity:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
