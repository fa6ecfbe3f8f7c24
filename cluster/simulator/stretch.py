"""Steps of an engine that are computed at once when they are over. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from everlift.step_time import StepSize
from worker.engine.load import Load


class More(NamedTuple):
    """Differences of two loads."""

    steps: int = 0
    tokens: int = 0
    blocks: int = 0
    #: read, which are as many pairs
    kv_tokens: int = 0


NOTHING = More()


class Stretch:
    """Run of equal steps, in each of which ``num_rows`` sequences draw a token.

    ``before`` is the load at its begin; of each step ``taken`` has the blocks that are taken until
    it is over.
    """

    def __init__(self, before: Load, taken: Sequence[int]) -> None:
        self.before = before
        self.num_rows = before.num_running
        #: steps that are over
        self.num_done = 0
        # Nobody prefills: what is pending waits.
        self._known_tokens = before.committed_tokens - before.pending_prefill_tokens
        self._taken = taken

    @property
    def is_over(self) -> bool:
        return self.num_done == len(self._taken)

    def step_size(self) -> StepSize:
        """Return the size of its next step."""
        known = self._known_tokens + self.num_rows * self.num_done
        return StepSize(self.num_rows, self.num_rows, known, known)

    def more(self) -> More:
        """Return what the finished steps add to ``before``."""
        if not self.num_done:
            return NOTHING
        tokens = self.num_rows * self.num_done
        read = self.num_done * self._known_tokens + tokens * (self.num_done - 1) // 2
        return More(self.num_done, tokens, self._taken[self.num_done - 1], read)
