"""Any slice of any tensor is read into any parameter, in batches of any size."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.support.worker.weights_support import Pieces
from worker.model import dummy, filling
from worker.model.piece import Piece
from worker.model.sharing import bounds_of, runs
from worker.model.weights import load

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Draw a shape, and slices of some of its first dimensions, including empty ones."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    slices = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        start = draw(st.integers(0, size))
        slices.append(slice(start, draw(st.integers(start, size))))
    return tuple(shape), tuple(slices)


def parameter(like: torch.Tensor, dtype: torch.dtype, padding: int) -> torch.Tensor:
    """Return space for ``like`` in a wider tensor, filled with a value to be overwritten."""
    wide = [*like.shape[:-1], like.shape[-1] + padding]
    return torch.full(wide, 7.0, dtype=dtype)[..., : like.shape[-1]]


@given(cut=cuts())
def test_slice_runs_cover_slice_in_order(cut: tuple[tuple[int, ...], tuple[slice, ...]]) -> None:
    shape, slices = cut
    whole = torch.arange(math.prod(shape)).view(shape)
    found = [
        element
        for run in runs(shape, bounds_of(slices, shape))
        for element in range(run.start, run.start + run.length)
    ]
    assert found == whole[slices].flatten().tolist()


@given(cut=cuts(), stored=DTYPES, held=DTYPES, padding=st.integers(0, 2), buffer=st.integers(1, 64))
def test_parameter_is_filled_with_converted_slice(
    cut: tuple[tuple[int, ...], tuple[slice, ...]],
    stored: torch.dtype,
    held: torch.dtype,
    padding: int,
    buffer: int,
) -> None:
    shape, slices = cut
    whole = torch.randn(shape, generator=torch.manual_seed(math.prod(shape))).to(stored)
    into = parameter(whole[slices], held, padding)
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "_BUFFER_BYTES", buffer)
        save_file({"before": torch.ones(3), "w": whole}, Path(directory, "model.safetensors"))
        before = Piece("before", (3,), (), torch.empty(3))
        load(Pieces(before, Piece("w", shape, slices, into)), directory)
    assert torch.equal(into, whole[slices].to(held))


@given(cut=cuts(), held=DTYPES, padding=st.integers(0, 2), period=st.integers(1, 40))
def test_dummy_slice_equals_slice_of_whole(
    cut: tuple[tuple[int, ...], tuple[slice, ...]], held: torch.dtype, padding: int, period: int
) -> None:
    shape, slices = cut
    whole = torch.empty(shape)
    into = parameter(whole[slices], held, padding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dummy, "PERIOD", period)
        dummy.fill(Pieces(Piece("w", shape, (), whole), Piece("w", shape, slices, into)))
    assert torch.equal(into, whole[slices].to(held))
    flat = whole.flatten()
    assert torch.equal(flat[period:], flat[: max(0, len(flat) - period)])
