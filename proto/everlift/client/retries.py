"""Retries of a client: which errors are retried, after which delay, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from everlift.client.routers import Routers
from everlift.errors import DeadlineExceeded, EverliftError, InvalidRequest, NoWorker

_INITIAL_DELAY_S = 0.05
#: A lost router usually returns, or is replaced, within this many seconds. Until then, delays are
#: at most _MAX_EAGER_DELAY_S, so that the return is noticed soon.
_EAGER_PERIOD_S = 3.0
_MAX_EAGER_DELAY_S = 0.2
_MAX_DELAY_S = 1.0
#: Maximum exponent of the power of two in the delay. The limit only avoids huge numbers:
#: _MAX_DELAY_S limits the delay after far fewer failures.
_MAX_EXPONENT = 32


@dataclass(slots=True)
class Backoff:
    """Doubling delays with jitter between the attempts of a call.

    Consecutive failures are retried until ``limit_s`` seconds after the first of them. ``reset``
    ends the series. ``random`` returns numbers from 0 to 1.
    """

    limit_s: float
    random: Callable[[], float]
    _failures: int = field(default=0, init=False)
    _since: float = field(default=0.0, init=False)

    def reset(self) -> None:
        """End the series of consecutive failures after a success."""
        self._failures = 0

    def delay(self, now: float, min_delay: float = 0.0) -> float | None:
        """Count a failure at ``now``, and return the seconds to wait before the next attempt.

        Return None if the wait would end more than ``limit_s`` seconds after the first failure of
        the series. The delay is not shorter than ``min_delay`` seconds. Jitter is added to
        ``min_delay``, so that many clients that received the same value do not retry at the same
        moment. ``now`` is in seconds, of the same clock in all calls.
        """
        if not self._failures:
            self._since = now
        most = _MAX_EAGER_DELAY_S if now - self._since < _EAGER_PERIOD_S else _MAX_DELAY_S
        longest = min(most, _INITIAL_DELAY_S * 2 ** min(self._failures, _MAX_EXPONENT))
        jitter = self.random()
        delay = max(longest * (0.5 + jitter / 2), min_delay * (1 + jitter / 4))
        self._failures += 1
        return delay if now + delay <= self._since + self.limit_s else None


@dataclass(slots=True)
class Deadline:
    """Deadline ``timeout_s`` seconds after the first use of ``remaining``; None is no deadline.

    All times that are passed to the methods are seconds of the same clock.
    """

    timeout_s: float | None
    _at: float | None = None

    def remaining(self, now: float) -> float | None:
        """Return the seconds from ``now`` to the deadline, at least 0; None without a deadline.

        The first call sets the deadline: its time plus the timeout.
        """
        if self.timeout_s is None:
            return None
        if self._at is None:
            self._at = now + self.timeout_s
        return max(self._at - now, 0.0)

    def passes_before(self, timestamp: float) -> bool:
        """Return whether the deadline is before ``timestamp``; False if it is not set."""
        return self._at is not None and self._at < timestamp


#: Default seconds for which a stream tries to reconnect while no router answers.
RECONNECT_S = 30.0
#: Default seconds for which any call is retried after its first refusal, and for which a single
#: call is retried while no router answers.
RETRY_S = 10.0


class Retries:
    """Rules by which one call is retried: which errors, after which delay, and for how long.

    After an ``is_unavailable`` error, the call is retried until ``unavailable_s`` seconds after the
    first such error since the last success. For an ``is_refusal`` error, the time is ``refused_s``.
    0 disables the retries. ``random`` returns numbers from 0 to 1.
    """

    def __init__(self, unavailable_s: float, refused_s: float, random: Callable[[], float]) -> None:
        self._unavailable = Backoff(unavailable_s, random)
        self._refused = Backoff(refused_s, random)

    def report_success(self) -> None:
        self._unavailable.reset()
        self._refused.reset()

    def delay(self, error: EverliftError, now: float) -> float | None:
        """Count the failure with ``error`` at ``now``; return the seconds to wait before a retry.

        Return None if the error must not be retried, or if the time for its retries is over. The
        delay is not shorter than the error's ``retry_after_s``. ``now`` is in seconds.
        """
        min_delay = error.retry_after_s or 0.0
        if is_unavailable(error):
            return self._unavailable.delay(now, min_delay)
        if is_refusal(error):
            return self._refused.delay(now, min_delay)
        return None


def is_unavailable(error: EverliftError) -> bool:
    """Return whether a call that failed with ``error`` may succeed at another router, or later.

    NoWorker is excluded, because the request has then ended.
    """
    return error.grpc_status == "UNAVAILABLE" and not isinstance(error, NoWorker)


def is_refusal(error: EverliftError) -> bool:
    """Return whether ``error`` refuses a call for lack of capacity or quota.

    A later retry of the same call may succeed.
    """
    return error.grpc_status == "RESOURCE_EXHAUSTED" and not isinstance(error, InvalidRequest)


#: Number of calls per second that resume if many calls of a client break at the same time. Each
#: resumed call costs the router a look-up in the ledger, and the first one already shows whether a
#: router answers at all.
_RESUMED_PER_S = 500.0
_MAX_STAGGER_S = 5.0


class RetryBudget:
    """Schedule of the attempts of one call, which end at the deadline of the call at the latest."""

    def __init__(self, routers: Routers, retries: Retries, deadline: Deadline) -> None:
        self._routers = routers
        self._retries = retries
        self._deadline = deadline
        self._last_error: EverliftError | None = None

    def report_success(self) -> None:
        self._retries.report_success()

    def remaining(self) -> float | None:
        """Return the seconds to the deadline, or None if there is no deadline.

        The first call sets the deadline: its time plus the timeout.
        """
        return self._deadline.remaining(now())

    async def wait(self, error: EverliftError, router: str) -> None:
        """Wait until the next attempt is due, after ``error`` of the router at ``router``.

        If the router was unavailable, the next router becomes the current one. Raises ``error`` if
        it must not be retried, the time for its retries is over, or the client is closed. If the
        attempt would be after the deadline, raises ``error`` for a refusal, and DeadlineExceeded if
        the router was unavailable.
        """
        delay = self._retries.delay(error, now())
        if delay is None or self._routers.is_closed:
            raise error
        if is_unavailable(error):
            self._routers.report_failure(router)
        if self._deadline.passes_before(now() + delay):
            raise _error_at_deadline(error)
        self._last_error = error
        stagger = min(self._routers.num_waiting / _RESUMED_PER_S, _MAX_STAGGER_S)
        with self._routers.count_waiting():
            await asyncio.sleep(max(delay, stagger))

    def error_at_deadline(self, error: DeadlineExceeded) -> EverliftError:
        """Return the error to raise for a call whose last attempt ended at the deadline.

        ``error`` is the error of that attempt, and is returned if the call has never waited.
        Otherwise, the result depends on the error passed to the last ``wait``. A refusal is
        returned itself. An error of an unavailable router becomes the ``__cause__`` of a
        DeadlineExceeded, which is returned.
        """
        return error if self._last_error is None else _error_at_deadline(self._last_error)


def _error_at_deadline(error: EverliftError) -> EverliftError:
    if not is_unavailable(error):
        return error
    late = DeadlineExceeded("the deadline passed while no router answered")
    late.__cause__ = error
    return late


def now() -> float:
    """Return the time of the event loop's clock, which tests may control."""
    return asyncio.get_running_loop().time()
