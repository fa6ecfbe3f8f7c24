"""Until when an answer is wanted. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Deadline:
    """``timeout_s`` after the first call, whenever that is; None is never. ``now`` is of any one
    clock."""

    timeout_s: float | None
    _at: float | None = None

    def remaining(self, now: float) -> float | None:
        """Seconds from ``now`` on, 0 where it has passed. The first time that somebody asks is the
        first call."""
        if self.timeout_s is None:
            return None
        if self._at is None:
            self._at = now + self.timeout_s
        return max(self._at - now, 0.0)

    def passes_before(self, moment: float) -> bool:
        """Never before the first call."""
        return self._at is not None and self._at < moment
