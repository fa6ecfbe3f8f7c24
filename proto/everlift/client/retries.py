"""Retries of a client: which errors are retried, when, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from everlift.client.routers import Routers
from everlift.errors import DeadlineExceeded, EverliftError, InvalidRequest, NoWorker

_FIRST_S = 0.05
#: What is lost is most often back, or replaced, within so long: until then the waits stay short, so
#: that it is met soon after.
_EAGER_FOR_S = 3.0
_EAGER_S = 0.2
_LONGEST_S = 1.0
#: After so many failures a delay has been the longest for some time.
_MANY = 32


@dataclass(slots=True)
class Backoff:
    """Doubling delays with jitter, for ``limit_s`` seconds since the first failure in a row.

    ``random`` answers from 0 to 1.
    """

    limit_s: float
    random: Callable[[], float]
    _failures: int = field(default=0, init=False)
    _since: float = field(default=0.0, init=False)

    def reset(self) -> None:
        """Reset after a success."""
        self._failures = 0

    def delay(self, now: float, at_least: float = 0.0) -> float | None:
        """Return the seconds to wait after a failure at ``now``; None after the last try.

        Where many are told to wait ``at_least`` so long, jitter keeps them from coming back at
        once.
        """
        if not self._failures:
            self._since = now
        most = _EAGER_S if now - self._since < _EAGER_FOR_S else _LONGEST_S
        longest = min(most, _FIRST_S * 2 ** min(self._failures, _MANY))
        jitter = self.random()
        delay = max(longest * (0.5 + jitter / 2), at_least * (1 + jitter / 4))
        self._failures += 1
        return delay if now + delay <= self._since + self.limit_s else None


@dataclass(slots=True)
class Deadline:
    """Deadline ``timeout_s`` after the first call; None is never.

    ``now`` is of any one clock.
    """

    timeout_s: float | None
    _at: float | None = None

    def remaining(self, now: float) -> float | None:
        """Return the seconds from ``now`` to the deadline, at least 0.

        The first time that somebody asks is the first call.
        """
        if self.timeout_s is None:
            return None
        if self._at is None:
            self._at = now + self.timeout_s
        return max(self._at - now, 0.0)

    def passes_before(self, moment: float) -> bool:
        """Return whether the deadline is before ``moment``; never before the first call."""
        return self._at is not None and self._at < moment


#: Seconds that a stream goes on trying while no router answers.
RECONNECT_S = 30.0
#: Seconds that a call goes on trying after it was refused, or not answered, for the first time.
RETRY_S = 10.0


class Retries:
    """Retries of one call and its repetitions until one succeeds.

    Errors of unavailability are retried for ``unavailable_s`` seconds since the first one in a row,
    refusals for ``refused_s``; 0 is never. ``random`` returns numbers from 0 to 1.
    """

    def __init__(self, unavailable_s: float, refused_s: float, random: Callable[[], float]) -> None:
        self._unavailable = Backoff(unavailable_s, random)
        self._refused = Backoff(refused_s, random)

    def succeeded(self) -> None:
        self._unavailable.reset()
        self._refused.reset()

    def delay(self, error: EverliftError, now: float) -> float | None:
        """Return the seconds to wait after ``error``, or None if it is final."""
        at_least = error.retry_after_s or 0.0
        if is_unavailable(error):
            return self._unavailable.delay(now, at_least)
        if is_refusal(error):
            return self._refused.delay(now, at_least)
        return None


def is_unavailable(error: EverliftError) -> bool:
    """Return whether another router, or this one later, may answer.

    A request that found no worker has ended.
    """
    return error.grpc_status == "UNAVAILABLE" and not isinstance(error, NoWorker)


def is_refusal(error: EverliftError) -> bool:
    """Return whether nothing was accepted for lack of room, which a retry may find."""
    return error.grpc_status == "RESOURCE_EXHAUSTED" and not isinstance(error, InvalidRequest)


#: Of a client's calls that broke all at once so many go on in a second: each costs the router a
#: look into the ledger, and the one that is first finds out whether there is a router at all.
_RESUMED_PER_S = 500.0
_LONGEST_TURN_S = 5.0


class RetryBudget:
    """Limits of the retries of one call."""

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
        """Wait for the time of the next try after ``error`` of a ``router``.

        Raises the error where there is none, DeadlineExceeded where it would come too late.
        """
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
        """Return the error of a try that used the remaining time, or of the tries before it."""
        return late if self._passed is None else _too_late(self._passed)


def _too_late(error: EverliftError) -> EverliftError:
    if not is_unavailable(error):
        return error
    late = DeadlineExceeded("the deadline passed while no router answered")
    late.__cause__ = error
    return late


def now() -> float:
    """Return the time of the event loop's clock, which tests may control."""
    return asyncio.get_running_loop().time()
