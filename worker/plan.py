"""What crosses from the scheduler to the runner: one engine step, as frozen values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from everlift.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: compute ``tokens``, the first of them at position ``start``.

    Their KV goes to the blocks of ``block_table`` (block id of position p is ``block_table[p //
    BLOCK_SIZE]``); everything before ``start`` is in the cache already. With ``samples`` the row
    ends at the last known token and the next one is drawn, under ``seed_position``, the output
    offset that the new token will have.
    """

    slot: int
    tokens: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    samples: bool
    sampling: SamplingParams
    choice: int
    seed_position: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows of one step, decodes first. ``step`` counts from 1."""

    step: int
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


class Runner(Protocol):
    """Executes plans. One runner a rank."""

    @property
    def num_blocks(self) -> int:
        """Blocks of its KV cache."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence, prompt and output."""
        ...

    def execute(self, plan: Plan) -> list[int]:
        """Runs one step; one token id for each row that samples, in the order of the rows."""
        ...

    def close(self) -> None: ...
