"""Which errors pass, and when to call again after them. Pure."""

from __future__ import annotations

from collections.abc import Callable

from everlift.client.backoff import Backoff
from everlift.errors import EverliftError, InvalidRequest, NoWorker

#: Seconds that a stream goes on trying while no router answers.
RECONNECT_S = 30.0
#: Seconds that a call goes on trying after it was refused, or not answered, for the first time.
RETRY_S = 10.0


class Retries:
    """Of one call and those that take its place, until one of them succeeds.

    An error that says that nobody is there now may pass for ``unavailable_s`` seconds since the
    first one in a row, a refusal for want of room for ``refused_s``; 0 is never. ``random`` answers
    from 0 to 1.
    """

    def __init__(self, unavailable_s: float, refused_s: float, random: Callable[[], float]) -> None:
        self._unavailable = Backoff(unavailable_s, random)
        self._refused = Backoff(refused_s, random)

    def succeeded(self) -> None:
        self._unavailable.reset()
        self._refused.reset()

    def delay(self, error: EverliftError, now: float) -> float | None:
        """Seconds to wait after ``error``, never fewer than it says itself; None where it is the
        answer."""
        at_least = error.retry_after_s or 0.0
        if is_unavailable(error):
            return self._unavailable.delay(now, at_least)
        if is_refusal(error):
            return self._refused.delay(now, at_least)
        return None


def is_unavailable(error: EverliftError) -> bool:
    """Another router, or this one in a moment, may answer. A request that found no worker has
    ended."""
    return error.grpc_status == "UNAVAILABLE" and not isinstance(error, NoWorker)


def is_refusal(error: EverliftError) -> bool:
    """There is no room now: nothing was accepted. What is too large will never have any."""
    return error.grpc_status == "RESOURCE_EXHAUSTED" and not isinstance(error, InvalidRequest)
