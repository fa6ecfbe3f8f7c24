"""Paged attention of every backend, compared with the formula in float64 for each token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from everlift.hashes import BLOCK_SIZE
from tests.support.worker.attention_support import (
    BLOCKS,
    CPU,
    FORMS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MIXED,
    PLAIN,
    SINKS,
    Backend,
    Batch,
    assert_formula,
    compiled,
    every_backend,
    every_compiled,
    every_dtype,
    every_form,
    kernel,
    needs_compiler,
    row,
)
from worker.attention import cpu, reference
from worker.attention.backend import AttentionForm
from worker.attention.choice import choose_attention
from worker.attention.cpu import CpuAttention
from worker.attention.reference import ReferenceAttention
from worker.device.kv_cache import KVCache
from worker.engine.plan import Rows
from worker.native import native


@every_dtype
@every_form
@every_backend
def test_attention_matches_float64_formula(
    backend: Backend, form: AttentionForm, dtype: torch.dtype
) -> None:
    batch = Batch(backend, MIXED, dtype)
    for i, out in enumerate(batch.attend(list(range(len(MIXED))), form)):
        assert_formula(batch, i, out, form)


@pytest.mark.parametrize(("head_dim", "heads"), [(64, 14), (80, 2), (20, 18), (7, 4)])
@every_dtype
@every_backend
def test_attention_supports_any_head_size_and_count(
    backend: Backend, dtype: torch.dtype, head_dim: int, heads: int
) -> None:
    batch = Batch(backend, MIXED, dtype, head_dim, heads)
    form = AttentionForm(head_dim**-0.5, window=300)
    for i, out in enumerate(batch.attend(list(range(len(MIXED))), form)):
        assert_formula(batch, i, out, form)


@every_dtype
@every_form
@every_backend
def test_attention_is_bitwise_batch_invariant(
    backend: Backend, form: AttentionForm, dtype: torch.dtype
) -> None:
    if backend is ReferenceAttention and dtype != torch.float32:
        pytest.skip("torch promises it of fp32 alone")
    if backend is kernel:
        pytest.skip("the number of tiles says how each is split")
    batch = Batch(backend, [*MIXED, *MIXED[:9] * 5], dtype)
    everyone = list(range(len(batch.rows)))
    together = batch.attend(everyone, form)
    backwards = batch.attend(everyone[::-1], form)[::-1]
    for i in everyone:
        (alone,) = batch.attend([i], form)
        assert torch.equal(alone, together[i]), MIXED[i % len(MIXED)]
        assert torch.equal(alone, backwards[i])


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_as_before")
@every_dtype
@every_compiled
def test_attention_is_bitwise_equal_for_any_thread_count(
    backend: Backend, dtype: torch.dtype
) -> None:
    batch = Batch(backend, MIXED * 4, dtype, head_dim=64)
    form = AttentionForm(0.2, window=70, sinks=SINKS)
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(torch.cat(batch.attend(list(range(len(batch.rows))), form)))
    assert all(torch.equal(result, results[0]) for result in results)


@every_dtype
@every_form
@every_compiled
def test_attention_is_bitwise_equal_for_any_chunking(
    backend: Backend, form: AttentionForm, dtype: torch.dtype
) -> None:
    batch = Batch(backend, [(0, 150)], dtype)
    (whole,) = batch.attend([0], form)
    table = [*batch.rows[0].block_table]
    for chunk in (1, 7, 64):
        shapes = [(start, min(chunk, 150 - start)) for start in range(0, 150, chunk)]
        step = batch.backend.prepare(Rows.of([row(shape, table) for shape in shapes]))
        assert torch.equal(step.attend(1, batch.queries[0], form), whole)


def test_reference_attention_is_independent_of_gather_size(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(ReferenceAttention, MIXED * 3)
    everyone = list(range(len(batch.rows)))
    at_once = batch.attend(everyone)
    monkeypatch.setattr(reference, "_MAX_GATHERED_BYTES", 1)
    assert all(map(torch.equal, batch.attend(everyone), at_once))


@pytest.mark.parametrize("shape", [(40, 1), (70, 1), (70, 5), (40, 33)], ids=str)
@every_backend
def test_attention_ignores_spare_blocks_in_table(backend: Backend, shape: tuple[int, int]) -> None:
    batch = Batch(backend, [shape])
    (out,) = batch.attend([0])
    own = batch.rows[0].block_table
    spare = [block for block in range(BLOCKS) if block not in own][:5]  # they hold NaN
    batch.rows[0] = row(shape, [*own, *spare])
    assert torch.equal(batch.attend([0])[0], out)


@pytest.mark.parametrize("form", [PLAIN, AttentionForm(0.4, window=20)], ids=["plain", "window"])
@every_dtype
@every_backend
def test_row_attends_to_kv_written_by_earlier_row_of_step(
    backend: Backend, dtype: torch.dtype, form: AttentionForm
) -> None:
    batch = Batch(backend, [(20, 50)], dtype)
    (whole,) = batch.rows
    first, second = row((20, 23), [*whole.block_table]), row((43, 27), [*whole.block_table])
    step = batch.backend.prepare(Rows.of([first, second]))
    step.write(1, batch.keys[0][20:], batch.values[0][20:])
    assert_formula(batch, 0, step.attend(1, batch.queries[0], form), form)


@every_backend
def test_attention_reads_no_blocks_before_window(backend: Backend) -> None:
    batch = Batch(backend, [(100, 1), (100, 20)])
    form = AttentionForm(0.4, window=30)
    before = batch.attend([0, 1], form)
    for i in (0, 1):
        batch.cache.tensor[[*batch.rows[i].block_table[:2]]] = torch.nan
    assert all(map(torch.equal, batch.attend([0, 1], form), before))


@every_backend
def test_attention_form_may_differ_between_layers(backend: Backend) -> None:
    batch = Batch(backend, [(40, 1), (30, 20)])
    step = batch.backend.prepare(Rows.of(batch.rows))
    step.write(
        1,
        *(
            torch.cat([x[r.start :] for x, r in zip(xs, batch.rows, strict=True)])
            for xs in (batch.keys, batch.values)
        ),
    )
    for form in [*FORMS.values(), PLAIN]:
        out = step.attend(1, torch.cat(batch.queries), batch.here(form)).split([1, 20])
        for i in (0, 1):
            assert_formula(batch, i, out[i], form)


@every_dtype
@every_backend
def test_kv_write_changes_only_its_layer_and_positions(
    backend: Backend, dtype: torch.dtype
) -> None:
    batch = Batch(backend, [(40, 1), (10, 3), (30, 4)], dtype)
    before = batch.cache.tensor.nan_to_num()
    batch.attend([0, 1, 2])
    changed = (batch.cache.tensor.nan_to_num() != before).flatten(2)
    written = torch.zeros(BLOCKS, LAYERS, dtype=torch.int64)
    for each in batch.rows:
        for position in range(each.start, each.start + len(each.tokens)):
            written[each.block_table[position // BLOCK_SIZE], 1] += 2 * KV_HEADS * HEAD_DIM
    assert torch.equal(changed.sum(dim=-1), written)


@every_dtype
@every_backend
def test_copied_kv_block_gives_same_attention(backend: Backend, dtype: torch.dtype) -> None:
    """Swapping copies whole blocks, and rows share blocks in their tables."""
    batch = Batch(backend, [(40, 1)], dtype)
    (out,) = batch.attend([0])
    first, second = batch.rows[0].block_table
    other = next(block for block in range(BLOCKS) if block not in (first, second))
    batch.cache.tensor[other] = batch.cache.tensor[second]
    step = batch.backend.prepare(Rows.of([row((40, 1), [first, other])]))
    assert torch.equal(step.attend(1, batch.queries[0], PLAIN), out)


@every_backend
def test_attention_accepts_strided_heads(backend: Backend) -> None:
    """Heads may be slices of one projection, or have the layout of transformers' modules."""
    batch = Batch(backend, [(0, 20)])
    (expected,) = batch.attend([0])
    together = torch.cat((batch.queries[0], batch.keys[0], batch.values[0]), dim=1)
    for given in (together, together.transpose(0, 1).contiguous().transpose(0, 1)):
        query, key, value = given.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        batch.cache.tensor.fill_(torch.nan)
        step = batch.backend.prepare(Rows.of(batch.rows))
        step.write(1, key, value)
        assert torch.equal(step.attend(1, query, PLAIN), expected)


