"""How long a step may take, as the last ones did. Pure."""

from __future__ import annotations

from collections import deque

#: The last ones that are looked at.
_STEPS = 16


class LongestStep:
    """Of the last 16 steps of an engine. Steps that prefill take several times as long as those
    that do not, so that a mean says little about the next one."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """0 while no step was seen."""
        return max(self._steps, default=0.0)

    def begin(self, now: float, is_busy: bool) -> None:
        """A step begins. What has passed since the last one began is what that took, if the engine
        ``is_busy``: it did not wait for work."""
        if is_busy and self._began is not None:
            self._steps.append(max(0.0, now - self._began))
        self._began = now
