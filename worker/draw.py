"""From logits to tokens: each row by its own logits, parameters and counter, whatever the batch.

The order is that of transformers (and, for what they share, of vLLM):

    temperature   logits / temperature; below 1e-5 it is greedy, the first of the largest logits
    top_k         the k most probable tokens, and any tied with the last of them; 0 keeps all
    top_p         of those, the fewest most probable ones that have at least top_p of their mass
    min_p         of those, the ones at least min_p times as probable as the most probable

What is left is walked in the order of token ids, to the first token whose cumulative mass exceeds
the row's one uniform number (``worker.uniform``). All filters keep the tokens from some weight
upwards, so ties at the edge are kept, and no sorting order shows in the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from everlift.sampling import SamplingParams
from worker.uniform import uniform
from worker.upload import upload

#: As in vLLM: below this a temperature would only magnify rounding.
GREEDY_BELOW = 1e-5
#: Marks a row with a logit that is NaN or +inf.
NOT_FINITE = -1
#: Marks a row whose logits are all -inf.
NOTHING_LEFT = -2

#: Enough of a row's largest weights for nearly every filter; the rest sort the whole row.
_CANDIDATES = 256


class Draw(NamedTuple):
    """One token to be drawn: the ``position``-th of the output."""

    sampling: SamplingParams
    choice: int
    position: int


def draw(logits: Tensor, rows: Sequence[Draw]) -> Tensor:
    """Token ids int64 [n] for ``logits`` fp32 [n, vocab]; NOT_FINITE or NOTHING_LEFT for a row from
    which none can be drawn."""
    maxima, tokens = logits.max(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
    if drawn:
        index = upload(drawn, logits.device)
        tokens[index] = _draw(logits[index] - maxima[index, None], [rows[i] for i in drawn])
    tokens = tokens.where(maxima.isfinite(), NOT_FINITE)
    return tokens.masked_fill_(maxima == -math.inf, NOTHING_LEFT)


def _draw(logits: Tensor, rows: Sequence[Draw]) -> Tensor:
    """``logits`` have their maximum at 0, so weights are probabilities relative to the largest."""
    params = [row.sampling for row in rows]
    weights = (logits / _column(params, lambda p: p.temperature, logits).float()).exp()
    filtered = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1 or p.min_p]
    if filtered:
        index = upload(filtered, logits.device)
        kept = weights[index]
        least = least_kept(kept, [params[i] for i in filtered])
        weights[index] = kept.where(kept >= least, 0)
    uniforms = [uniform(r.sampling.seed, r.choice, r.position) for r in rows]
    return _invert(weights, upload(uniforms, logits.device, torch.float64))


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Each row's first index whose cumulative weight exceeds its uniform share of the total."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    # A number of at most 1 - 2**-53 times the total rounds to less than the total.
    target = uniforms * cumulative[:, -1]
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def least_kept(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest weight [n, 1] that a row's filters keep.

    Where the smallest of the candidates is itself cut off, nothing below it matters; the other
    rows are done again with all of their weights.
    """
    vocab = weights.shape[1]
    total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    top = weights.topk(min(_CANDIDATES, vocab)).values
    least, is_final = _filter(top, total, params)
    open_rows = (~is_final).nonzero()[:, 0]
    if top.shape[1] < vocab and len(open_rows):
        everything = weights[open_rows].sort(descending=True).values
        rest = [params[i] for i in open_rows.tolist()]
        least[open_rows], _ = _filter(everything, total[open_rows], rest)
    return least


def _filter(top: Tensor, total: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """The smallest kept of the descending weights ``top`` [n, w]; whether it is so among all."""
    width = top.shape[1]
    top_k = _column(params, lambda p: p.top_k or math.inf, top)
    top_p = _column(params, lambda p: p.top_p if p.top_p < 1 else math.inf, top)
    min_p = _column(params, lambda p: p.min_p, top)
    kth = top.gather(1, top_k.clamp(max=width).long() - 1)
    within_k = (top >= kth) | top_k.isinf()
    mass = torch.where(top_k.isinf(), total, (top * within_k).sum(-1, True, dtype=torch.float64))
    mass_before = top.cumsum(dim=-1, dtype=torch.float64) - top
    keep = within_k & (mass_before < top_p * mass) & (top >= min_p)
    count = keep.sum(dim=-1, keepdim=True).clamp(min=1)  # NaN keeps nothing
    known = top_k.isinf() | (top_k <= width)
    # Behind a weight of 0, as a grammar leaves them, there is nothing more to keep.
    is_final = ((count < width) & known) | (top[:, -1:] == 0)
    return top.gather(1, count - 1), is_final[:, 0]


def _column(
    params: Sequence[SamplingParams], value: Callable[[SamplingParams], float], like: Tensor
) -> Tensor:
    """One parameter of every row, float64 [n, 1]."""
    return upload([value(p) for p in params], like.device, torch.float64).unsqueeze(1)
