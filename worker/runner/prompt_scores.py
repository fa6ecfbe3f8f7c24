"""Log probabilities of prompt tokens, for the rows that request them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from everlift.errors import EngineFailed
from everlift.sampling import TokenLogprobs
from worker.device.streams import HostCopy
from worker.device.upload import upload
from worker.engine.plan import Admission, RowResult, Rows
from worker.runner.logprobs import read_score, score
from worker.runner.sampled_row import NOT_FINITE_CAUSE

#: Maximum number of prompt tokens whose logits are in memory at the same time.
SCORED_AT_ONCE = 64


class Head(Protocol):
    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return fp32 logits [n, vocab] of ``hidden`` [n, hidden] on rank 0, else None."""
        ...


class _Scored(NamedTuple):
    """Prompt token whose log probability is requested, in the step's row with index ``row``.

    ``at`` is the index of the token before it among the step's tokens, and ``num_top`` the number
    of alternatives to report.
    """

    row: int
    at: int
    token: int
    num_top: int


class PromptScores:
    """Log probabilities of a step's prompt tokens, which are being copied to the host.

    They are empty on ranks other than 0.
    """

    def __init__(self, requested: Sequence[_Scored], tables: Iterable[Tensor]) -> None:
        self._requested = requested
        self._copies = [HostCopy(table) for table in tables]

    def wait(self) -> dict[int, list[TokenLogprobs]]:
        """Wait for the copy; return log probabilities by row index in the step, in prompt order.

        Rows without requested scores have no item. The result is empty on ranks other than 0.
        """
        lines = [line for table in self._copies for line in table.wait()]
        scores: dict[int, list[TokenLogprobs]] = {}
        for token, line in zip(self._requested, lines, strict=False):  # only rank 0 has lines
            scores.setdefault(token.row, []).append(read_score(line, token.num_top))
        return scores


#: Scores of a step that scores no prompt.
NO_SCORES = PromptScores((), ())


def score_prompts(
    rows: Rows, slots: Mapping[int, Admission], hidden: Tensor, head: Head
) -> PromptScores:
    """Start to compute the log probabilities of prompt tokens, for the rows that request them.

    A collective: all ranks must call it. A few tokens are computed at a time, because the logits of
    all tokens may need more memory than the model. ``slots`` has the step's sequences by slot.
    ``hidden`` [T, hidden] are the hidden states of all tokens of the step.
    """
    pieces = pieces_scored(rows, slots)
    requested = [*chain.from_iterable(pieces)]
    width = max((token.num_top for token in requested), default=0)
    tables = [_score(piece, hidden, head, width) for piece in pieces]
    return PromptScores(requested, [table for table in tables if table is not None])


def pieces_scored(rows: Rows, slots: Mapping[int, Admission]) -> list[list[_Scored]]:
    """Return the prompt tokens to score, in lists whose logits are computed together."""
    requested = list(_tokens_to_score(rows, slots))
    starts = range(0, len(requested), SCORED_AT_ONCE)
    return [requested[i : i + SCORED_AT_ONCE] for i in starts]


def with_scores(results: list[RowResult], prompt_scores: PromptScores) -> list[RowResult]:
    if not (scores := prompt_scores.wait()):
        return results
    return [
        _with_prompt_logprobs(result, scores[i]) if i in scores else result
        for i, result in enumerate(results)
    ]


def _tokens_to_score(rows: Rows, slots: Mapping[int, Admission]) -> Iterator[_Scored]:
    for i in np.flatnonzero(rows.scores_prompt).tolist():
        row, slot = rows[i], slots[rows[i].slot]
        last = min(row.start + len(row.tokens), slot.num_prompt - 1)
        tokens = slot.tokens[row.start + 1 : last + 1]
        for at, token in enumerate(tokens, int(rows.firsts[i])):
            yield _Scored(i, at, token, slot.sampling.prompt_logprobs or 0)


def _score(piece: Sequence[_Scored], hidden: Tensor, head: Head, width: int) -> Tensor | None:
    logits = head.logits(hidden[upload([scored.at for scored in piece], hidden.device)])
    if logits is None:
        return None
    return score(logits, upload([scored.token for scored in piece], hidden.device), width)


def _with_prompt_logprobs(result: RowResult, scores: Sequence[TokenLogprobs]) -> RowResult:
    if result.error is not None:
        return result
    if any(math.isnan(scored.logprob) for scored in scores):
        return RowResult(error=EngineFailed(NOT_FINITE_CAUSE))
    return result._replace(prompt_logprobs=tuple(scores))
