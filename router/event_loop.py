"""Event loop of a router: its clock, its lag, timeouts that allow for lag, and hedged calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from everlift import logs


def now() -> float:
    """Return a time in seconds that never decreases; only differences are meaningful."""
    loop = asyncio.get_running_loop()
    # The clock of uvloop has whole milliseconds and advances only between iterations of the loop.
    # It has the same origin as time.monotonic, so the values of both can be compared.
    return time.monotonic() if isinstance(loop, uvloop.Loop) else loop.time()


log = logs.get_logger(__name__)

#: Seconds between two measurements of the event loop's lag.
_CHECK_INTERVAL_S = 0.1
#: Lag of the event loop, in seconds, from which it is logged as a stall: the process was frozen or
#: lacked a core.
FREEZE_S = 0.5
#: Number of intervals of a ``wait``; an interval counts only if the event loop ended it in time.
_INTERVALS = 6
#: If the event loop reaches a deadline this many seconds late, the deadline is extended once, by
#: the same number of seconds.
_LATE_S = 0.25


async def report() -> None:
    """Log each stall of the event loop, until cancelled."""
    while True:
        due = now() + _CHECK_INTERVAL_S
        await asyncio.sleep(_CHECK_INTERVAL_S)
        if (late := now() - due) >= FREEZE_S:
            log.warning("event loop stalled", seconds=round(late, 2))


async def wait(call: asyncio.Future[Any], seconds: float) -> bool:
    """Wait until ``call`` ends, or until ``seconds`` have passed; return whether it has ended.

    The wait consists of six equal intervals, and an interval is repeated if it ends late by at
    least its length. A stall of the event loop thus counts as at most one interval of waiting time.
    """
    loop = asyncio.get_running_loop()
    interval = seconds / _INTERVALS
    num_remaining = _INTERVALS
    while num_remaining:
        due = loop.time() + interval
        if (await asyncio.wait({call}, timeout=interval))[0]:
            return True
        num_remaining -= loop.time() - due < interval
    return False


class Expiry:
    """Timer that lets the asyncio.Timeout ``limit`` expire after ``seconds``.

    The timer waits another 0.25 s, once, if the event loop runs it at least 0.25 s late. Answers
    that have arrived meanwhile are thus read first.
    """

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._deadline, self._check)
        #: the time has passed, but answers that have arrived meanwhile are still read
        self.is_extended = False

    def cancel(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if self.is_extended or self._loop.time() - self._deadline < _LATE_S:
            self._limit.reschedule(self._loop.time())
        else:
            self.is_extended = True
            self._timer = self._loop.call_later(_LATE_S, self._check)


T = TypeVar("T")


async def first_answer(start_call: Callable[[], Coroutine[Any, Any, T]], every_s: float) -> T:
    """Return the result of the first call that ends, or raise its error; the others are cancelled.

    ``start_call`` starts a call. Until one ends, a further one is started every ``every_s`` seconds
    (hedging). Use this for ledger calls on which a lease depends. The ledger makes each started
    call on its own connection, so a dead connection costs only a part of the lease.
    """
    calls = [asyncio.create_task(start_call())]
    try:
        while not (ended := [call for call in calls if call.done()]):
            await asyncio.wait(calls, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
            if not any(call.done() for call in calls):
                calls.append(asyncio.create_task(start_call()))
        return ended[0].result()
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
