"""Encoding of the results of a step as integers, which rank 0 sends to the other ranks. Pure.

A row is the part of one sequence in the step. In a step without draft tokens and without prompts
whose log probabilities are requested, each row that samples is encoded as one number. The number is
the row's token, or a negative marker if the row failed. In other steps, each row that samples, or
computes such log probabilities, is a line of numbers:

    [sampled tokens ..., NO_TOKEN ...]  or  [FAILED, NO_TOKEN ...]

A line of nothing but NO_TOKEN states that its row did not fail. Log probabilities are not sent,
because only rank 0 reports them.
"""

from __future__ import annotations

from collections.abc import Sequence

from everlift.errors import EngineFailed
from worker.engine.plan import RowResult

NO_TOKEN = -1
FAILED = -2


def to_lines(results: Sequence[RowResult], width: int) -> list[list[int]]:
    """Return the results encoded as lines of ``width`` numbers.

    ``width`` is at least 1, and at least the number of tokens of each result.
    """
    lines = [[FAILED] if result.error is not None else [*result.tokens] for result in results]
    return [line + [NO_TOKEN] * (width - len(line)) for line in lines]


def from_lines(lines: Sequence[Sequence[int]]) -> list[RowResult]:
    """Return the results that ``lines`` encode.

    Log probabilities and the causes of errors are missing, because only rank 0 reports them.
    """
    return [_result(line) for line in lines]


def from_tokens(tokens: Sequence[int]) -> list[RowResult]:
    """Return the results of rows that are encoded as one number each: a token, or a failure."""
    return [RowResult((token,)) if token >= 0 else _failed() for token in tokens]


def _failed() -> RowResult:
    return RowResult(error=EngineFailed("rank 0 could not continue the sequence"))


def _result(line: Sequence[int]) -> RowResult:
    if line[0] == FAILED:
        return _failed()
    return RowResult(tuple(token for token in line if token != NO_TOKEN))
