"""Layers of one rank: zero padding in every form of weights, and rounding of norms."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import (
    Gemma2RMSNorm,
    Gemma2TextScaledWordEmbedding,
)

from tests.support.worker.packings import panels_or_skip
from worker.attention.reference import ReferenceAttention
from worker.device.kv_cache import KVCache
from worker.engine.plan import Row, Rows
from worker.model.decoder import Decoder
from worker.model.layers import ColumnLinear, Part, Placement, RmsNorm, RowLinear, VocabTable
from worker.model.matrix import Packing
from worker.model.onednn import OneDnnPacking
from worker.model.piece import Piece
from worker.model.sharing import tail_padded
from worker.model.spec import ModelSpec
from worker.parallel.group import Group

CPU = torch.device("cpu")


class Rank(Group):
    """Rank of four without the other ranks: a sum is the part of this rank."""

    size = 4

    def __init__(self, rank: int) -> None:
        self.rank = rank


class Poisoned(Placement):
    """Placement in memory that contains NaN."""

    def empty(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=self.dtype)


@dataclass(frozen=True)
class Form:
    """Form of weights: their dtype, and how they are packed."""

    dtype: torch.dtype
    packing: Packing | None

    def place(self, rank: int) -> Placement:
        return Poisoned(Rank(rank), self.dtype, CPU)

    def fill(self, layer: ColumnLinear | RowLinear | VocabTable) -> list[Piece]:
        """Fill the pieces with ones, as from a checkpoint; padding is left unchanged."""
        pieces = list(layer.pieces())
        for piece in pieces:
            assert torch.empty(piece.shape)[piece.slices].shape == piece.into.shape
            piece.into.fill_(1.0)
        if self.packing is not None:
            layer.pack(self.packing)
            with pytest.raises(RuntimeError, match="packed"):
                next(layer.pieces())
        return pieces

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=self.dtype)


@pytest.fixture(params=["plain", "oneDNN", "panels"])
def form(request: pytest.FixtureRequest) -> Form:
    if request.param == "plain":
        return Form(torch.float32, None)
    if request.param == "oneDNN":
        return Form(torch.float32, OneDnnPacking())
    return Form(torch.bfloat16, panels_or_skip(torch.bfloat16, torch.bfloat16))


def part(name: str, size: int, rank: int) -> Part:
    return Part(name, size, tail_padded(size, 4, rank))


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, [5, 5, 5]), (1, [5, 5, 5]), (2, [5, 0, 5]), (3, [0, 0, 0])],
)
def test_column_linear_padding_is_zero(rank: int, expected: list[int], form: Form) -> None:
    linear = ColumnLinear((part("a", 5, rank), part("b", 3, rank)), 4, True, form.place(rank))
    pieces = form.fill(linear)
    assert [piece.name for piece in pieces] == ["a.weight", "b.weight", "a.bias", "b.bias"]
    assert linear(form.ones(1, 4)).tolist() == [expected]


@pytest.mark.parametrize(("rank", "expected"), [(0, 3), (2, 1), (3, 0)])
def test_row_linear_padding_adds_nothing(rank: int, expected: int, form: Form) -> None:
    """Rank 0 alone adds the bias."""
    linear = RowLinear(part("a", 5, rank), 2, True, form.place(rank))
    form.fill(linear)
    assert linear(form.ones(1, 2)).tolist() == [[expected] * 2]


def test_vocab_table_padding_is_zero(form: Form) -> None:
    table = VocabTable("embedding", 5, 4, form.place(2))
    form.fill(table)
    if form.packing is None or form.packing.supports_rows:
        assert table.lookup(torch.tensor([3, 4])).tolist() == [[0] * 4, [1] * 4]
    logits = table.logits(form.ones(1, 4))
    assert logits is not None
    assert logits.tolist() == [[4, 0]]


def test_norm_adding_one_rounds_like_gemma() -> None:
    norm = RmsNorm("norm", 64, 1e-6, True, Placement(Group.single(), torch.bfloat16, CPU))
    theirs = Gemma2RMSNorm(64).to(torch.bfloat16)
    (piece,) = norm.pieces()
    with torch.no_grad():
        piece.into.copy_(theirs.weight.normal_())
    x = torch.randn(50, 64, dtype=torch.bfloat16) * 3
    assert torch.equal(norm(x), theirs(x))


def test_embedding_scale_is_rounded_to_the_dtype() -> None:
    half = Placement(Group.single(), torch.bfloat16, CPU)
    decoder = Decoder(no_layers(embedding_multiplier=55.4256), 10, half)
    theirs = Gemma2TextScaledWordEmbedding(10, 16, 0, embed_scale=55.4256).to(torch.bfloat16)
    embedding, _ = decoder.pieces()
    with torch.no_grad():
        embedding.into.copy_(theirs.weight.normal_())
    ids = torch.arange(10)
    row = Row(0, tuple(ids.tolist()), 0, (0,), True)
    unused = ReferenceAttention(KVCache(1, 1, 1, 8, torch.bfloat16, CPU)).prepare(Rows.of([row]))
    assert torch.equal(decoder.forward(ids, ids, unused), theirs(ids))


def no_layers(embedding_multiplier: float) -> ModelSpec:
    return ModelSpec(
        vocab_size=10,
        hidden_size=16,
        intermediate_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        layers=(),
        norm_eps=1e-6,
        max_position=8,
        tied_embeddings=True,
        attention_scale=1.0,
        embedding_multiplier=embedding_multiplier,
    )
