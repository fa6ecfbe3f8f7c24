"""Interface between the loop of a worker and its engine. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from everlift.engine_policy import EnginePolicy
from worker.engine.adapter_slots import AdapterSlots
from worker.engine.blocks import ChunkChanges
from worker.engine.images import ImageProcessor
from worker.engine.limits import Limits
from worker.engine.load import Load, Occupant
from worker.engine.outcome import Abort, Outcome
from worker.engine.sequence import Sequence
from worker.engine.step_times import StepTimes
from worker.engine.time_breakdowns import TimeBreakdowns


class EngineBroken(Exception):
    """Raised by an engine if a step failed and no further step can run: this rank must exit."""


class EngineAdapter(Protocol):
    """Engine as the loop drives it: one step at a time, in one thread.

    Everlift's ``Engine`` and ``VllmEngine`` implement it. Orders (``set_policy``, ``add``,
    ``abort`` and those to ``adapter_slots``) come between steps. A sequence may have output when it
    is added: its tokens then continue as if the sequence had never been interrupted.
    """

    #: set by the loop on rank 0; the engine records in it what each step computes
    breakdowns: TimeBreakdowns | None
    #: set by the loop on rank 0: called with the sequences that a step admits, before it runs
    before_admission: Callable[[list[Sequence]], None] | None

    @property
    def limits(self) -> Limits: ...

    @property
    def image_processor(self) -> ImageProcessor | None:
        """Return the function that processes a prompt's images; None if the engine takes no images.

        ``add`` expects sequences whose images this function has processed.
        """
        ...

    @property
    def adapter_slots(self) -> AdapterSlots | None:
        """Return the slots for LoRA adapters; None if the engine cannot load any at run time."""
        ...

    @property
    def has_work(self) -> bool: ...

    @property
    def is_in_flight(self) -> bool:
        """Return whether a step was launched and its results are not committed yet."""
        ...

    def set_policy(self, name: EnginePolicy) -> None:
        """Change the batching policy; all sequences continue under it.

        An engine with a policy of its own ignores the call.
        """
        ...

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        The sequence must be within ``limits`` and must not have ended. No sequence of this engine
        may have the same key.
        """
        ...

    def abort(self, abort: Abort) -> None:
        """Remove the sequences to which ``abort`` applies, if any; free their blocks at once."""
        ...

    def sequences(self) -> list[Sequence]:
        """Return all sequences, running or waiting."""
        ...

    def unready_slots(self) -> frozenset[int]:
        """Return the slots whose grammar masks are not ready; always empty on ranks above 0."""
        ...

    def step(self, held_slots: Collection[int] = (), now: float = 0.0) -> list[Outcome]:
        """Run one step, and return the new tokens and ends of sequences as outcomes.

        The outcomes may be those of the previous step, if steps are launched ahead. No token is
        sampled in the batch slots ``held_slots``, except in one of them if no other sequence can
        run. ``now`` is the start of the step, in seconds on rank 0's clock. Raises EngineBroken if
        a step failed and no further one can run.
        """
        ...

    def commit_in_flight(self) -> list[Outcome]:
        """Wait for the step in flight, if there is one; apply its results and return its outcomes.

        Raises EngineBroken if the step failed and no further one can run.
        """
        ...

    def digest(self) -> bytes:
        """Return a digest of the last plan and of the results that the last ``step`` committed.

        Ranks compare their digests to detect that plans or tokens differ. Results are included only
        if steps are launched ahead. The digest is empty if the engine synchronises its own ranks.
        """
        ...

    def take_chunk_changes(self) -> ChunkChanges:
        """Return the changes of the prefix cache since the last call. Call between steps."""
        ...

    def step_times(self) -> StepTimes: ...

    def load(self) -> Load: ...

    def occupants(self) -> tuple[Occupant, ...]: ...

    def prefilling(self) -> list[Sequence]:
        """Return the sequences in the batch that have several tokens left to compute."""
        ...

    def check_integrity(self) -> None:
        """Check invariants; raise AssertionError if one is violated. Call between steps."""
        ...
