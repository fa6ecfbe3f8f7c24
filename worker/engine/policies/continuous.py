"""Continuous batching, with short prefills first. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Several
from functools import partial

from worker.config import Scheduling
from worker.engine.policies.policy import Policy
from worker.engine.sequence import Sequence
from worker.engine.waiting import WaitingQueue, by_length


class Continuous(Policy):
    """Policy of continuous batching: sequences are admitted whenever there is room.

    The token budget of a step goes to all decodes first, then to prefills of sequences in the batch
    and of newly admitted ones. Prefills are ordered by priority, the highest first. Of the same
    priority, the sequence with the fewest tokens left to compute is first, with ageing (see
    ``by_length``). The next turn of a session, whose prefix is cached, thus overtakes a long new
    prompt, which would otherwise delay it by seconds.
    """

    has_short_first = True

    def __init__(self, config: Scheduling) -> None:
        self._place = partial(by_length, ageing_tokens=config.ageing_tokens)
        self._waiting = WaitingQueue(self._place)

    @property
    def waiting(self) -> WaitingQueue:
        return self._waiting

    def head(self, num_running: int) -> Sequence | None:
        return self._waiting.head()

    def precedes(self, head: Sequence, running: Sequence) -> bool:
        return self._place(head) < self._place(running)

    def prefills(self, sequences: Several[Sequence]) -> Several[Sequence]:
        return sorted(sequences, key=self._place)
