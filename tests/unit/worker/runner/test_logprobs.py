"""Log probabilities of rows with unusual logits; test_sampler.py has the other tests."""

from __future__ import annotations

import math

import pytest
import torch

from everlift.sampling import TokenLogprobs
from worker.runner.logprobs import read_score, score


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logprob_of_nonfinite_row_is_nan(broken: float) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, broken, 3.0], [1.0, 2.0, 3.0]])
    first, second, third = score(logits, torch.tensor([2, 0, 2]), 2).tolist()
    assert math.isnan(read_score(second, 2).logprob)
    assert first == third
    assert math.isfinite(read_score(first, 2).logprob)


def test_logprob_of_excluded_token_is_minus_infinity() -> None:
    table = score(torch.tensor([[0.0, -math.inf, 0.0]]), torch.tensor([1]), 0)
    assert read_score(table[0].tolist(), 0) == TokenLogprobs(-math.inf, 3)


def test_logprobs_reader_gets_requested_alternatives() -> None:
    (columns,) = score(torch.tensor([[0.0, 4.0, 2.0, 3.0]]), torch.tensor([3]), 3).tolist()
    assert [[t for t, _ in read_score(columns, n).top] for n in range(4)] == [
        [],
        [1],
        [1, 3],
        [1, 3, 2],
    ]
    assert read_score(columns, 2).rank == 2
