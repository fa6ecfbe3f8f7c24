"""Sampling by a kernel, in Triton's interpreter without a GPU, compared with torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from everlift.sampling import SamplingParams
from tests.support.example_counts import long
from tests.support.worker.attention_support import KERNELS_ON
from tests.support.worker.sampling_metadata_support import FILTERS, GREEDY, Row, logits, metadata
from worker.device.upload import Parcel
from worker.kernels.sampling import uniform as uniform_of
from worker.native.argmax import NOT_FINITE, NOTHING_LEFT, argmax_by_torch
from worker.runner.sample_by_kernel import sample_by_kernel
from worker.runner.sampling_backend import sample_by_torch
from worker.runner.uniform import uniform


def both(scores: Tensor, rows: list[Row]) -> tuple[list[int], list[int]]:
    """Return the tokens that the kernel samples, and those that torch samples."""
    columns = metadata(rows)
    by_kernel = sample_by_kernel(columns, Parcel(KERNELS_ON))(scores.to(KERNELS_ON))
    return by_kernel.tolist(), sample_by_torch(scores, columns, argmax_by_torch).tolist()


@pytest.mark.parametrize("vocab", [40, long(9000)])
def test_sampling_kernel_matches_torch(vocab: int) -> None:
    params = [GREEDY, *FILTERS]
    scores = logits(len(params), vocab)
    got, expected = both(scores, [Row(p, i, i % 2) for i, p in enumerate(params)])
    assert got == expected


def test_sampling_kernel_keeps_ties_at_filter_edge() -> None:
    scores = torch.tensor([[0.0, 1.0, 1.0, 1.0, -1.0, 1.0]]).repeat(8, 1)
    params = [SamplingParams(top_k=2), SamplingParams(top_p=0.3), SamplingParams(min_p=1.0)]
    for sampling in params:
        got, expected = both(scores, [Row(sampling, i) for i in range(8)])
        assert got == expected and {*got} <= {1, 2, 3, 5} and len({*got}) > 2


@pytest.mark.parametrize("sampling", [GREEDY, FILTERS[4]], ids=["greedy", "sampled"])
def test_sampling_kernel_marks_unsampleable_rows(sampling: SamplingParams) -> None:
    scores = logits(5, 40)
    whole, _ = both(scores, [Row(sampling)] * 5)
    scores[1, 7], scores[2, 0], scores[3] = math.nan, math.inf, -math.inf
    got, expected = both(scores, [Row(sampling)] * 5)
    assert got == expected == [whole[0], NOT_FINITE, NOT_FINITE, NOTHING_LEFT, whole[4]]


def test_sampling_kernel_never_gives_masked_tokens() -> None:
    scores = logits(1, 60).repeat(len(FILTERS), 1)
    scores[:, 3:50] = -math.inf
    got, expected = both(scores, [Row(params, i) for i, params in enumerate(FILTERS)])
    assert got == expected and not {*got} & {*range(3, 50)}


@triton.jit
def fill(out, seeds, choices, positions):
    i = tl.program_id(0)
    number = uniform_of(tl.load(seeds + i), tl.load(choices + i), tl.load(positions + i))
    tl.store(out + i, number)


def test_sampling_kernel_uniform_numbers_match_host() -> None:
    rng = np.random.default_rng(5)
    columns = [rng.integers(0, 2**64, 30, np.uint64) for _ in range(3)]
    columns[0][:3] = 0, 1, 2**64 - 1
    out = torch.zeros(30, dtype=torch.float64, device=KERNELS_ON)
    fill[(30,)](out, *(torch.from_numpy(c.view(np.int64)).to(KERNELS_ON) for c in columns))
    assert out.tolist() == uniform(*columns).tolist()
