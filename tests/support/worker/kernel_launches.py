"""Launches of the kernels of GPU steps on CPU tensors, to count or compile the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch

from worker.attention.backend import AttentionForm
from worker.attention.gpu import GpuAttention
from worker.device.kv_cache import KVCache
from worker.device.upload import Parcel
from worker.engine.plan import Row, Rows
from worker.model.kernel_pointwise import KernelPointwise
from worker.model.spec import Activation
from worker.runner.sample_by_kernel import sample_by_kernel
from worker.runner.sampling_metadata import SamplingMetadata

CPU = torch.device("cpu")
MULTIPROCESSORS = 132
DECODE = [Row(0, (1,), 40, (0, 1), True)]
#: With a row that has drafts, and a prompt.
MIXED = [*DECODE, Row(1, (1, 2, 3), 40, (2, 3), True, 2), Row(2, (1,) * 40, 0, (4, 5), True)]
ALL = AttentionForm(0.1, window=33, softcap=2.0, sinks=torch.zeros(8))


@dataclass(frozen=True)
class Heads:
    number: int
    kv: int
    dim: int


def attention(heads: Heads, dtype: torch.dtype, rows: list[Row], form: AttentionForm) -> None:
    """Launch one layer's kernels: write keys, rotate queries, and attend."""
    cache = KVCache(6, 1, heads.kv, heads.dim, dtype, CPU)
    step = GpuAttention(cache, MULTIPROCESSORS).prepare(Rows.of(rows))
    tokens = sum(len(row.tokens) for row in rows)
    rotated = torch.zeros(tokens, heads.number + heads.kv, heads.dim, dtype=dtype)
    value = torch.zeros(tokens, heads.kv, heads.dim, dtype=dtype)
    angle = (torch.zeros(tokens, 1, heads.dim), torch.zeros(tokens, 1, heads.dim))
    step.write(0, value, value)
    query = step.rotate_and_write(0, rotated, heads.number, value, angle)
    step.attend(0, query, form)


def pointwise(dtype: torch.dtype, width: int) -> None:
    """Norms of all kinds, and gates."""
    x, weight = torch.zeros(3, width, dtype=dtype), torch.zeros(width, dtype=dtype)
    for add_one in (False, True):
        for added in (None, x):
            KernelPointwise().norm(x, weight, 1e-5, add_one, added)
    for activation in get_args(Activation):
        KernelPointwise().gate(x, activation)


def sampling(vocab: int) -> None:
    columns = np.zeros((1, 2), np.uint64), np.zeros(1, np.int64)
    sample_by_kernel(SamplingMetadata(np.ones((1, 4)), *columns), Parcel(CPU))(
        torch.zeros(1, vocab)
    )


def launch_all() -> None:
    """All kernels, in every form that a step may launch; first those of a decoding step of
    Llama-3.1-8B."""
    attention(Heads(32, 8, 128), torch.bfloat16, DECODE, AttentionForm(0.1))
    pointwise(torch.bfloat16, 4096)
    sampling(128_256)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dim in (64, 96, 128, 256):
            attention(Heads(8, 2, dim), dtype, MIXED, ALL)
        pointwise(dtype, 1000)
