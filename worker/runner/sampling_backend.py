"""Sampling from logits; a row's token depends only on its own logits, parameters and position.

A row's token is thus the same in every batch. The order of the filters is that of transformers;
vLLM applies min_p before top_k and top_p:

    temperature   logits / temperature; below 1e-5 greedy, i.e. the first of the largest logits
    top_k         the k most probable tokens, and any tied with the last of them; 0 keeps all
    top_p         of those, the fewest most probable ones that have at least top_p of their mass
    min_p         of those, the ones at least min_p times as probable as the most probable

A token's weight is exp(logit / temperature), up to a factor that is equal for the whole row; a mass
is a sum of weights. The mass of the kept tokens is accumulated in the order of token ids. The
sampled token is the first one at which this mass, relative to its total, exceeds the row's one
uniform number (``worker.runner.uniform``).

Every filter keeps all tokens from some weight upwards. Tokens that are tied at this weight are thus
all kept, and the result does not depend on a sorting order.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everlift.sampling import SamplingParams
from worker.device.upload import Parcel, upload
from worker.engine.plan import Ints
from worker.kernels.trial import kernels_work
from worker.native.argmax import Argmax, choose_argmax
from worker.runner.sampling_metadata import SampleFn, SamplingMetadata

#: Temperature below which sampling is greedy, as in vLLM: a lower one would only magnify rounding.
GREEDY_BELOW = 1e-5
#: Number of a row's largest weights that suffices for nearly every filter. For other filters the
#: whole row is sorted.
_CANDIDATES = 256


class SamplingTable:
    """Sampling parameters of the sequence in each slot.

    A slot is the number that a sequence has while it is in the batch.
    """

    def __init__(self) -> None:
        self._filters = np.zeros((0, 4))
        self._keys = np.zeros((0, 2), np.uint64)

    def write(self, slot: int, sampling: SamplingParams, choice: int) -> None:
        if slot >= len(self._keys):
            more = ((0, max(slot + 1, 2 * len(self._keys)) - len(self._keys)), (0, 0))
            self._filters, self._keys = np.pad(self._filters, more), np.pad(self._keys, more)
        top_p = sampling.top_p if sampling.top_p < 1 else math.inf
        top_k = sampling.top_k or math.inf
        self._filters[slot] = sampling.temperature, top_k, top_p, sampling.min_p
        self._keys[slot] = sampling.seed, choice

    def metadata(self, slots: Ints, positions: Ints) -> SamplingMetadata:
        """Return the sampling parameters of n tokens.

        ``slots`` [n] are the slots of the tokens' sequences, and ``positions`` [n] the positions of
        the tokens in the output.
        """
        return SamplingMetadata(self._filters[slots], self._keys[slots], positions)


class SamplingBackend(Protocol):
    def __call__(self, metadata: SamplingMetadata, parcel: Parcel) -> SampleFn:
        """Return the function that samples tokens with the parameters ``metadata``.

        The parameters may be added to ``parcel``, which is copied to the device as a whole.
        """
        ...


def choose_sampling_backend(device: torch.device) -> SamplingBackend:
    """Return sampling by the Triton kernel on a GPU on which Triton works, else by torch."""
    if device.type == "cuda" and kernels_work(device):
        # Imported late, because Triton is only needed on a GPU.
        from worker.runner.sample_by_kernel import sample_by_kernel

        return sample_by_kernel
    argmax = choose_argmax(device)
    return lambda metadata, _: partial(sample_by_torch, metadata=metadata, argmax=argmax)


def sample_by_torch(logits: Tensor, metadata: SamplingMetadata, argmax: Argmax) -> Tensor:
    """Return tokens int64 [n] sampled in torch from ``logits`` fp32 [n, vocab].

    A token is NOT_FINITE if a logit is NaN or +inf, NOTHING_LEFT if all are -inf. ``argmax`` finds
    the tokens of greedy rows.
    """
    maxima, tokens = argmax(logits)
    (random,) = (metadata.filters[:, 0] >= GREEDY_BELOW).nonzero()
    if len(random):
        index = upload(random, logits.device)
        sampled = _sample(logits[index] - maxima[index, None], metadata.take(random))
        tokens[index] = sampled.where(tokens[index] >= 0, tokens[index])
    return tokens


def _sample(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    temperatures, top_k, top_p, min_p = metadata.filters.T
    weights = (logits / _column(temperatures, logits).float()).exp()
    filtered = np.flatnonzero(np.isfinite(top_k) | np.isfinite(top_p) | (min_p > 0))
    if len(filtered):
        index = upload(filtered, logits.device)
        kept = weights[index]
        thresholds = filter_thresholds(kept, metadata.filters[filtered])
        weights[index] = kept.where(kept >= thresholds, 0)
    return _invert_cdf(weights, upload(metadata.uniform(), logits.device, torch.float64))


def _invert_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    # Uniform numbers are at most 1 - 2**-53, so the rounded product is less than the total.
    target = uniforms * cumulative[:, -1]
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def filter_thresholds(weights: Tensor, filters: NDArray[np.float64]) -> Tensor:
    """Return the smallest of each row's ``weights`` [n, vocab] that its filters keep, [n, 1].

    ``weights`` are exp((logit - largest logit of the row) / temperature), so the largest is 1.
    ``filters`` [n, 4] are temperature, which is ignored, and top_k, top_p and min_p, in the form
    of SamplingMetadata.

    Each row's _CANDIDATES largest weights are examined first. Filters that drop the smallest of
    these candidates drop all smaller weights too. Rows for which this is not certain are examined
    again with all their weights.
    """
    vocab = weights.shape[1]
    total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    top = weights.topk(min(_CANDIDATES, vocab)).values
    least, is_final = _filter(top, total, filters)
    open_rows = (~is_final).nonzero()[:, 0]
    if top.shape[1] < vocab and len(open_rows):
        everything = weights[open_rows].sort(descending=True).values
        rest = filters[open_rows.cpu().numpy()]
        least[open_rows], _ = _filter(everything, total[open_rows], rest)
    return least


def _filter(top: Tensor, total: Tensor, filters: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """Return the smallest weight that the filters keep in each row of ``top``, [n, 1].

    The second result, bool [n], is True if all weights of the row would certainly give the same
    smallest weight. ``top`` [n, w] has each row's largest weights in descending order, ``total``
    [n, 1] the sum of all weights of the row. ``filters`` are those of ``filter_thresholds``.
    """
    width = top.shape[1]
    top_k, top_p, min_p = (_column(column, top) for column in filters.T[1:])
    kth = top.gather(1, top_k.clamp(max=width).long() - 1)
    within_k = (top >= kth) | top_k.isinf()
    mass = torch.where(top_k.isinf(), total, (top * within_k).sum(-1, True, dtype=torch.float64))
    mass_before = top.cumsum(dim=-1, dtype=torch.float64) - top
    keep = within_k & (mass_before < top_p * mass) & (top >= min_p)
    count = keep.sum(dim=-1, keepdim=True).clamp(min=1)  # with NaN, no weight is kept
    # Only if the last weight of ``top`` is smaller than the k-th one, ``top`` certainly has all
    # tokens that are tied with the k-th one.
    known = top_k.isinf() | (top[:, -1:] < kth)
    # Weights of 0, as of tokens that a grammar forbids, are followed only by zeros.
    is_final = ((count < width) & known) | (top[:, -1:] == 0)
    return top.gather(1, count - 1), is_final[:, 0]


def _column(values: NDArray[np.float64], like: Tensor) -> Tensor:
    """Return ``values`` [n] as float64 [n, 1] on the device of ``like``."""
    return upload(values, like.device, torch.float64).unsqueeze(1)
