"""A few numbers of the last minutes, for charts of those who come. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

#: Between two points, at least.
_EVERY_S = 0.9
_KEPT_S = 300.0


class History:
    def __init__(self) -> None:
        self._points: deque[Json] = deque()

    def note(self, numbers: Mapping[str, Any], now: float) -> None:
        """How things are now, in seconds."""
        if self._points and now - self._points[-1]["at"] < _EVERY_S:
            return
        self._points.append({"at": round(now, 3), **numbers})
        while self._points[0]["at"] <= now - _KEPT_S:
            self._points.popleft()

    @property
    def points(self) -> list[Json]:
        """The oldest first."""
        return list(self._points)
