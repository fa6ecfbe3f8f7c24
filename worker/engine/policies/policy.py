"""Interface of a batching policy. Pure.

The scheduler manages slots, blocks, the token budget and all counts. A policy holds the sequences
that are not in the batch, and decides:

    head        which sequence is admitted to the batch next
    precedes    whether it is admitted before a running sequence is prefilled further
    decodes     which decodes cannot wait for prefills, and which can
    prefills    in which order the sequences in the batch are prefilled

The decisions of a policy depend only on the calls of its methods and on ``now``, a time that rank 0
sends to the other ranks, so that all ranks make the same plans.
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
    """Queue of the sequences that are not in the batch.

    No operation on a sequence takes longer than O(log n), amortised.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    @property
    def num_tokens(self) -> int:
        """Total number of tokens, of prompts and outputs so far, of all waiting sequences."""
        ...

    @property
    def num_uncached(self) -> int:
        """Number of tokens in ``num_tokens`` that are not expected to be prefix-cache hits."""
        ...

    def push(self, sequence: Sequence) -> None:
        """Add a sequence: a new one or, if it ``is_preempted``, one that was in the batch."""
        ...

    def remove(self, sequence: Sequence) -> None: ...


class Policy(ABC):
    """Base class of the batching policies.

    Unless a subclass decides otherwise, all decodes come before prefills, and prefills are in the
    order of arrival.
    """

    #: whether decisions depend on ``now`` or on previous steps
    follows_time = False
    #: whether sequences with few tokens left to compute overtake those with many
    has_short_first = False

    @property
    @abstractmethod
    def waiting(self) -> Waiting: ...

    @abstractmethod
    def head(self, num_running: int) -> Sequence | None:
        """Return the waiting sequence to admit next; None if none is to be admitted now.

        ``num_running`` is the number of sequences in the batch. The result stays in ``waiting``
        until the scheduler admits it. While there are too few free blocks for it, no other one is
        admitted.
        """

    def begin_step(self, slot_table: SlotTable, now: float) -> None:
        """Record that a step begins at ``now``, in seconds.

        ``slot_table`` has the state of the batch after the previous step.
        """
        return

    def precedes(self, head: Sequence, running: Sequence) -> bool:
        """Return whether to admit ``head`` before more of ``running``'s prompt is prefilled.

        ``head`` is the result of the method ``head``, and ``running`` a sequence in the batch.
        """
        return False

    def decodes(self, slots: Ints) -> tuple[Ints, Ints]:
        """Divide ``slots`` into those that decode before prefills, and those that decode after.

        ``slots`` are all slots that may decode, in the order of arrival. The slots of the second
        result decode only with the token budget that prefills leave. In both results the most
        urgent slots come first.
        """
        return slots, slots[:0]

    def prefills(self, sequences: Several[Sequence]) -> Several[Sequence]:
        """Return ``sequences``, given in the order of arrival, in the order to prefill them."""
        return sequences
