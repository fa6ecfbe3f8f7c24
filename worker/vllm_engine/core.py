"""Interface of a vLLM engine core, without vLLM's types. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from everlift.errors import EverliftError
from everlift.sampling import TokenLogprobs
from worker.engine.blocks import ChunkChanges
from worker.engine.images import ImageProcessor
from worker.engine.outcome import SequenceKey, Stop
from worker.engine.sequence import Sequence as EngineSequence


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """Part of one sequence in a step: ``count`` tokens, the first of them at ``start``.

    Both include tokens of images.
    """

    key: SequenceKey
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Step that the core is about to compute.

    ``admitted`` are sequences that enter the batch, also after a preemption; ``preempted`` are
    those that left it since the last step.
    """

    admitted: Sequence[SequenceKey]
    preempted: Sequence[SequenceKey]
    rows: Sequence[ScheduledRow]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens that a step sampled for a sequence, and whether the sequence has ended.

    ``logprobs`` has an entry for each token if log probabilities are requested.
    ``prompt_logprobs`` has an entry for each prompt token from the second one on; a single step of
    the sequence reports them.
    """

    key: SequenceKey
    tokens: tuple[int, ...] = ()
    stop: Stop | None = None
    error: EverliftError | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Core(Protocol):
    """Engine core of vLLM; its methods run in the caller's thread."""

    @property
    def image_processor(self) -> ImageProcessor | None:
        """Processor of images, whose results ``add`` expects; None if the model takes no images."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no sequence holds; some of them are cached."""
        ...

    def add(self, sequence: EngineSequence) -> None:
        """Queue a sequence, which continues after its output so far, as after a preemption.

        Raises InvalidRequest if vLLM rejects the sequence's parameters.
        """
        ...

    def remove(self, keys: Sequence[SequenceKey]) -> None:
        """Remove sequences, and free their blocks."""
        ...

    def step(self, on_scheduled: Callable[[ScheduledStep], None]) -> list[SampledTokens]:
        """Run one step, and return its results.

        ``on_scheduled`` is called between the planning of the step and its execution, unless there
        is nothing to compute. Any error means that the core is unusable.
        """
        ...

    def take_chunk_changes(self) -> ChunkChanges:
        """Return the changes of the prefix cache since the last call."""
        ...

    def close(self) -> None: ...
