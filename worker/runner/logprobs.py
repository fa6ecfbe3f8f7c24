"""Log probabilities of tokens: log softmax of the model's unchanged logits.

Scores are copied from the device as one float64 table, because float64 represents every token id
exactly. The table has one row per token, and these columns:

    log probability, rank (1: most probable), ids of k most probable tokens, their log probabilities
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from everlift.sampling import TokenLogprobs
from worker.device.streams import HostCopy
from worker.device.upload import upload


def score(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Return the log probabilities of ``tokens`` int64 [n] as a table, float64 [n, 2 + 2 * k].

    The columns are described in the module's docstring. ``logits`` are fp32 [n, vocab], and k is
    ``num_top``, or vocab if that is smaller. The log probabilities of a row are NaN if one of its
    logits is NaN or +inf, or all are -inf. Other rows have the log probability -inf for a token
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
    """Return the log probabilities in one row of the table that ``score`` returns.

    The result has the first ``num_top`` alternatives of the row.
    """
    logprob, rank, *rest = columns
    width = len(rest) // 2
    ids, logprobs = rest[:width], rest[width:]
    top = tuple((int(i), value) for i, value in zip(ids, logprobs, strict=True))
    return TokenLogprobs(logprob, int(rank), top[:num_top])


class PendingScores:
    """Log probabilities that are being copied to the host.

    ``table`` is a result of ``score``. ``num_top`` has one item for each row of it, in order: the
    key is the index of a row of the step's logits, the value the number of alternatives to report.
    """

    def __init__(self, table: Tensor, num_top: Mapping[int, int]) -> None:
        self._num_top = num_top
        self._copy = HostCopy(table)

    def wait(self) -> dict[int, TokenLogprobs]:
        """Wait for the copy; return the log probabilities by index of the row of logits."""
        return {
            row: read_score(columns, num_top)
            for (row, num_top), columns in zip(
                self._num_top.items(), self._copy.wait(), strict=True
            )
        }


class CopiedLogits:
    """Copies of rows of a step's logits, which are needed because sampling changes the logits."""

    def __init__(self, logits: Tensor, num_top: Mapping[int, int]) -> None:
        """Copy the rows of ``logits`` [n, vocab] whose indices are keys of ``num_top``.

        ``num_top`` must not be empty; its values are the numbers of alternatives to report.
        """
        self._num_top = num_top
        self._index = upload(list(num_top), logits.device)
        self._logits = logits[self._index]

    def logprobs(self, tokens: Tensor) -> PendingScores:
        """Start to compute the sampled tokens' log probabilities and to copy them to the host.

        Only tokens of the copied rows are included. ``tokens`` int64 [n] has one item for every row
        of the step's logits: the sampled token, or a negative marker if none could be sampled. The
        log probability and the rank reported for a marker are meaningless.
        """
        tokens = tokens[self._index].clamp(min=0)
        table = score(self._logits, tokens, max(self._num_top.values()))
        return PendingScores(table, self._num_top)
