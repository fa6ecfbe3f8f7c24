"""Workers that start, as far as they say so. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from everlift.v1 import session_pb2


class Starts:
    """``now`` is the router's clock in seconds."""

    def __init__(self) -> None:
        #: by the start's name, until when it holds and since when; the one heard last is last
        self._until: dict[str, tuple[float, float]] = {}

    def hear(self, starts: Iterable[session_pb2.WorkerStart], now: float) -> None:
        """Each holds for its seconds, if it is not heard again."""
        for start in starts:
            self._until.pop(start.name, None)
            if start.seconds > 0.0:
                self._until[start.name] = now + start.seconds, now - start.elapsed_s

    def count(self, now: float) -> int:
        """Return how many start. O(starts)."""
        return sum(until > now for until, _ in self._until.values())

    def longest_s(self, now: float) -> float:
        """Return for how long the first one has been starting; 0: none. O(starts)."""
        return max((now - since for until, since in self._until.values() if until > now), default=0)

    def is_any(self, now: float) -> bool:
        """What is over is forgotten, so that each is looked at once."""
        while self._until:
            name, (until, _) = next(iter(self._until.items()))
            if until > now:
                return True
            del self._until[name]
        return False
