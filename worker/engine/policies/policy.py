"""Interface of a batching policy. Pure.

The scheduler keeps slots, blocks, budget and books; a policy has the sequences that are not in the
batch, and says

    head        who comes into the batch next
    precedes    whether before what is still to be prefilled there
    decodes     whose next token cannot wait for prefills, and whose can
    prefills    in which order those in the batch are prefilled

What it answers follows from the calls and from ``now``, which rank 0 tells the others: all ranks
plan the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Several
from typing import Protocol

from worker.engine.plan import Ints
from worker.engine.sequence import Sequence
from worker.engine.slot_table import SlotTable


class Waiting(Protocol):
    """The sequences that are not in the batch. No operation takes longer than O(log n)."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    @property
    def num_tokens(self) -> int:
        """Known tokens of all."""
        ...

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is new or ``is_preempted``."""
        ...

    def remove(self, sequence: Sequence) -> None: ...


class Policy(ABC):
    """Base of the policies, with the decisions of continuous batching."""

    #: whether what it says depends on ``now``, or on the steps before
    follows_time = False

    @property
    @abstractmethod
    def waiting(self) -> Waiting: ...

    @abstractmethod
    def head(self, num_running: int) -> Sequence | None:
        """Return the sequence to admit next, beside ``num_running`` in the batch; None for none.

        It stays in ``waiting``, and none bypasses it while there is no room for it.
        """

    def begin_step(self, slot_table: SlotTable, now: float) -> None:
        """Note that a step begins; ``slot_table`` holds the results of the steps before."""
        return

    def precedes(self, head: Sequence, running: Sequence) -> bool:
        """Return whether ``head`` is admitted before any more of ``running`` is prefilled."""
        return False

    def decodes(self, slots: Ints) -> tuple[Ints, Ints]:
        """Return the decodes of this step, and those that may follow if prefill leaves budget.

        ``slots`` may decode, by arrival; the most urgent come first.
        """
        return slots, slots[:0]

    def prefills(self, sequences: Several[Sequence]) -> Several[Sequence]:
        """Return ``sequences``, which are by arrival, in the order of service."""
        return sequences
