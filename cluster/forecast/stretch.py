"""Steps of an engine that are computed at once when they are over. Pure."""

from __future__ import annotations

from dataclasses import replace

from router.admission.step_time import StepSize
from worker.load import Load
from worker.sequence import Sequence


class Stretch:
    """Each of its steps lets each of ``sequences``, all that the engine has in its batch, draw a
    token, and does nothing else. ``before`` is the load at its begin; of each step ``taken`` has
    the blocks that are taken until it is over."""

    def __init__(self, sequences: tuple[Sequence, ...], before: Load, taken: list[int]) -> None:
        self.sequences = sequences
        #: steps that are over
        self.num_done = 0
        self._before = before
        self._taken = taken

    @property
    def is_over(self) -> bool:
        return self.num_done == len(self._taken)

    def step_size(self) -> StepSize:
        """Of its next step."""
        before, num_rows = self._before, len(self.sequences)
        # Nobody prefills: what is pending waits.
        known = before.committed_tokens - before.pending_prefill_tokens + num_rows * self.num_done
        return StepSize(num_rows, num_rows, known, known)

    def load(self) -> Load:
        """After the steps that are over, as far as a router is told of it."""
        before, more = self._before, len(self.sequences) * self.num_done
        return replace(
            before,
            blocks_used=before.blocks_used + self._taken[self.num_done - 1],
            committed_tokens=before.committed_tokens + more,
            step=before.step + self.num_done,
            output_tokens=before.output_tokens + more,
            computed_tokens=before.computed_tokens + more,
        )
