"""Detection of a step that takes so long that it will probably not end. Pure.

    limit = max(timeout, 10 * predicted)    seconds, for a step of n tokens

    predicted = max(time of the slowest of the last 64 steps,
                    n * time per token of the step with the most tokens so far)

``timeout`` is the setting ``step_timeout``. In the first 8 steps of a process the timeout is ten
times as long, plus one timeout for each 50 tokens of the step, because these steps are slow for
other reasons and there are no earlier steps from which to predict.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

#: Multiple of the predicted time above which a step counts as stuck, not slow.
_FACTOR = 10
_FIRST_STEPS = 8
_TOKENS_PER_TIMEOUT = 50
#: Number of recent steps of which the slowest is used for the prediction.
_WINDOW = 64


class WakingTime:
    """Clock that advances by at most ``most_s`` seconds between two calls of ``update``.

    Call ``update`` regularly. If the process was stopped, or the machine was so overloaded that the
    calls were late, most of that time is not counted, and thus causes no false alarm.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._updated_at: float | None = None
        self._now = 0.0

    def update(self, now: float) -> float:
        """Return the seconds counted from the first update until ``now``."""
        if self._updated_at is not None:
            self._now += min(now - self._updated_at, self._most_s)
        self._updated_at = now
        return self._now


class StepTimes:
    """Time limits of steps, predicted from the times of earlier steps."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last: deque[float] = deque(maxlen=_WINDOW)
        self._num_steps = 0
        self._most_tokens = 0
        self._token_s = 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        """Record that a step of ``num_tokens`` tokens, at least one, took ``seconds``."""
        self._num_steps += 1
        self._last.append(seconds)
        if num_tokens >= self._most_tokens:
            self._most_tokens, self._token_s = num_tokens, seconds / num_tokens

    def limit_s(self, num_tokens: int) -> float:
        predicted_s = max(self._token_s * num_tokens, max(self._last, default=0.0))
        return max(self._min_limit_s(num_tokens), _FACTOR * predicted_s)

    def _min_limit_s(self, num_tokens: int) -> float:
        if self._num_steps >= _FIRST_STEPS:
            return self._timeout_s
        return self._timeout_s * (_FACTOR + num_tokens / _TOKENS_PER_TIMEOUT)


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    step: int
    num_tokens: int
    started_at: float
    limit_s: float


class Watchdog:
    """Watchdog over the steps of one engine.

    ``begin_step`` and ``end_step`` are called in the engine's thread, with times in seconds on one
    clock. ``overdue`` is called periodically in another thread, with the time of a WakingTime,
    which may differ from that clock.
    """

    def __init__(self, timeout_s: float) -> None:
        self._times = StepTimes(timeout_s)
        self._running: _Running | None = None
        self._observed: _Running | None = None
        self._observed_at = 0.0

    def begin_step(self, step: int, num_tokens: int, now: float) -> None:
        self._running = _Running(step, num_tokens, now, self._times.limit_s(num_tokens))

    def end_step(self, now: float) -> None:
        running, self._running = self._running, None
        assert running is not None, "no step is running"
        self._times.record(running.num_tokens, now - running.started_at)

    def overdue(self, now: float) -> str | None:
        """Return a message if the running step has exceeded its limit; None otherwise."""
        running = self._running
        if running is not self._observed:
            self._observed, self._observed_at = running, now
        if running is None or now - self._observed_at <= running.limit_s:
            return None
        return (
            f"step {running.step}, of {running.num_tokens} tokens, takes longer than "
            f"{running.limit_s:.1f} s"
        )
