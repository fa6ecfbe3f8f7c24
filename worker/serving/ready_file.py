"""File that exists while a rank serves, for readiness probes that can only run a command."""

from __future__ import annotations

import os
from pathlib import Path


class ReadyFile:
    """The file is named after the process id.

    A probe can thus tell a rank that was killed from one that serves: ``kill -0`` fails for the
    former. Without a directory there is no file.
    """

    def __init__(self, directory: str) -> None:
        self._path = Path(directory, str(os.getpid())) if directory else None

    def create(self) -> None:
        """Create the file, and its directory. Raises OSError."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()

    def remove(self) -> None:
        """Remove the file if it exists. Raises OSError."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