@every_compiled
def test_attention_confines_nonfinite_kv_to_its_heads(backend: Backend) -> None:
    batch = Batch(backend, [(70, 1), (70, 1), (70, 1)])
    batch.keys[0][70, 0, 3] = torch.nan
    batch.values[1][70, 1, 5] = torch.inf
    broken = batch.attend([0, 1, 2])
    assert broken[0][0, :3].isnan().all() and broken[0][0, 3:].isfinite().all()
    assert (~broken[1].isfinite()).nonzero().tolist() == [[0, 3, 5], [0, 4, 5], [0, 5, 5]]
    assert_formula(batch, 2, broken[2])


@needs_compiler
def test_cpu_kernel_shares_torch_thread_pool() -> None:
    """The process must load only one OpenMP library, which has one thread pool."""
    compiled(KVCache(1, 1, 1, HEAD_DIM, torch.float32, CPU))
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in maps if "libgomp" in line}) == 1


@needs_compiler
def test_choose_attention_uses_cpu_kernel_with_compiler() -> None:
    cache = KVCache(1, 1, 1, HEAD_DIM, torch.float32, CPU)
    assert isinstance(choose_attention(cache), CpuAttention)


def test_choose_attention_uses_reference_without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "compiled", lambda *_: None)
    cpu.compiled_kernel.cache_clear()
    cache = KVCache(1, 1, 1, 3, torch.float32, CPU)
    assert isinstance(choose_attention(cache), ReferenceAttention)
    cpu.compiled_kernel.cache_clear()
