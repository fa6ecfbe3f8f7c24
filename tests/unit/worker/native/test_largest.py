"""Compiled argmax of logits, compared with torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from worker.native.argmax import (
    NOT_FINITE,
    NOTHING_LEFT,
    Argmax,
    CompiledArgmax,
    argmax_by_torch,
    choose_argmax,
)

CPU = torch.device("cpu")
#: Widths near 64 lanes, near a block of 1,024 elements, and of several blocks.
WIDTHS = (1, 63, 64, 65, 1023, 1024, 1025, 5000)


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def compiled() -> CompiledArgmax:
    found = choose_argmax(CPU)
    if not isinstance(found, CompiledArgmax):
        pytest.skip("no compiler")
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_compiled_argmax_matches_torch_with_ties(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    # Rounding to bf16 makes ties of the largest logit, of which the first one counts.
    logits = torch.randn(200, width, generator=generator).bfloat16().float()
    values, tokens = compiled()(logits)
    expected_values, expected_tokens = argmax_by_torch(logits)
    assert torch.equal(values, expected_values)
    assert torch.equal(tokens, expected_tokens)
    part = logits[:, : width // 2 + 1]
    assert torch.equal(compiled()(part)[1], argmax_by_torch(part)[1])
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(tokens, first)


@pytest.mark.parametrize("find", [compiled, lambda: argmax_by_torch], ids=["compiled", "torch"])
@pytest.mark.parametrize("width", WIDTHS)
def test_argmax_marks_rows_without_maximum(find: Callable[[], Argmax], width: int) -> None:
    ordinary = torch.zeros(width)
    for at in {0, width // 2, width - 1}:
        rows = {math.nan: NOT_FINITE, math.inf: NOT_FINITE, -math.inf: 0}
        for value, mark in rows.items():
            row = ordinary.clone()
            row[at] = value
            expected = mark if mark < 0 else int(row.argmax())
            if width == 1 and value == -math.inf:
                expected = NOTHING_LEFT
            assert find()(torch.stack([ordinary, row]))[1].tolist() == [0, expected], (at, value)
    nothing = torch.full((1, width), -math.inf)
    assert find()(nothing)[1].tolist() == [NOTHING_LEFT]
    assert find()(nothing)[0].tolist() == [-math.inf]


def test_choose_argmax_uses_torch_off_cpu() -> None:
    assert choose_argmax(torch.device("cuda")) is argmax_by_torch
