"""Workers that are starting. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from everlift.v1 import session_pb2


class StartingWorkers:
    """Workers that are starting, as routers report; ``now`` is the leader's clock in seconds."""

    def __init__(self) -> None:
        #: by name of the start: when its report expires, and when the start began; in order of
        #: the reports
        self._until: dict[str, tuple[float, float]] = {}

    def update(self, starts: Iterable[session_pb2.WorkerStart], now: float) -> None:
        """Record reports of starting workers, and drop the oldest reports if they have expired.

        A report is valid from ``now`` on for the number of seconds in its field ``seconds``. A
        value of 0 means that the worker's start has ended.
        """
        for start in starts:
            self._until.pop(start.name, None)
            if start.seconds > 0.0:
                self._until[start.name] = now + start.seconds, now - start.elapsed_s
        while self._until:
            name, (until, _) = next(iter(self._until.items()))
            if until > now:
                break
            del self._until[name]

    def count(self, now: float) -> int:
        """Return the number of workers that are starting. O(starts)."""
        return sum(until > now for until, _ in self._until.values())

    def longest_s(self, now: float) -> float:
        """Return the seconds since the earliest unfinished start began; 0 if none. O(starts)."""
        return max((now - since for until, since in self._until.values() if until > now), default=0)
