"""Continuous batching: whoever there is room for comes into the batch in any step. Pure.

Iteration-level scheduling is Orca's (OSDI'22), prefill in chunks beside decodes Sarathi-Serve's
(OSDI'24).
"""

from __future__ import annotations

from worker.engine.policies.policy import Policy
from worker.engine.sequence import Sequence
from worker.engine.waiting import WaitingLine


class Continuous(Policy):
    """All that can decode do; then those in the batch are prefilled, then newcomers, by class and
    arrival."""

    def __init__(self) -> None:
        self._waiting = WaitingLine()

    @property
    def waiting(self) -> WaitingLine:
        return self._waiting

    def head(self, num_running: int) -> Sequence | None:
        return self._waiting.head()
