"""Run of uniform decode steps, which are computed together when the run ends. Pure.

In a uniform step every sequence of the batch samples one token, and nothing else happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from everlift.step_time import StepSize
from worker.engine.load import Load


class LoadDelta(NamedTuple):
    """Difference between two load reports of an engine.

    ``tokens`` are output tokens; ``kv_tokens`` are the tokens whose keys and values were read.
    """

    steps: int = 0
    tokens: int = 0
    blocks: int = 0
    #: KV tokens read; the number of attention pairs is the same, since each row has one token
    kv_tokens: int = 0


NO_DELTA = LoadDelta()


class UniformRun:
    """Run of uniform steps, in each of which ``num_rows`` sequences sample one token.

    ``before`` is the engine's load at the start of the run. ``allocated`` has one element per step:
    the cumulative number of blocks allocated by the end of that step. ``starts`` are the times at
    which the steps so far began.
    """

    def __init__(self, before: Load, allocated: Sequence[int]) -> None:
        self.before = before
        self.num_rows = before.num_running
        self.starts: list[float] = []
        #: number of completed steps
        self.num_done = 0
        # No running sequence prefills, so all pending tokens belong to queued sequences.
        queued_tokens = before.pending_prefill_tokens + before.waiting_cached_tokens
        self._known_tokens = before.committed_tokens - queued_tokens
        self._allocated = allocated

    @property
    def is_over(self) -> bool:
        return self.num_done == len(self._allocated)

    @property
    def last_start(self) -> float:
        """Start time of the last completed step, in seconds. At least one such step must exist."""
        return self.starts[self.num_done - 1]

    def begin_step(self, now: float) -> StepSize:
        """Begin the next step of the run, and return its size."""
        self.starts.append(now)
        known = self._known_tokens + self.num_rows * self.num_done
        return StepSize(self.num_rows, self.num_rows, known, known)

    def added_load(self) -> LoadDelta:
        """Return the load that the completed steps added. At least one such step must exist."""
        tokens = self.num_rows * self.num_done
        read = self.num_done * self._known_tokens + tokens * (self.num_done - 1) // 2
        return LoadDelta(self.num_done, tokens, self._allocated[self.num_done - 1], read)
