"""How long steps take of late. Pure."""

from __future__ import annotations

#: The mean is over about so many of the last steps.
_STEPS = 16


class StepPace:
    """A running mean over the steps of an engine that has work all the time."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._num_steps = 0
        self._began: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds; 0 while no step was seen."""
        return self._step_s

    def begin(self, now: float, is_busy: bool) -> None:
        """A step begins. What has passed since the last one began is what that took, if the engine
        ``is_busy``: it did not wait for work."""
        if is_busy and self._began is not None:
            self._num_steps = min(self._num_steps + 1, _STEPS)
            self._step_s += (max(0.0, now - self._began) - self._step_s) / self._num_steps
        self._began = now
