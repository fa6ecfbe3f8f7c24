"""Paged attention: against the formula, written out in float64 for each token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from everlift.blockhash import BLOCK_SIZE
from worker.attention import reference
from worker.attention.backend import AttentionForm
from worker.attention.reference import ReferenceAttention
from worker.kv_cache import KVCache
from worker.limits import blocks_for
from worker.plan import Row, Rows

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 6, 2, 8, 2
BLOCKS = 400

#: (first new position, new tokens) of each row: decodes around block edges, rows as long as one
#: with drafts, then prefill chunks.
MIXED = [(0, 1), (31, 1), (32, 1), (63, 1), (64, 1), (100, 1), (900, 1)]
MIXED += [(70, 5), (62, 4), (0, 16), (0, 33), (40, 33), (200, 17)]

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, -3.0, 1.0])
PLAIN = AttentionForm(HEAD_DIM**-0.5)
FORMS = {
    "plain": PLAIN,
    "another scale": AttentionForm(0.7),
    "window within a block": AttentionForm(0.4, window=20),
    "window over blocks": AttentionForm(0.4, window=65),
    "window of one": AttentionForm(0.4, window=1),
    "softcap": AttentionForm(0.9, softcap=1.5),
    "sinks": AttentionForm(0.4, sinks=SINKS),
    "everything": AttentionForm(0.9, window=33, softcap=2.0, sinks=SINKS),
}


class Batch:
    """Rows with scattered blocks, everything before their new tokens already in the cache."""

    def __init__(self, shapes: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        self.cache = KVCache(BLOCKS, LAYERS, KV_HEADS, HEAD_DIM, dtype, CPU)
        self.cache.tensor.fill_(torch.nan)  # what others left behind
        free = iter(torch.randperm(BLOCKS).tolist())
        tables = [[next(free) for _ in range(blocks_for(sum(shape)))] for shape in shapes]
        self.rows = [row(*each, slot) for slot, each in enumerate(zip(shapes, tables, strict=True))]
        lengths = [sum(shape) for shape in shapes]
        self.keys = [torch.randn(n, KV_HEADS, HEAD_DIM).to(dtype) for n in lengths]
        self.values = [torch.randn(n, KV_HEADS, HEAD_DIM).to(dtype) for n in lengths]
        self.queries = [torch.randn(new, HEADS, HEAD_DIM).to(dtype) for _, new in shapes]
        for (start, _), table, keys, values in zip(
            shapes, tables, self.keys, self.values, strict=True
        ):
            if start:
                before = ReferenceAttention(self.cache).prepare(Rows.of([row((0, start), table)]))
                before.write(1, keys[:start], values[:start])

    def attend(self, chosen: list[int], form: AttentionForm = PLAIN) -> list[Tensor]:
        """Writes and attends one step with the ``chosen`` rows; a tensor for each of them."""
        rows = [self.rows[i] for i in chosen]
        step = ReferenceAttention(self.cache).prepare(Rows.of(rows))
        new = [len(row.tokens) for row in rows]
        keys = torch.cat([self.keys[i][self.rows[i].start :] for i in chosen])
        values = torch.cat([self.values[i][self.rows[i].start :] for i in chosen])
        step.write(1, keys, values)
        out = step.attend(1, torch.cat([self.queries[i] for i in chosen]), form)
        return list(out.split(new))

    def formula(self, i: int, form: AttentionForm = PLAIN) -> Tensor:
        """softmax(q k * scale) v for each new token over those that it sees."""
        keys, values = (x.double().repeat_interleave(3, 1) for x in (self.keys[i], self.values[i]))
        out = []
        for position, query in enumerate(self.queries[i].double(), self.rows[i].start):
            seen = slice(max(0, position + 1 - (form.window or position + 1)), position + 1)
            scores = torch.einsum("hd,khd->hk", query, keys[seen]) * form.scale
            if form.softcap is not None:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            weights = scores.exp()
            sink = 0 if form.sinks is None else form.sinks.double().exp().unsqueeze(1)
            weights = weights / (weights.sum(-1, keepdim=True) + sink)
            out.append(torch.einsum("hk,khd->hd", weights, values[seen]))
        return torch.stack(out)


def row(shape: tuple[int, int], table: list[int], slot: int = 0) -> Row:
    start, new = shape
    return Row(slot, tuple(range(new)), start, tuple(table), True)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_token_attends_to_what_it_sees_of_its_own_sequence(
    form: AttentionForm, dtype: torch.dtype, tolerance: float
) -> None:
    batch = Batch(MIXED, dtype)
    for i, out in enumerate(batch.attend(list(range(len(MIXED))), form)):
        torch.testing.assert_close(out.double(), batch.formula(i, form), atol=tolerance, rtol=0)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_row_gets_the_same_bits_alone_and_in_any_batch(form: AttentionForm) -> None:
    batch = Batch([*MIXED, *MIXED[:9] * 5])
    everyone = list(range(len(batch.rows)))
    together = batch.attend(everyone, form)
    backwards = batch.attend(everyone[::-1], form)[::-1]
    for i in everyone:
        (alone,) = batch.attend([i], form)
        assert torch.equal(alone, together[i]), MIXED[i % len(MIXED)]
        assert torch.equal(alone, backwards[i])


def test_gathering_in_small_portions_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(MIXED * 3)
    everyone = list(range(len(batch.rows)))
    at_once = batch.attend(everyone)
    monkeypatch.setattr(reference, "_MAX_GATHERED_BYTES", 1)
    assert all(map(torch.equal, batch.attend(everyone), at_once))


@pytest.mark.parametrize("shape", [(40, 1), (70, 1), (70, 5), (40, 33)], ids=str)
def test_a_table_with_blocks_to_spare_changes_nothing(shape: tuple[int, int]) -> None:
    batch = Batch([shape])
    (out,) = batch.attend([0])
    own = batch.rows[0].block_table
    spare = [block for block in range(BLOCKS) if block not in own][:5]  # they hold NaN
    batch.rows[0] = row(shape, [*own, *spare])
    assert torch.equal(batch.attend([0])[0], out)


@pytest.mark.parametrize("form", [PLAIN, AttentionForm(0.4, window=20)], ids=["plain", "window"])
def test_a_row_sees_what_an_earlier_row_of_its_step_writes(form: AttentionForm) -> None:
    batch = Batch([(20, 50)])
    (whole,) = batch.rows
    first, second = row((20, 22), [*whole.block_table]), row((42, 28), [*whole.block_table])
    step = ReferenceAttention(batch.cache).prepare(Rows.of([first, second]))
    step.write(1, batch.keys[0][20:], batch.values[0][20:])
    out = step.attend(1, batch.queries[0], form)
    torch.testing.assert_close(out.double(), batch.formula(0, form), atol=2e-6, rtol=0)


def test_blocks_left_of_the_window_are_not_read() -> None:
    batch = Batch([(100, 1), (100, 20)])
    form = AttentionForm(0.4, window=30)
    before = batch.attend([0, 1], form)
    for i in (0, 1):
        batch.cache.tensor[[*batch.rows[i].block_table[:2]]] = torch.nan
    assert all(map(torch.equal, batch.attend([0, 1], form), before))


def test_layers_of_one_step_may_differ_in_their_form() -> None:
    batch = Batch([(40, 1), (30, 20)])
    step = ReferenceAttention(batch.cache).prepare(Rows.of(batch.rows))
    step.write(
        1,
        *(
            torch.cat([x[r.start :] for x, r in zip(xs, batch.rows, strict=True)])
            for xs in (batch.keys, batch.values)
        ),
    )
    for form in [*FORMS.values(), PLAIN]:
        out = step.attend(1, torch.cat(batch.queries), form).split([1, 20])
        for i in (0, 1):
            torch.testing.assert_close(out[i].double(), batch.formula(i, form), atol=2e-6, rtol=0)


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
