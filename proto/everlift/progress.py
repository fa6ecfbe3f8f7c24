"""Progress of a long task: a bar on a terminal, otherwise a log line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from everlift import logs

log = logs.get_logger(__name__)

#: Function that is called with the bytes done and the total bytes; the total is 0 if it is unknown.
Progress = Callable[[int, int], None]

_LOG_EVERY_S = 5.0


def ignore_progress(done: int, total: int) -> None:
    """Do nothing: default Progress for callers that do not show any."""


@contextmanager
def show_progress(title: str) -> Iterator[Progress]:
    """Context manager: yield a Progress that shows a bar, or logs if there is no terminal.

    ``title`` names the task.
    """
    if not sys.stderr.isatty():
        yield log_progress(title)
        return
    with _bar(title) as progress:
        yield progress


def log_progress(title: str, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Return a Progress that logs ``title`` with the MiB done and the total MiB.

    The Progress logs at most once every few seconds of ``clock``.
    """
    next_log_at = clock() + _LOG_EVERY_S

    def progress(done: int, total: int) -> None:
        nonlocal next_log_at
        if clock() >= next_log_at:
            next_log_at = clock() + _LOG_EVERY_S
            log.info(title, done_mib=done >> 20, total_mib=total >> 20)

    return progress


@contextmanager
def _bar(title: str) -> Iterator[Progress]:
    # Imported here because rich is not a dependency of the client library.
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    bar = rich.Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(title, total=None)

    def progress(done: int, total: int) -> None:
        # The bar starts at the first progress, so that none is shown if there is nothing to do.
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        bar.stop()
