"""When those that are refused should come again: one after the other, as the queue makes room.

If all of them came as soon as there is room for one, all but one were refused again. So each is
told a moment of its own, one room's time after the last one's. Pure.
"""

from __future__ import annotations

#: Where nobody knows how fast the queue empties.
_UNKNOWN_S = 1.0
#: Appointments lie no further ahead: what the queue does then cannot be foreseen.
_MOST_S = 60.0


class Appointments:
    """``now`` is in seconds."""

    def __init__(self) -> None:
        #: rooms that come free in a second for those that are told here; 0: not known
        self.rooms_per_s = 0.0
        self._last = 0.0

    def next_s(self, part: float, now: float) -> float:
        """Seconds from now to come again after, a room's time at the least, however long that is.
        Of those that are told, this ``part`` does."""
        if not self.rooms_per_s:
            return _UNKNOWN_S
        self._last = max(self._last, now) + part / self.rooms_per_s
        self._last = min(self._last, now + _MOST_S)
        return max(self._last - now, 1 / self.rooms_per_s)
