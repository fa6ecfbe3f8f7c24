"""Start of a rank: the durations of its parts, and the file that shows that it is ready."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Startup:
    """Durations of the parts of a start: ``seconds`` maps the name of a part to its duration.

    ``part`` returns a context manager that measures one part. The mapping has the parts in the
    order in which they ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - began, 3)


def process_age_s() -> float:
    """Return the seconds since this process was started or forked; 0.0 if unknown."""
    with suppress(OSError, ValueError):
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return round(float(Path("/proc/uptime").read_text().split()[0]) - began, 3)
    return 0.0


class ReadyFile:
    """File in ``directory`` that shows that this rank serves; its name is the process id.

    A probe can thus distinguish a rank that was killed from one that serves: ``kill -0`` fails for
    the process id of the former. If ``directory`` is an empty string, no file is created.
    """

    def __init__(self, directory: str) -> None:
        self._path = Path(directory, str(os.getpid())) if directory else None

    def create(self) -> None:
        """Create the file, and its directory if missing. Raises OSError if that is impossible."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()

    def remove(self) -> None:
        """Remove the file if it exists. Raises OSError if it cannot be removed."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
