"""Pseudo-random weights: equal for every split over ranks, of sensible size, from config.json."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.worker.llama_support import save_llama
from tests.support.worker.weights_support import Rank
from worker.model.decoder import Decoder
from worker.model.dummy import fill
from worker.model.huggingface.families import read_spec
from worker.model.layers import Placement
from worker.model.piece import Piece
from worker.parallel.group import Group


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a model directory without weights."""
    save_llama(tmp_path, attention_bias=True)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    return tmp_path


def filled(directory: Path, group: Group, dtype: torch.dtype = torch.float32) -> list[Piece]:
    place = Placement(group, dtype, torch.device("cpu"))
    model = Decoder(read_spec(directory), 64, place)
    pieces = list(model.pieces())
    assert fill(model) == sum(piece.into.nbytes for piece in pieces)
    return pieces


def test_dummy_weights_are_equal_for_every_split(directory: Path) -> None:
    whole = {piece.name: piece.into for piece in filled(directory, Group.single())}
    for rank in range(2):
        for piece in filled(directory, Rank(rank, 2)):
            assert torch.equal(piece.into, whole[piece.name][piece.slices]), piece.name


def test_dummy_weights_are_equal_in_every_dtype(directory: Path) -> None:
    exact = filled(directory, Group.single())
    rounded = filled(directory, Group.single(), torch.bfloat16)
    for one, other in zip(exact, rounded, strict=True):
        assert torch.equal(one.into.bfloat16(), other.into)


def test_dummy_weights_differ_and_are_scaled(directory: Path) -> None:
    pieces = {piece.name: piece.into for piece in filled(directory, Group.single())}
    first, second = (pieces[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2))
    assert not torch.equal(first, second)
    for name, tensor in pieces.items():
        if tensor.dim() == 2:
            assert tensor.mean().abs() < 0.02
            assert tensor.std() == pytest.approx(tensor.shape[1] ** -0.5, rel=0.05), name
        else:
            assert tensor.mean() == pytest.approx(0.0 if "bias" in name else 1.0, abs=0.02)
            assert 0.0 < tensor.std() < 0.04
