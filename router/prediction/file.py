"""A predictor's file, followed while the router runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from everlift import logs
from router.prediction.model import MAX_BYTES, Model

log = logs.get_logger(__name__)

#: A file that was trained anew is in use so soon.
_LOOK_S = 1.0
#: What is another file is another one of these, also where the symbolic link to it was changed.
_Identity = tuple[int, ...]


class PredictorFile:
    """Predictor file; ``load`` gets each new model, and raises ValueError to refuse it.

    Then, as where the file cannot be read, what is in use stays.
    """

    def __init__(self, path: Path, load: Callable[[Model], None]) -> None:
        self._path = path
        self._load = load
        self._identity: _Identity | None = None
        #: why it was not taken when it was last looked at
        self._cause = ""

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await self.reload()
            await asyncio.sleep(_LOOK_S)

    async def reload(self) -> None:
        """Load the file if it has changed."""
        try:
            model = await asyncio.to_thread(self._news)
            if model is not None:
                self._load(model)
                self._cause = ""
                log.info("predictor loaded", path=str(self._path), tau=round(model.tau, 3))
        except OSError as error:
            self._identity = None
            self._refuse(error.strerror or type(error).__name__)
        except ValueError as error:
            self._refuse(str(error))

    def _news(self) -> Model | None:
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
            if identity == self._identity:
                return None
            # What cannot be used is read and told once.
            self._identity = identity
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"has more than {MAX_BYTES} bytes")
        return Model.parse(data)

    def _refuse(self, cause: str) -> None:
        if cause != self._cause:
            log.error("predictor not loaded", path=str(self._path), cause=cause)
        self._cause = cause
