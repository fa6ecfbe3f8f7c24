"""How fast the admission queue empties while anybody waits. Pure.

It is what is seen to leave, in the tokens that were predicted of it: where predictions are too
large or workers find prefixes in their caches, more of them leave in a second, and the time that
the others wait comes out right all the same.
"""

from __future__ import annotations

from math import exp

#: The rates follow a change in about so long,
_MEMORY_S = 10.0
#: or in the time in which so many requests leave, where that is longer: between two departures of a
#: slow queue a rate that forgot sooner would fall to nothing.
_MEMORY_REQUESTS = 8
#: What was watched for less is not known.
_ENOUGH_S = 1.0


class Drain:
    """Rates are of each worker, so that they hold for another number of them."""

    def __init__(self) -> None:
        self._tokens = self._requests = 0
        self._since: float | None = None
        self._watched_s = 0.0
        self._token_rate = self._request_rate = 0.0

    def left(self, work_tokens: int) -> None:
        """A request left the queue for a worker."""
        self._tokens += work_tokens
        self._requests += 1

    def emptied(self) -> None:
        """Nobody waits: more would leave if more were there."""
        self._since = None

    def measure(self, num_queued: int, num_workers: int, now: float) -> None:
        """Looks what has left since this was called before. ``now`` is in seconds."""
        if self._since is not None and num_workers and (duration := now - self._since) > 0:
            self._blend(duration, num_workers)
        self._tokens = self._requests = 0
        self._since = now if num_queued else None

    def _blend(self, duration: float, num_workers: int) -> None:
        self._watched_s += duration
        forgets = min(1 / _MEMORY_S, self.requests_per_s(num_workers) / _MEMORY_REQUESTS)
        weight = max(1 - exp(-duration * forgets), min(1.0, duration / self._watched_s))
        tokens = self._tokens / duration / num_workers
        requests = self._requests / duration / num_workers
        self._token_rate += weight * (tokens - self._token_rate)
        self._request_rate += weight * (requests - self._request_rate)

    @property
    def is_known(self) -> bool:
        return self._watched_s >= _ENOUGH_S and self._token_rate > 0

    def tokens_per_s(self, num_workers: int) -> float:
        """Of work, out of the queue of so many workers."""
        return self._token_rate * num_workers

    def requests_per_s(self, num_workers: int) -> float:
        return self._request_rate * num_workers
