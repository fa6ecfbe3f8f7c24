"""What crosses between scheduler and runner: one engine step, as frozen values. Pure.

Plan  ->  saves, loads of KV blocks; admissions to slots; rows to compute
      <-  a RowResult for each row
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from everlift.errors import EverliftError
from everlift.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that takes batch slot ``slot`` from this step on, in place of any other.

    ``tokens`` are all that is known of it, the first ``num_prompt`` of them its prompt. ``grammar``
    is what rank 0's compiler made of ``sampling.grammar``; None on the other ranks, which draw
    nothing.
    """

    slot: int
    tokens: tuple[int, ...]
    num_prompt: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    choice: int
    grammar: object | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One slot's share of a step: compute ``tokens``, the first of them at position ``start``.

    Their KV goes to the blocks of ``block_table`` (block id of position p is ``block_table[p //
    BLOCK_SIZE]``); everything before ``start`` is in the cache already, or is computed by an
    earlier row of the same step.

        tokens   |---- known ----|-- drafts --|
                 start                        start + len(tokens)

    With ``samples`` the row's known tokens end at the last known one and the next is drawn; after
    it, where it is the first draft, the one after that, and so on. With ``scores_prompt`` the log
    probabilities of the prompt's tokens at positions ``start + 1`` to ``start + len(tokens)`` are
    wanted.
    """

    slot: int
    tokens: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    samples: bool
    num_drafts: int = 0
    scores_prompt: bool = False

    @property
    def known_end(self) -> int:
        """The position after its known tokens."""
        return self.start + len(self.tokens) - self.num_drafts


class BlockCopy(NamedTuple):
    """Between block ``block`` of the KV cache and place ``place`` of the host's memory."""

    block: int
    place: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step; ``step`` counts from 1. Rows come decodes first, but for those that are new to the
    batch, which follow in the order of their ``admissions``: they may attend to what the rows
    before them write. Admissions of others repeat what a step that broke off may have spoilt.
    ``saves`` are made before ``loads``, and both before anything is computed."""

    step: int
    rows: tuple[Row, ...]
    admissions: tuple[Admission, ...] = ()
    saves: tuple[BlockCopy, ...] = ()
    loads: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What became of a row.

    ``tokens`` are drawn: one if the row samples, and one more for each draft that was the token
    drawn at its place. On rank 0 ``logprobs`` has theirs, and ``prompt_logprobs`` those of the
    prompt's tokens that the row scores, where they were asked for. With an ``error`` no token was
    drawn, and the sequence cannot go on.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: EverliftError | None = None


class Runner(Protocol):
    """Executes plans. One runner a rank."""

    @property
    def num_blocks(self) -> int:
        """Blocks of its KV cache."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Places for blocks in the host's memory; 0 where copying them would not pay."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence, prompt and output."""
        ...

    def unready_slots(self) -> frozenset[int]:
        """Slots in which drawing would have to wait for a grammar; only rank 0 knows of any."""
        ...

    def execute(self, plan: Plan) -> list[RowResult]:
        """Runs one step; a result for each row, with the same tokens on every rank.

        Raises MemoryError where there is too little memory for a step of this size: whatever it was
        to write may be written, and what it knows of its slots may be halfway.
        """
        ...

    def release(self, slots: Collection[int]) -> None:
        """Nobody is in these slots: what is kept for them can go."""
        ...

    def close(self) -> None: ...
