"""Sampling of tokens: exact filtered distribution, independent of the other rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from everlift.sampling import SamplingParams
from tests.support.worker.llama_support import warped
from tests.support.worker.sampling_metadata_support import (
    FILTERS,
    GREEDY,
    WIDE,
    Row,
    logits,
    metadata,
)
from worker.native.argmax import NOT_FINITE, NOTHING_LEFT, choose_argmax
from worker.runner import sampling_backend as backend_module
from worker.runner import sampling_metadata as metadata_module
from worker.runner.sampling_backend import filter_thresholds


def sample(scores: Tensor, rows: Sequence[Row]) -> Tensor:
    return backend_module.sample_by_torch(scores, metadata(rows), choose_argmax(scores.device))


def test_greedy_sample_takes_first_maximum() -> None:
    scores = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    assert sample(scores, [Row(GREEDY)] * 2).tolist() == [1, 0]
    wide = torch.zeros(1, WIDE)
    wide[0, [700, 701, 1100]] = 2.0
    assert sample(wide, [Row(GREEDY)]) == 700


def test_sample_with_tiny_temperature_is_greedy() -> None:
    scores = logits(1, WIDE)
    assert sample(scores, [Row(SamplingParams(temperature=1e-30))]) == scores.argmax()


def test_sample_with_low_temperature_does_not_overflow() -> None:
    scores = logits(1, WIDE) * 1e30
    assert sample(scores, [Row(SamplingParams(temperature=1e-5))]) == scores.argmax()


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [40, WIDE])
def test_sample_filters_match_transformers(params: SamplingParams, vocab: int) -> None:
    scores = logits(20, vocab)
    scaled = (scores - scores.max(-1, keepdim=True).values) / params.temperature
    kept = scaled.exp() >= filter_thresholds(scaled.exp(), metadata([Row(params)] * 20).filters)
    assert torch.equal(kept, warped(scores, params).isfinite())


@pytest.mark.parametrize("top_k", [251, 255, 256, 257])
def test_top_k_ties_count_for_top_p(top_k: int) -> None:
    """Six of the 100 tied tokens are among the 256 that are examined first."""
    weights = torch.cat(
        [torch.linspace(1, 0.6, 250), torch.full((100,), 0.5), torch.linspace(0.3, 0.1, 650)]
    )[None]
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=0.75)
    kept = weights >= filter_thresholds(weights, metadata([Row(params)]).filters)
    assert torch.equal(kept, warped(weights.log(), params).isfinite())
    assert kept.sum() == 230


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_sample_follows_filtered_distribution(params: SamplingParams) -> None:
    scores = logits(1, 40)
    probabilities = warped(scores, params)[0].double().softmax(-1)
    count = 20_000
    rows = [Row(params, position) for position in range(count)]
    counts = sample(scores.expand(count, -1).contiguous(), rows).bincount(minlength=40)
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = probabilities[possible] * count
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * max(freedom, 1))


def test_sample_is_batch_invariant() -> None:
    params = [GREEDY, *FILTERS] * 3
    scores = logits(len(params), WIDE)
    rows = [Row(p, position, choice=position % 2) for position, p in enumerate(params)]
    together = sample(scores, rows).tolist()
    backwards = sample(scores.flip(0), rows[::-1]).tolist()[::-1]
    alone = [int(sample(scores[i : i + 1], rows[i : i + 1])) for i in range(len(rows))]
    assert together == backwards == alone


def test_sample_depends_on_seed_choice_and_position() -> None:
    scores = logits(1, WIDE).expand(64, -1).contiguous() / 4
    rows = {
        "seed": [Row(SamplingParams(seed=i)) for i in range(64)],
        "choice": [Row(SamplingParams(), choice=i) for i in range(64)],
        "position": [Row(SamplingParams(), position=i) for i in range(64)],
    }
    for name, varied in rows.items():
        assert len(set(sample(scores, varied).tolist())) > 32, name


@pytest.mark.parametrize(
    ("number", "token"), [(0.0, 1), (1 - 2.0**-53, 3)], ids=["least", "greatest"]
)
def test_sample_at_interval_ends_gives_kept_tokens(
    number: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_module, "uniform", lambda *_: np.array([number]))
    scores = torch.tensor([[-60.0, 3.0, 2.9, 3.0, -60.0]])
    assert sample(scores, [Row(SamplingParams(top_k=3))]) == token


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, FILTERS[4]], ids=["greedy", "sampled"])
def test_sample_confines_nonfinite_logits_to_their_row(
    broken: float, params: SamplingParams
) -> None:
    scores = logits(3, 40)
    whole = sample(scores, [Row(params)] * 3).tolist()
    scores[1, 7] = broken
    assert sample(scores, [Row(params)] * 3).tolist() == [whole[0], NOT_FINITE, whole[2]]


@pytest.mark.parametrize("params", [GREEDY, *FILTERS], ids=str)
def test_sample_marks_row_without_allowed_tokens(params: SamplingParams) -> None:
    scores = logits(3, 400)
    whole = sample(scores, [Row(params)] * 3).tolist()
    scores[1] = -math.inf
    assert sample(scores, [Row(params)] * 3).tolist() == [whole[0], NOTHING_LEFT, whole[2]]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_sample_never_gives_masked_tokens(params: SamplingParams) -> None:
    scores = logits(1, WIDE).expand(300, -1).contiguous()
    allowed = [3, 500, 1100]
    scores[:, [i for i in range(WIDE) if i not in allowed]] = -math.inf
    assert {*sample(scores, [Row(params, i) for i in range(300)]).tolist()} <= {*allowed}


def test_sample_of_few_allowed_tokens_skips_full_sort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = logits(1, WIDE)
    scores[:, 3:] = -math.inf
    monkeypatch.setattr(Tensor, "sort", None)
    assert sample(scores, [Row(SamplingParams(top_k=50))]) < 3
