"""Waiting for the next try of a call."""

from __future__ import annotations

import asyncio

from everlift.client.deadline import Deadline
from everlift.client.retries import Retries, is_unavailable
from everlift.client.routers import Routers
from everlift.errors import DeadlineExceeded, EverliftError

#: Of a client's calls that broke all at once so many go on in a second: each costs the router a
#: look into the ledger, and the one that is first finds out whether there is a router at all.
_RESUMED_PER_S = 500.0
_LONGEST_TURN_S = 5.0


class RetryBudget:
    """Of one call and those that take its place."""

    def __init__(self, routers: Routers, retries: Retries, deadline: Deadline) -> None:
        self._routers = routers
        self._retries = retries
        self._deadline = deadline
        self._passed: EverliftError | None = None

    def succeeded(self) -> None:
        self._retries.succeeded()

    def remaining(self) -> float | None:
        """Seconds to the deadline, which counts from the first call; None where there is none."""
        return self._deadline.remaining(now())

    async def wait(self, error: EverliftError, router: str) -> None:
        """Until it is time for the next try after ``error`` of a ``router``. Raises the error where
        there is none, DeadlineExceeded where it would come too late."""
        delay = self._retries.delay(error, now())
        if delay is None or self._routers.is_closed:
            raise error
        if is_unavailable(error):
            self._routers.failed(router)
        if self._deadline.passes_before(now() + delay):
            raise _too_late(error)
        self._passed = error
        turn = min(self._routers.num_waiting / _RESUMED_PER_S, _LONGEST_TURN_S)
        with self._routers.waiting():
            await asyncio.sleep(max(delay, turn))

    def cut_off(self, late: DeadlineExceeded) -> EverliftError:
        """The end of a try that had what was left of the time, as ``late`` says, or of those before
        it."""
        return late if self._passed is None else _too_late(self._passed)


def _too_late(error: EverliftError) -> EverliftError:
    if not is_unavailable(error):
        return error
    late = DeadlineExceeded("the deadline passed while no router answered")
    late.__cause__ = error
    return late


def now() -> float:
    """On the event loop's clock, which tests may let run as they like."""
    return asyncio.get_running_loop().time()
