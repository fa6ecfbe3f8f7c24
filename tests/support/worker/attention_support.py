"""Rows over a paged cache for every attention backend, and the formula as their reference."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from shutil import which

import pytest
import torch
from torch import Tensor

from everlift.hashes import BLOCK_SIZE
from tests.support.example_counts import long, one_in
from worker.attention.backend import AttentionBackend, AttentionForm
from worker.attention.cpu import CpuAttention, compiled_kernel
from worker.attention.gpu import GpuAttention
from worker.attention.prompts import PromptKernels
from worker.attention.reference import ReferenceAttention, ReferenceStep
from worker.device.kv_cache import KVCache
from worker.device.upload import upload
from worker.engine.limits import blocks_for
from worker.engine.plan import Row, Rows

CPU = torch.device("cpu")
KERNELS_ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, LAYERS = 6, 2, 2
HEAD_DIM = 8
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

#: Permitted absolute error against the formula.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}

Backend = Callable[[KVCache], AttentionBackend]


def compiled(cache: KVCache, *flags: str) -> AttentionBackend:
    kernel = compiled_kernel(cache.tensor.shape[-1], cache.tensor.dtype, *flags)
    assert kernel is not None
    return CpuAttention(cache, kernel)


def portable(cache: KVCache) -> AttentionBackend:
    """Return the backend that is compiled for a CPU without AVX-512."""
    return compiled(cache, "-march=x86-64-v3")


def kernel(
    cache: KVCache, multiprocessors: int = 6, prompt_kernels: PromptKernels | None = None
) -> AttentionBackend:
    """Return the GPU backend, in Triton's interpreter if there is no GPU.

    There are enough ``multiprocessors`` that a few tiles are split.
    """
    return GpuAttention(cache, multiprocessors, prompt_kernels)


needs_compiler = pytest.mark.skipif(which("g++") is None, reason="no g++ here")
BACKENDS = [
    pytest.param(ReferenceAttention, id="torch"),
    pytest.param(compiled, id="compiled", marks=needs_compiler),
    pytest.param(
        portable,
        id="portable",
        marks=[
            needs_compiler,
            pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86"),
        ],
    ),
    # Some of its tests are not long: see test_gpu_attention.py.
    pytest.param(kernel, id="kernel", marks=pytest.mark.long),
]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_compiled = pytest.mark.parametrize("backend", BACKENDS[1:3])
# fp16 and bf16 differ only in the conversion of numbers.
DTYPES = [torch.float32, long(torch.float16), torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
some_forms = pytest.mark.parametrize("form", one_in(4, FORMS.values()), ids=FORMS)


class Batch:
    """Rows with scattered blocks; all keys and values before the new tokens are in the cache."""

    def __init__(
        self,
        backend: Backend,
        shapes: list[tuple[int, int]],
        dtype: torch.dtype = torch.float32,
        head_dim: int = HEAD_DIM,
        heads: int = HEADS,
        kv_heads: int = KV_HEADS,
    ) -> None:
        is_kernel = kernel in (backend, getattr(backend, "func", None))
        self.device = KERNELS_ON if is_kernel else CPU
        if is_kernel and dtype == torch.bfloat16 and self.device == CPU:
            pytest.skip("Triton's interpreter has no products of bf16")
        torch.manual_seed(1)
        self.cache = KVCache(BLOCKS, LAYERS, kv_heads, head_dim, dtype, self.device)
        self.cache.tensor.fill_(torch.nan)  # contents of released blocks
        self.backend = backend(self.cache)
        free = iter(torch.randperm(BLOCKS).tolist())
        tables = [[next(free) for _ in range(blocks_for(sum(shape)))] for shape in shapes]
        self.rows = [row(*each, slot) for slot, each in enumerate(zip(shapes, tables, strict=True))]
        lengths = [sum(shape) for shape in shapes]
        self.keys = [torch.randn(n, kv_heads, head_dim).to(self.device, dtype) for n in lengths]
        self.values = [torch.randn(n, kv_heads, head_dim).to(self.device, dtype) for n in lengths]
        self.queries = [
            torch.randn(new, heads, head_dim).to(self.device, dtype) for _, new in shapes
        ]
        for (start, _), table, keys, values in zip(
            shapes, tables, self.keys, self.values, strict=True
        ):
            if start:
                self._fill(row((0, start), table), keys[:start], values[:start])

    def _fill(self, before: Row, keys: Tensor, values: Tensor) -> None:
        rows = Rows.of([before])
        if isinstance(self.backend, GpuAttention):
            # Its block layout is torch's; writing with torch is faster than with the interpreter.
            offsets = upload(rows.positions % BLOCK_SIZE, self.device)
            blocks = upload(rows.blocks, self.device)
            ReferenceStep(self.cache, rows, blocks, offsets).write(1, keys, values)
        else:
            self.backend.prepare(rows).write(1, keys, values)

    def attend(self, chosen: list[int], form: AttentionForm = PLAIN) -> list[Tensor]:
        """Write and attend one step of the ``chosen`` rows; return a tensor for each of them."""
        rows = [self.rows[i] for i in chosen]
        step = self.backend.prepare(Rows.of(rows))
        new = [len(row.tokens) for row in rows]
        keys = torch.cat([self.keys[i][self.rows[i].start :] for i in chosen])
        values = torch.cat([self.values[i][self.rows[i].start :] for i in chosen])
        step.write(1, keys, values)
        out = step.attend(1, torch.cat([self.queries[i] for i in chosen]), self.here(form))
        return list(out.split(new))

    def here(self, form: AttentionForm) -> AttentionForm:
        """Return ``form`` with its sinks on this device."""
        return form if form.sinks is None else replace(form, sinks=form.sinks.to(self.device))

    def formula(self, i: int, form: AttentionForm = PLAIN) -> Tensor:
        """Return softmax(q k * scale) v of each new token over the tokens that it attends to."""
        group = self.queries[i].shape[1] // self.cache.kv_heads
        keys, values = (
            x.double().repeat_interleave(group, 1) for x in (self.keys[i], self.values[i])
        )
        out = []
        for position, query in enumerate(self.queries[i].double(), self.rows[i].start):
            seen = slice(max(0, position + 1 - (form.window or position + 1)), position + 1)
            scores = torch.einsum("hd,khd->hk", query, keys[seen]) * form.scale
            if form.softcap is not None:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            weights = scores.exp()
            sink = 0 if form.sinks is None else self.here(form).sinks.double().exp().unsqueeze(1)
            weights = weights / (weights.sum(-1, keepdim=True) + sink)
            out.append(torch.einsum("hk,khd->hd", weights, values[seen]))
        return torch.stack(out)


def row(shape: tuple[int, int], table: list[int], slot: int = 0) -> Row:
    start, new = shape
    return Row(slot, tuple(range(new)), start, tuple(table), True)


def assert_formula(batch: Batch, i: int, out: Tensor, form: AttentionForm = PLAIN) -> None:
    tolerance = TOLERANCES[out.dtype]
    torch.testing.assert_close(out.double(), batch.formula(i, form), atol=tolerance, rtol=0)
