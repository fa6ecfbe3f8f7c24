"""File of a trained predictor, which is reloaded when it changes while the router runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from everlift import logs
from router.prediction.model import MAX_BYTES, Model

log = logs.get_logger(__name__)

#: Seconds between two checks whether the file has changed.
_POLL_INTERVAL_S = 1.0
#: Device, inode, size and modification time of a file. They also change if a symbolic link is
#: changed to point to another file.
_Identity = tuple[int, ...]


class PredictorFile:
    """File of a predictor, which is read again whenever it has changed.

    ``load`` is called with each new model, and raises ValueError to refuse it. If the model is
    refused or the file cannot be read, the error is logged and the model in use is kept.
    """

    def __init__(self, path: Path, load: Callable[[Model], None]) -> None:
        self._path = path
        self._load = load
        self._identity: _Identity | None = None
        #: why the file was refused at the last check; empty if it was not refused
        self._cause = ""

    async def run(self) -> None:
        """Check the file every second, until cancelled."""
        while True:
            await self.reload()
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def reload(self) -> None:
        """Load the file if it has changed; log an error if that fails."""
        try:
            model = await asyncio.to_thread(self._read_if_changed)
            if model is not None:
                self._load(model)
                self._cause = ""
                log.info("predictor loaded", path=str(self._path), tau=round(model.tau, 3))
        except OSError as error:
            self._identity = None
            self._refuse(error.strerror or type(error).__name__)
        except ValueError as error:
            self._refuse(str(error))

    def _read_if_changed(self) -> Model | None:
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
            if identity == self._identity:
                return None
            # Set before reading, so that an unusable file is read and reported only once.
            self._identity = identity
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"has more than {MAX_BYTES} bytes")
        return Model.parse(data)

    def _refuse(self, cause: str) -> None:
        if cause != self._cause:
            log.error("predictor not loaded", path=str(self._path), cause=cause)
        self._cause = cause
