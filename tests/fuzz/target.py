"""What is fuzzed, and what may come of it.

A target takes bytes to a parser as it is served. It may end in a value or in an EverliftError that
names a cause; neither in another exception, nor in an error in the log, nor after more CPU time
than a case has.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from random import Random

from everlift.errors import EverliftError

Run = Callable[[bytes], object]
#: One of the seeds, changed, in the form that it has; the other seeds are to take parts from.
Reshape = Callable[[Random, bytes, Sequence[bytes]], bytes]

#: CPU time of one case in seconds.
CASE_S = 2.0


class Finding(AssertionError):
    """A case that came out as none may."""


@dataclass(frozen=True)
class Target:
    """``open`` has what the parser needs around it, for as many cases as one likes. ``weight`` says
    how many of all cases are its own. ``refusals`` are what it may raise beside EverliftErrors."""

    name: str
    open: Callable[[], AbstractContextManager[Run]]
    seeds: tuple[bytes, ...]
    reshape: Reshape
    weight: float = 1.0
    refusals: tuple[type[Exception], ...] = ()


def is_named(error: EverliftError) -> bool:
    """It has a cause of its own: the root of the tree is for what nobody foresaw."""
    return error.slug != EverliftError.slug


@contextmanager
def opened(target: Target) -> Iterator[Run]:
    """One of its cases, checked. Raises Finding for bytes that are one."""
    with target.open() as run, _errors_logged() as logged:

        def checked(data: bytes) -> None:
            logged.clear()
            signal.setitimer(signal.ITIMER_PROF, CASE_S)
            try:
                run(data)
            except target.refusals:
                pass
            except EverliftError as error:
                if not is_named(error):
                    raise Finding(f"{target.name}: an error without a name") from error
            except Finding:
                raise
            except Exception as error:
                raise Finding(f"{target.name}: {error!r}") from error
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            if logged:
                record = logged[0]
                cause = record.exc_info[1] if record.exc_info else None
                raise Finding(f"{target.name}: {record.getMessage()}: {cause!r}") from cause

        yield checked


@contextmanager
def _errors_logged() -> Iterator[list[logging.LogRecord]]:
    """What the code under test logs as an error, and no case may take too long meanwhile."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    before = signal.signal(signal.SIGPROF, _too_slow)
    try:
        yield records
    finally:
        signal.signal(signal.SIGPROF, before)
        logging.getLogger().removeHandler(handler)


def _too_slow(*_: object) -> None:
    raise Finding(f"takes more than {CASE_S:g} s of CPU time")


@contextmanager
def event_loop() -> Iterator[Callable[[Awaitable[object]], object]]:
    """Runs what is awaited; what nobody awaits and fails is an error in the log."""
    with asyncio.Runner() as runner:

        async def wait(work: Awaitable[object]) -> object:
            return await work

        yield lambda work: runner.run(wait(work))
