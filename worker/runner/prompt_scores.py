"""Log probabilities of prompts' tokens, for the rows that are to tell them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from everlift.errors import EngineFailed
from everlift.sampling import TokenLogprobs
from worker.device.streams import Arriving
from worker.device.upload import upload
from worker.engine.plan import Admission, RowResult, Rows
from worker.runner.logprobs import read_score, score
from worker.runner.sampled_row import NOT_FINITE_CAUSE

#: Positions of prompts whose logits are in memory at once.
SCORED_AT_ONCE = 64


class Head(Protocol):
    def logits(self, hidden: Tensor) -> Tensor | None:
        """See worker.runner.runner.Model."""
        ...


class _Scored(NamedTuple):
    """Token of a prompt to score: its ``row``, and the place of the token before it."""

    row: int
    at: int
    token: int
    num_top: int


class PromptScores:
    """The log probabilities of prompts' tokens, until the host knows them.

    On other ranks than 0 there are none.
    """

    def __init__(self, wanted: Sequence[_Scored], tables: Iterable[Tensor]) -> None:
        self._wanted = wanted
        self._arriving = [Arriving(table) for table in tables]

    def wait(self) -> dict[int, list[TokenLogprobs]]:
        """Return the scores by row."""
        lines = [line for table in self._arriving for line in table.wait()]
        scores: dict[int, list[TokenLogprobs]] = {}
        for each, line in zip(self._wanted, lines, strict=False):  # no lines but on rank 0
            scores.setdefault(each.row, []).append(read_score(line, each.num_top))
        return scores


#: Of a step that scores no prompt.
NO_SCORES = PromptScores((), ())


def score_prompts(
    rows: Rows, slots: Mapping[int, Admission], hidden: Tensor, head: Head
) -> PromptScores:
    """Score the prompts of all rows, piece by piece, since logits may be larger than the model.

    ``hidden`` are those of all of the step's tokens.
    """
    pieces = pieces_scored(rows, slots)
    wanted = [*chain.from_iterable(pieces)]
    width = max((each.num_top for each in wanted), default=0)
    tables = [_score(piece, hidden, head, width) for piece in pieces]
    return PromptScores(wanted, [table for table in tables if table is not None])


def pieces_scored(rows: Rows, slots: Mapping[int, Admission]) -> list[list[_Scored]]:
    """Yield the parts that are scored at once."""
    wanted = list(_wanted(rows, slots))
    return [wanted[i : i + SCORED_AT_ONCE] for i in range(0, len(wanted), SCORED_AT_ONCE)]


def with_scores(results: list[RowResult], arriving: PromptScores) -> list[RowResult]:
    if not (scores := arriving.wait()):
        return results
    return [
        _with_prompt_logprobs(result, scores[i]) if i in scores else result
        for i, result in enumerate(results)
    ]


def _wanted(rows: Rows, slots: Mapping[int, Admission]) -> Iterator[_Scored]:
    for i in np.flatnonzero(rows.scores_prompt).tolist():
        row, slot = rows[i], slots[rows[i].slot]
        last = min(row.start + len(row.tokens), slot.num_prompt - 1)
        tokens = slot.tokens[row.start + 1 : last + 1]
        for at, token in enumerate(tokens, int(rows.firsts[i])):
            yield _Scored(i, at, token, slot.sampling.prompt_logprobs or 0)


def _score(piece: Sequence[_Scored], hidden: Tensor, head: Head, width: int) -> Tensor | None:
    logits = head.logits(hidden[upload([each.at for each in piece], hidden.device)])
    if logits is None:
        return None
    return score(logits, upload([each.token for each in piece], hidden.device), width)


def _with_prompt_logprobs(result: RowResult, scores: Sequence[TokenLogprobs]) -> RowResult:
    if result.error is not None:
        return result
    if any(math.isnan(scored.logprob) for scored in scores):
        return RowResult(error=EngineFailed(NOT_FINITE_CAUSE))
    return result._replace(prompt_logprobs=tuple(scores))
