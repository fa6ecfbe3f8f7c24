"""Logits of every family equal those of transformers, for any split of the tokens into steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from tests.support.example_counts import long
from tests.support.worker.decoder_steps import Step, SteppedDecoder
from tests.support.worker.families import (
    CHECKPOINTS,
    MAX_POSITION,
    VOCAB,
    all_logits,
    load_family,
    save_family,
)
from worker.attention.backend import AttentionBackend
from worker.attention.choice import choose_attention
from worker.attention.reference import ReferenceAttention
from worker.device.kv_cache import KVCache

#: Lengths of the sequences in tokens; all but the last exceed the windows of most checkpoints.
LENGTHS = (100, 45, 33, 70, 9)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=CHECKPOINTS, scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("model"), CHECKPOINTS[request.param])


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[Tensor]:
    model = load_family(directory)
    return [all_logits(model, sequence) for sequence in sequences()]


def sequences() -> list[list[int]]:
    rng = Random(1)
    return [[rng.randrange(6, VOCAB) for _ in range(length)] for length in LENGTHS]


def whole() -> list[Step]:
    return [list(enumerate(LENGTHS))]


def chunked() -> list[Step]:
    """Return steps of at most 13 tokens from each unfinished sequence."""
    return [
        [(i, min(13, length - done)) for i, length in enumerate(LENGTHS) if done < length]
        for done in range(0, max(LENGTHS), 13)
    ]


def decoded() -> list[Step]:
    """Return one prefill step and eight decode steps of all sequences."""
    prompts = [(i, length - 8) for i, length in enumerate(LENGTHS)]
    return [prompts, *([(i, 1) for i in range(len(LENGTHS))] for _ in range(8))]


def mixed() -> list[Step]:
    """Return steps with decodes and chunks, and with consecutive rows of one sequence."""
    return [
        [(0, 40), (4, 5)],
        [(4, 1), (0, 3), (1, 17), (1, 20)],
        [(4, 1), (0, 1), (1, 1), (2, 32), (2, 1)],
        [(4, 2), (1, 7), (0, 20), (0, 20), (3, 33), (3, 36)],
        [(3, 1), (0, 16)],
    ]


@pytest.mark.parametrize("attention", [choose_attention, long(ReferenceAttention)])
@pytest.mark.parametrize("steps", [long(whole), long(chunked), long(decoded), mixed])
def test_family_logits_match_transformers(
    steps: Callable[[], list[Step]],
    attention: Callable[[KVCache], AttentionBackend],
    directory: Path,
    expected: list[Tensor],
) -> None:
    decoder = SteppedDecoder(directory, MAX_POSITION, build_attention=attention)
    logits = decoder.logits(sequences(), steps())
    assert logits is not None
    for got, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_family_bf16_error_is_near_that_of_transformers(
    directory: Path, expected: list[Tensor]
) -> None:
    theirs = all_logits(load_family(directory, torch.bfloat16), sequences()[0])
    ours = SteppedDecoder(directory, MAX_POSITION, dtype=torch.bfloat16).logits(
        sequences()[:1], [[(0, LENGTHS[0])]]
    )
    assert ours is not None
    assert _distance(ours[0], expected[0]) < 1.2 * _distance(theirs, expected[0])


def _distance(logits: Tensor, wanted: Tensor) -> float:
    """Return the median RMS error over the tokens.

    Rounding changes the experts of some tokens, for which the router has near ties.
    """
    return (logits - wanted).square().mean(1).sqrt().median().item()
