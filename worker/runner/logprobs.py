"""Log probabilities of tokens: log softmax of the model's unchanged logits.

Scores are copied from the device as one float64 table, which represents every token id exactly:

    log probability, rank, ids of the most probable tokens, their log probabilities
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from everlift.sampling import TokenLogprobs
from worker.device.streams import Arriving
from worker.device.upload import upload


def score(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Return the scores float64 [n, 2 + 2 * num_top] of ``tokens`` int64 [n].

    ``logits`` are fp32 [n, vocab]. If the vocabulary is smaller than ``num_top``, there are fewer
    alternatives. The log probability is NaN if a row's logits are not finite, and -inf for a token
    whose logit is -inf.
    """
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    normaliser = normaliser.where(normaliser.isfinite(), math.nan)
    own = logits.gather(1, tokens.unsqueeze(1))
    rank = (logits > own).sum(dim=-1, keepdim=True) + 1
    best, ids = logits.topk(min(num_top, logits.shape[1]))
    columns = (own - normaliser, rank, ids, best - normaliser)
    return torch.cat([column.double() for column in columns], dim=-1)


def read_score(columns: Sequence[float], num_top: int) -> TokenLogprobs:
    """Parse one row of ``score``, and keep the first ``num_top`` of its alternatives."""
    logprob, rank, *rest = columns
    width = len(rest) // 2
    ids, logprobs = rest[:width], rest[width:]
    top = tuple((int(i), value) for i, value in zip(ids, logprobs, strict=True))
    return TokenLogprobs(logprob, int(rank), top[:num_top])


class ArrivingScores:
    """Scores that are being copied to the host.

    ``num_top`` has the number of alternatives by row of the logits, in the order of ``table``.
    """

    def __init__(self, table: Tensor, num_top: Mapping[int, int]) -> None:
        self._num_top = num_top
        self._arriving = Arriving(table)

    def wait(self) -> dict[int, TokenLogprobs]:
        """Wait for the copy; return the log probabilities by row of the logits."""
        return {
            row: read_score(columns, num_top)
            for (row, num_top), columns in zip(
                self._num_top.items(), self._arriving.wait(), strict=True
            )
        }


class KeptLogits:
    """Copies of rows of a step's logits, made because sampling changes the logits."""

    def __init__(self, logits: Tensor, num_top: Mapping[int, int]) -> None:
        """Copy rows of ``logits`` [n, vocab]; ``num_top`` has the number of alternatives by row."""
        self._num_top = num_top
        self._index = upload(list(num_top), logits.device)
        self._logits = logits[self._index]

    def logprobs(self, tokens: Tensor) -> ArrivingScores:
        """Return the scores of ``tokens`` [n], one per row; those of markers are meaningless."""
        tokens = tokens[self._index].clamp(min=0)
        table = score(self._logits, tokens, max(self._num_top.values()))
        return ArrivingScores(table, self._num_top)
