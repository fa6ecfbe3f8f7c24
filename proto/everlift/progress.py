"""Progress of a long task: a bar on a terminal, else a log line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from everlift import logs

log = logs.get_logger(__name__)

#: Told the bytes that are done and those that there are in all, as far as that is known.
Progress = Callable[[int, int], None]

_LOG_EVERY_S = 5.0


def untold(done: int, total: int) -> None:
    """Ignore the progress."""


@contextmanager
def told(what: str) -> Iterator[Progress]:
    """Yield a Progress that reports ``what`` on standard error, or in the log."""
    if not sys.stderr.isatty():
        yield logged(what)
        return
    with _bar(what) as progress:
        yield progress


def logged(what: str, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Yield a function that logs a line every few seconds."""
    due = clock() + _LOG_EVERY_S

    def progress(done: int, total: int) -> None:
        nonlocal due
        if clock() >= due:
            due = clock() + _LOG_EVERY_S
            log.info(what, done_mib=done >> 20, total_mib=total >> 20)

    return progress


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    # Imported here: customers' installations lack it.
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
    task = bar.add_task(what, total=None)

    def progress(done: int, total: int) -> None:
        # Not before: where there is nothing to do, nothing is to be seen.
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        bar.stop()
