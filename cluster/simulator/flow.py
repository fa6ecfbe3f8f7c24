"""One sequence of a worker in a few numbers, and several steps of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.simulator.sequence import NamedSequence
from everlift.blockhash import BLOCK_SIZE
from everlift.step_time import StepSize


@dataclass(slots=True, eq=False)
class Flow:
    """One sequence. While it decodes it knows one token more with each step after ``since``."""

    sequence: NamedSequence
    order: int
    known: int
    #: of the known ones, to be computed before the next token is drawn
    left: int
    #: of the known ones, computed at some time
    computed: int
    #: known tokens when it has drawn its last one
    last: int
    since: int = 0
    decodes: bool = False
    has_slot: bool = False
    is_preempted: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Who comes in first has the smallest."""
        return (-self.sequence.priority, self.order)


@dataclass(slots=True)
class Steps:
    """So many steps under way, which all take as long."""

    number: int
    began: float
    step_s: float
    size: StepSize
    #: prompt tokens that each of these computes
    shares: list[tuple[Flow, int]]

    def over(self, now: float) -> int:
        """As many have come to their end."""
        if self.shares:
            return 0
        return min(self.number, int((now - self.began) / self.step_s + 1e-9))


def blocks_of(tokens: int, sequences: int) -> float:
    """Of the last one of each sequence half is in use, about."""
    return tokens / BLOCK_SIZE + sequences / 2
