"""Attention kernels, run in Triton's interpreter without a GPU.

The tests of test_attention.py cover these kernels as well.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everlift.hashes import BLOCK_SIZE
from tests.support.example_counts import long
from tests.support.worker.attention_support import (
    FORMS,
    KERNELS_ON,
    Batch,
    assert_formula,
    kernel,
    some_forms,
)
from worker.attention.backend import AttentionForm
from worker.attention.tiles import FEW, MAX_SPLITS, num_splits, tiles_of
from worker.device.kv_cache import FP8_CODES, KVCache
from worker.engine.plan import Row, Rows
from worker.model.rope import RotaryTable, rotate
from worker.model.spec import Rope

#: Code of e4m3 that is NaN.
NAN_CODE = 0x7F
#: (start, tokens) of a decode at a block boundary, a row with drafts, and a chunk of a prompt.
FEW_ROWS = [(32, 1), (62, 4), (40, 22)]


@some_forms
def test_gpu_kernel_matches_float64_formula(form: AttentionForm) -> None:
    batch = Batch(kernel, FEW_ROWS)
    for i, out in enumerate(batch.attend(list(range(len(FEW_ROWS))), form)):
        assert_formula(batch, i, out, form)


@pytest.mark.parametrize(("head_dim", "heads"), [long(64, 14), (96, 2), long(128, 8)])
def test_gpu_kernel_supports_half_precision(head_dim: int, heads: int) -> None:
    batch = Batch(kernel, FEW_ROWS, torch.float16, head_dim, heads)
    form = AttentionForm(head_dim**-0.5, window=50)
    for i, out in enumerate(batch.attend([0, 1, 2], form)):
        assert_formula(batch, i, out, form)


@pytest.mark.parametrize("multiprocessors", [1, long(16)])
def test_gpu_kernel_is_correct_for_any_split_count(multiprocessors: int) -> None:
    batch = Batch(partial(kernel, multiprocessors=multiprocessors), [(70, 1), (5, 1)])
    for form in (FORMS["everything"], FORMS["plain"]):
        for i, out in enumerate(batch.attend([0, 1], form)):
            assert_formula(batch, i, out, form)


def test_decode_launch_is_independent_of_lengths_and_padding() -> None:
    """A replayed graph gets the same tensors with other values."""
    batch = Batch(kernel, [(70, 1), (33, 1)])
    expected = batch.attend([0, 1])
    tables = torch.zeros(4 * 3, dtype=torch.int32, device=batch.device)
    positions, counts = (
        torch.tensor(values, dtype=torch.int32, device=batch.device)
        for values in ((70, 33, -1, -1), (1, 1, 0, 0))
    )
    width = torch.tensor([3], dtype=torch.int32, device=batch.device)
    step = batch.backend.decoding(positions, counts, tables, width)
    for i, each in enumerate(batch.rows):
        tables[3 * i : 3 * i + len(each.block_table)] = torch.tensor(each.block_table)
    pads = torch.full_like(batch.queries[0], torch.nan)
    before = batch.cache.tensor.clone()
    kv = torch.full_like(batch.keys[0][:2], torch.nan)
    keys, values = (torch.cat((own[0][70:], own[1][33:], kv)) for own in (batch.keys, batch.values))
    step.write(1, keys, values)
    out = step.attend(1, torch.cat((*batch.queries, pads, pads)), FORMS["plain"])
    assert torch.equal(before.nan_to_num(), batch.cache.tensor.nan_to_num()), "written already"
    for i in (0, 1):
        torch.testing.assert_close(out[i : i + 1], expected[i], atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [long(torch.float32), torch.float16], ids=str)
def test_gpu_kernel_supports_largest_head_dim(dtype: torch.dtype) -> None:
    """Gemma 2 9B has this head dimension; half precision and fp32 use different tile sizes."""
    batch = Batch(kernel, [(40, 1), (5, 20)], dtype, head_dim=256, heads=16, kv_heads=8)
    form = AttentionForm(256**-0.5, window=24, softcap=2.0)
    for i, out in enumerate(batch.attend([0, 1], form)):
        assert_formula(batch, i, out, form)


def test_gpu_kernel_overwrites_uninitialised_output(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(kernel, FEW_ROWS)
    everyone = list(range(len(FEW_ROWS)))
    expected = batch.attend(everyone)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    assert all(map(torch.equal, batch.attend(everyone), expected))


@pytest.mark.long
def test_gpu_kernel_addresses_cache_beyond_int32() -> None:
    """Caches of large GPUs exceed 2**31 elements.

    The last block of the prompt and the decoded token lie beyond; other blocks take no memory.
    """
    numbers = 2 * 2 * 8 * BLOCK_SIZE * 128
    last = (1 << 31) // numbers + 5
    far, near = (written_and_attended(blocks, blocks - 1) for blocks in (last + 1, 4))
    assert all(map(torch.equal, far, near)) and far[-1].isfinite().all()


def written_and_attended(num_blocks: int, block: int) -> list[Tensor]:
    """Return the attention of a prompt whose second block is ``block``, and of a token after it."""
    random = torch.Generator().manual_seed(3)
    cache = KVCache(num_blocks, 2, 8, 128, torch.float16, KERNELS_ON)
    backend, outs = kernel(cache, multiprocessors=1), []
    for start, count in ((0, BLOCK_SIZE + 4), (BLOCK_SIZE + 4, 1)):
        rows = Rows.of([Row(0, (0,) * count, start, (1, block), True)])
        heads = torch.randn(count, 16 + 2 * 8, 128, generator=random).to(KERNELS_ON).half()
        query, key, value = heads.split([16, 8, 8], dim=1)
        step = backend.prepare(rows)
        step.write(1, key, value)
        outs.append(step.attend(1, query, AttentionForm(0.1)))
    return outs


@pytest.mark.parametrize("dim", [64, 24])
def test_fused_rope_rotates_queries_and_cached_keys(dim: int) -> None:
    batch = Batch(kernel, [(30, 5), (7, 1)], torch.float16, head_dim=64, heads=4)
    rows = Rows.of(batch.rows)
    angle = RotaryTable(Rope(dim=dim, theta=10_000.0), 64, batch.device).at(
        torch.from_numpy(rows.positions).to(batch.device)
    )
    heads = torch.randn(6, 4 + 2 + 2, 64, device=batch.device).half()
    rotated, value = heads[:, :6], heads[:, 6:]
    expected = rotate(rotated, angle)
    batch.backend.prepare(rows).write(1, expected[:, 4:], value)
    by_parts = batch.cache.tensor.clone()
    batch.cache.tensor[[*batch.rows[0].block_table, *batch.rows[1].block_table]] = torch.nan
    query = batch.backend.prepare(rows).rotate_and_write(1, rotated, 4, value, angle)
    torch.testing.assert_close(query, expected[:, :4], rtol=2e-3, atol=1e-3)
    for block, offset in zip(
        rows.blocks.tolist(), (rows.positions % BLOCK_SIZE).tolist(), strict=True
    ):
        got, right = (each[block, 1, :, :, offset] for each in (batch.cache.tensor, by_parts))
        torch.testing.assert_close(got, right, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("splits", [long(1), 2])
def test_fp8_cache_holds_rounded_keys_and_values(splits: int) -> None:
    """Results are those of a cache in half precision that holds the rounded numbers."""
    random = torch.Generator().manual_seed(5)
    caches = [KVCache(4, 2, 2, 24, dtype, KERNELS_ON) for dtype in (torch.float16, FP8_CODES)]
    caches[0].tensor.fill_(torch.nan)
    caches[1].tensor.fill_(NAN_CODE)
    half, fp8 = (kernel(cache, multiprocessors=16 * splits) for cache in caches)
    for start, count in ((0, 37), (37, 1)):
        rows = Rows.of([Row(0, (0,) * count, start, (2, 1), True)])
        heads = 100 * torch.randn(count, 4 + 2 * 2, 24, generator=random)
        query, key, value = heads.to(KERNELS_ON).half().split([4, 2, 2], dim=1)
        steps = half.prepare(rows), fp8.prepare(rows)
        steps[0].write(1, rounded(key), rounded(value))
        steps[1].write(1, key, value)
        expected, got = (step.attend(1, query, AttentionForm(1e-4)) for step in steps)
        assert torch.equal(got, expected) and expected.isfinite().all()


@pytest.mark.parametrize("dim", [24, 16])
def test_fused_rope_rounds_cached_keys_to_fp8(dim: int) -> None:
    rows = Rows.of([Row(0, (0,) * 5, 30, (2, 1), True)])
    angle = RotaryTable(Rope(dim=dim, theta=10_000.0), 64, KERNELS_ON).at(
        torch.from_numpy(rows.positions).to(KERNELS_ON)
    )
    heads = torch.randn(5, 4 + 2 + 2, 24, device=KERNELS_ON).half()
    caches = [KVCache(4, 2, 2, 24, dtype, KERNELS_ON) for dtype in (torch.float16, FP8_CODES)]
    for cache in caches:
        cache.tensor.zero_()
        step = kernel(cache).prepare(rows)
        step.rotate_and_write(1, heads[:, :6].clone(), 4, heads[:, 6:], angle)
    assert torch.equal(caches[1].tensor, rounded(caches[0].tensor, torch.int8))


def rounded(numbers: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    codes = numbers.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.to(numbers.dtype) if dtype is None else codes.view(dtype)


@given(st.lists(st.integers(0, 70), min_size=1, max_size=6), st.integers(1, 16))
def test_tiles_cover_each_token_once(counts: list[int], tokens: int) -> None:
    columns = np.array(counts)
    tiles = tiles_of(columns, np.arange(len(counts)), tokens)
    covered = [
        (row, offset + i)
        for row, offset in zip(tiles.rows.tolist(), tiles.offsets.tolist(), strict=True)
        for i in range(min(tokens, counts[row] - offset))
    ]
    assert covered == [(row, i) for row, count in enumerate(counts) for i in range(count)]


@given(st.integers(1, 4096), st.integers(1, 16), st.integers(1, 200))
def test_num_splits_fills_gpu_without_excess(
    tiles: int, kv_heads: int, multiprocessors: int
) -> None:
    splits = num_splits(tiles, kv_heads, multiprocessors)
    programs = tiles * kv_heads
    assert splits.bit_count() == 1 and splits <= MAX_SPLITS
    assert splits in (1, MAX_SPLITS) or programs * splits >= 2 * multiprocessors
    assert splits == 1 or programs * splits < 4 * multiprocessors
    assert FEW >= 1
