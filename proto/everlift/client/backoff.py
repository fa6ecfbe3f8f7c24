"""When to try again after failures in a row. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
        """Something went well."""
        self._failures = 0

    def delay(self, now: float, at_least: float = 0.0) -> float | None:
        """Seconds to wait after a failure at ``now``; None when it was the last that counts. Where
        many are told to wait ``at_least`` so long, jitter keeps them from coming back at once."""
        if not self._failures:
            self._since = now
        most = _EAGER_S if now - self._since < _EAGER_FOR_S else _LONGEST_S
        longest = min(most, _FIRST_S * 2 ** min(self._failures, _MANY))
        jitter = self.random()
        delay = max(longest * (0.5 + jitter / 2), at_least * (1 + jitter / 4))
        self._failures += 1
        return delay if now + delay <= self._since + self.limit_s else None
