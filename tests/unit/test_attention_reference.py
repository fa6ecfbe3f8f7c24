"""Paged attention: against the formula, written out in float64 for each token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from everlift.blockhash import BLOCK_SIZE
from worker.attention import reference
from worker.attention.reference import ReferenceAttention
from worker.kv_cache import KVCache
from worker.limits import blocks_for
from worker.plan import Row

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 6, 2, 8, 2
BLOCKS = 400

#: (first new position, new tokens) of each row: decodes around block edges, then prefill chunks.
MIXED = [(0, 1), (31, 1), (32, 1), (63, 1), (64, 1), (100, 1), (900, 1), (0, 33), (40, 33), (70, 5)]


class Batch:
    """Rows with scattered blocks, everything before their new tokens already in the cache."""

    def __init__(self, shapes: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        self.cache = KVCache(BLOCKS, LAYERS, KV_HEADS, HEAD_DIM, dtype, CPU)
        self.cache.tensor.fill_(torch.nan)  # what others left behind
        free = iter(torch.randperm(BLOCKS).tolist())
        tables = [[next(free) for _ in range(blocks_for(sum(shape)))] for shape in shapes]
        self.rows = [row(shape, table) for shape, table in zip(shapes, tables, strict=True)]
        lengths = [sum(shape) for shape in shapes]
        self.keys = [torch.randn(n, KV_HEADS, HEAD_DIM).to(dtype) for n in lengths]
        self.values = [torch.randn(n, KV_HEADS, HEAD_DIM).to(dtype) for n in lengths]
        self.queries = [torch.randn(new, HEADS, HEAD_DIM).to(dtype) for _, new in shapes]
        for (start, _), table, keys, values in zip(
            shapes, tables, self.keys, self.values, strict=True
        ):
            if start:
                before = ReferenceAttention(self.cache).prepare([row((0, start), table)])
                before.write(1, keys[:start], values[:start])

    def attend(self, chosen: list[int]) -> list[Tensor]:
        """Writes and attends one step with the ``chosen`` rows; a tensor for each of them."""
        rows = [self.rows[i] for i in chosen]
        step = ReferenceAttention(self.cache).prepare(rows)
        new = [len(row.tokens) for row in rows]
        keys = torch.cat([self.keys[i][self.rows[i].start :] for i in chosen])
        values = torch.cat([self.values[i][self.rows[i].start :] for i in chosen])
        step.write(1, keys, values)
        out = step.attend(1, torch.cat([self.queries[i] for i in chosen]))
        return list(out.split(new))

    def formula(self, i: int) -> Tensor:
        """softmax(q k / sqrt(d)) v for each new token over all up to itself."""
        keys, values = (x.double().repeat_interleave(3, 1) for x in (self.keys[i], self.values[i]))
        out = []
        for position, query in enumerate(self.queries[i].double(), self.rows[i].start):
            scores = torch.einsum("hd,khd->hk", query, keys[: position + 1]) / math.sqrt(HEAD_DIM)
            out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[: position + 1]))
        return torch.stack(out)


def row(shape: tuple[int, int], table: list[int]) -> Row:
    start, new = shape
    tokens = tuple(range(new))
    return Row(0, tokens, start, tuple(table), True)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_every_token_attends_to_its_own_sequence_up_to_itself(
    dtype: torch.dtype, tolerance: float
) -> None:
    batch = Batch(MIXED, dtype)
    for i, out in enumerate(batch.attend(list(range(len(MIXED))))):
        torch.testing.assert_close(out.double(), batch.formula(i), atol=tolerance, rtol=0)


def test_a_row_gets_the_same_bits_alone_and_in_any_batch() -> None:
    batch = Batch([*MIXED, *MIXED[:7] * 5])
    everyone = list(range(len(batch.rows)))
    together = batch.attend(everyone)
    backwards = batch.attend(everyone[::-1])[::-1]
    for i in everyone:
        (alone,) = batch.attend([i])
        assert torch.equal(alone, together[i]), MIXED[i % len(MIXED)]
        assert torch.equal(alone, backwards[i])


def test_gathering_in_small_portions_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(MIXED * 3)
    everyone = list(range(len(batch.rows)))
    at_once = batch.attend(everyone)
    monkeypatch.setattr(reference, "_MAX_GATHERED_BYTES", 1)
    assert all(map(torch.equal, batch.attend(everyone), at_once))


def test_a_table_with_blocks_to_spare_changes_nothing() -> None:
    batch = Batch([(40, 1)])
    (out,) = batch.attend([0])
    batch.rows[0] = row((40, 1), [*batch.rows[0].block_table, 7, 8, 9, 10, 11])
    assert torch.equal(batch.attend([0])[0], out)


def test_only_the_written_positions_of_the_written_layer_change() -> None:
    batch = Batch([(40, 1), (10, 3)])
    before = batch.cache.tensor.nan_to_num()
    batch.attend([0, 1])
    written = {
        (row.block_table[p // BLOCK_SIZE], 1, p % BLOCK_SIZE)
        for row in batch.rows
        for p in range(row.start, row.start + len(row.tokens))
    }
    changed = (
        (batch.cache.tensor.nan_to_num() != before).any(dim=-1).any(dim=3).any(dim=2).nonzero()
    )
    assert {tuple(place) for place in changed.tolist()} == written
