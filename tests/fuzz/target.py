"""Fuzzing targets, and the permitted results.

A target passes bytes to a parser as the product does. It may end with a value or with an
EverliftError that names a cause. Findings are other exceptions, errors in the log, and cases that
take more CPU time than the limit.
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
#: Mutation of a seed that keeps its format; parts of the other seeds may be inserted.
Reshape = Callable[[Random, bytes, Sequence[bytes]], bytes]

#: CPU time of one case in seconds.
CASE_S = 2.0


class Finding(AssertionError):
    """Case with a result that is not permitted."""


@dataclass(frozen=True)
class Target:
    """Parser and its seeds.

    ``open`` returns the context of the parser, for any number of cases. ``weight`` determines the
    target's share of all cases. ``refusals`` are permitted exceptions besides EverliftErrors.
    """

    name: str
    open: Callable[[], AbstractContextManager[Run]]
    seeds: tuple[bytes, ...]
    reshape: Reshape
    weight: float = 1.0
    refusals: tuple[type[Exception], ...] = ()


def is_named(error: EverliftError) -> bool:
    """Return whether the error has a cause of its own, and is not the root of the tree."""
    return error.slug != EverliftError.slug


@contextmanager
def opened(target: Target) -> Iterator[Run]:
    """Open a target, and yield a checked run of a case, which raises Finding."""
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
    """Yield the errors that the code under test logs, and limit the time of a case."""
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
    """Yield a function that runs an awaitable; the failure of an unawaited task is logged."""
    with asyncio.Runner() as runner:

        async def wait(work: Awaitable[object]) -> object:
            return await work

        yield lambda work: runner.run(wait(work))
