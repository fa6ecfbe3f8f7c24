"""The router's event loop: its clock, its lag, and calls that are repeated while unanswered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from everlift import logs


def now() -> float:
    """Seconds that never go back; only differences mean anything."""
    loop = asyncio.get_running_loop()
    # uvloop counts milliseconds, and stands still for a turn of its loop. The clock is the same.
    return time.monotonic() if isinstance(loop, uvloop.Loop) else loop.time()


log = logs.get_logger(__name__)

#: The event loop is asked for a turn so often.
_LOOK_S = 0.1
#: Stall of the event loop, in seconds, from which it is logged: the process was frozen or lacked a
#: core.
FREEZE_S = 0.5
#: Number of intervals of a wait, each of which counts if the event loop kept up in it.
_INTERVALS = 6
#: A deadline that passes later than this is extended once, by as much.
_LATE_S = 0.25


async def report() -> None:
    """Log each stall of the event loop, until cancelled."""
    while True:
        due = now() + _LOOK_S
        await asyncio.sleep(_LOOK_S)
        if (late := now() - due) >= FREEZE_S:
            log.warning("event loop stalled", seconds=round(late, 2))


async def wait(call: asyncio.Future[Any], seconds: float) -> bool:
    """Wait for ``call`` for ``seconds`` in which the event loop kept up; return whether it ended.

    An interval of the wait at whose end the event loop is late by a whole interval is not counted.
    """
    loop = asyncio.get_running_loop()
    interval = seconds / _INTERVALS
    num_left = _INTERVALS
    while num_left:
        due = loop.time() + interval
        if (await asyncio.wait({call}, timeout=interval))[0]:
            return True
        num_left -= loop.time() - due < interval
    return False


class Expiry:
    """Expires ``limit`` after ``seconds``, or a moment later if the event loop is late then."""

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due, self._check)
        #: the time is over, but answers that came meanwhile are still read
        self.is_extended = False

    def cancel(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if self.is_extended or self._loop.time() - self._due < _LATE_S:
            self._limit.reschedule(self._loop.time())
        else:
            self.is_extended = True
            self._timer = self._loop.call_later(_LATE_S, self._check)


T = TypeVar("T")


async def first_answer(ask: Callable[[], Coroutine[Any, Any, T]], every_s: float) -> T:
    """Return the first answer of calls that are started every ``every_s`` seconds (hedged calls).

    For ledger calls on which a lease depends: each has its own connection, so a dead one costs only
    a part of the lease. Raises the error of the first call that ends.
    """
    calls = [asyncio.create_task(ask())]
    try:
        while not (ended := [call for call in calls if call.done()]):
            await asyncio.wait(calls, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
            if not any(call.done() for call in calls):
                calls.append(asyncio.create_task(ask()))
        return ended[0].result()
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
