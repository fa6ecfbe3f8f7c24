"""Encoding of the rows' results as integers, which rank 0 sends to the other ranks. Pure.

Without drafts and scored prompts, each sampling row is one number: its token, or a negative marker
if it failed. With them, each row that samples or scores is a line of numbers:

    [sampled tokens ..., NO_TOKEN ...]  or  [FAILED, NO_TOKEN ...]
"""

from __future__ import annotations

from collections.abc import Sequence

from everlift.errors import EngineFailed
from worker.engine.plan import RowResult

NO_TOKEN = -1
FAILED = -2


def to_lines(results: Sequence[RowResult], width: int) -> list[list[int]]:
    """Return the results encoded as lines of ``width`` numbers.

    ``width`` is the most tokens that a result can have, and at least 1.
    """
    lines = [[FAILED] if result.error is not None else [*result.tokens] for result in results]
    return [line + [NO_TOKEN] * (width - len(line)) for line in lines]


def from_lines(lines: Sequence[Sequence[int]]) -> list[RowResult]:
    """Return the results that ``lines`` encode.

    They lack log probabilities and the causes of errors, which only rank 0 reports.
    """
    return [_result(line) for line in lines]


def from_tokens(tokens: Sequence[int]) -> list[RowResult]:
    """Return the results of sampling rows that are encoded as one number each."""
    return [RowResult((token,)) if token >= 0 else _failed() for token in tokens]


def _failed() -> RowResult:
    return RowResult(error=EngineFailed("rank 0 could not continue it"))


def _result(line: Sequence[int]) -> RowResult:
    if line[0] == FAILED:
        return _failed()
    return RowResult(tuple(token for token in line if token != NO_TOKEN))
