"""Log probabilities of tokens: log softmax of the model's logits.

log softmax of its logits as they are.

Scores travel from the device as one table of float64, which holds every token id exactly:

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
    """Return float64 [n, 2 + 2 * num_top] for ``tokens`` int64 [n], ``logits`` fp32 [n, vocab].

    Fewer alternatives where the vocabulary is smaller. Where a row's logits are not finite numbers,
    its log probability is NaN; that of a token which the model rules out is -inf.
    """
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    normaliser = normaliser.where(normaliser.isfinite(), math.nan)
    own = logits.gather(1, tokens.unsqueeze(1))
    rank = (logits > own).sum(dim=-1, keepdim=True) + 1
    best, ids = logits.topk(min(num_top, logits.shape[1]))
    columns = (own - normaliser, rank, ids, best - normaliser)
    return torch.cat([column.double() for column in columns], dim=-1)


def read_score(columns: Sequence[float], num_top: int) -> TokenLogprobs:
    """Return a row of ``score``, with the first ``num_top`` of its alternatives."""
    logprob, rank, *rest = columns
    width = len(rest) // 2
    ids, logprobs = rest[:width], rest[width:]
    top = tuple((int(i), value) for i, value in zip(ids, logprobs, strict=True))
    return TokenLogprobs(logprob, int(rank), top[:num_top])


class ArrivingScores:
    """Scores on their way to the host; ``num_top`` has the alternatives of each row."""

    def __init__(self, table: Tensor, num_top: Mapping[int, int]) -> None:
        self._num_top = num_top
        self._arriving = Arriving(table)

    def wait(self) -> dict[int, TokenLogprobs]:
        """Return the log probabilities by row of the logits."""
        return {
            row: read_score(columns, num_top)
            for (row, num_top), columns in zip(
                self._num_top.items(), self._arriving.wait(), strict=True
            )
        }


class KeptLogits:
    """Rows of a step's logits, kept unchanged until their tokens are drawn."""

    def __init__(self, logits: Tensor, num_top: Mapping[int, int]) -> None:
        """Keep ``logits`` [n, vocab]; ``num_top`` is the number of alternatives by row."""
        self._num_top = num_top
        self._index = upload(list(num_top), logits.device)
        self._logits = logits[self._index]

    def logprobs(self, tokens: Tensor) -> ArrivingScores:
        """Return the scores of ``tokens`` [n], one per row; negative tokens are ignored."""
        tokens = tokens[self._index].clamp(min=0)
        table = score(self._logits, tokens, max(self._num_top.values()))
        return ArrivingScores(table, self._num_top)
