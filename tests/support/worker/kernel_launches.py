"""Launches of the kernels of GPU steps on CPU tensors, to count or compile the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch

from worker.attention.backend import AttentionForm
from worker.attention.gpu import GpuAttention
from worker.device.kv_cache import FP8_CODES, KVCache
from worker.device.upload import Parcel
from worker.engine.plan import Row, Rows
from worker.model.kernel_linear import KernelPacking
from worker.model.kernel_pointwise import KernelPointwise
from worker.model.layers import Placement
from worker.model.mixture import Mixture
from worker.model.quantised import Block, Quantised
from worker.model.spec import Activation, Experts, LayerSpec, ModelSpec, Rope
from worker.model.weight_format import CodeType, WeightFormat
from worker.parallel.group import Group
from worker.runner.sample_by_kernel import sample_by_kernel
from worker.runner.sampling_metadata import SamplingMetadata

CPU = torch.device("cpu")
MULTIPROCESSORS = 132
DECODE = [Row(0, (1,), 40, (0, 1), True)]
#: Decode rows without and with drafts, and a prompt.
MIXED = [*DECODE, Row(1, (1, 2, 3), 40, (2, 3), True, 2), Row(2, (1,) * 40, 0, (4, 5), True)]
ALL = AttentionForm(0.1, window=33, softcap=2.0, sinks=torch.zeros(8))


@dataclass(frozen=True)
class Heads:
    number: int
    kv: int
    dim: int


def attention(
    heads: Heads, dtype: torch.dtype, rows: list[Row], form: AttentionForm, is_fp8: bool = False
) -> None:
    """Launch one layer's kernels: write keys, rotate queries, and attend."""
    cache = KVCache(6, 1, heads.kv, heads.dim, FP8_CODES if is_fp8 else dtype, CPU)
    step = GpuAttention(cache, MULTIPROCESSORS).prepare(Rows.of(rows))
    tokens = sum(len(row.tokens) for row in rows)
    rotated = torch.zeros(tokens, heads.number + heads.kv, heads.dim, dtype=dtype)
    value = torch.zeros(tokens, heads.kv, heads.dim, dtype=dtype)
    angle = (torch.zeros(tokens, 1, heads.dim), torch.zeros(tokens, 1, heads.dim))
    step.write(0, value, value)
    query = step.rotate_and_write(0, rotated, heads.number, value, angle)
    step.attend(0, query, form)


def pointwise(dtype: torch.dtype, width: int) -> None:
    """Launch norms of all kinds, and gates."""
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


#: Codes, inputs of a group, outputs that share a scale, zero points, type of scales, FP8 inputs,
#: and numbers of outputs and inputs, as in Llama-3.1-8B and gpt-oss.
FORMATS: list[tuple[CodeType, int | None, int | None, bool, str, bool, int, int]] = [
    ("int4", 128, 1, True, "F16", False, 4096, 14336),
    ("int4", 32, 1, False, "BF16", False, 4096, 4096),
    ("int8", None, 1, False, "BF16", False, 4096, 4096),
    ("e4m3", None, 1, False, "F32", True, 4096, 14336),
    ("e4m3", 128, 128, False, "F32", True, 6144, 4096),
    ("e4m3", 128, 128, False, "F32", False, 4096, 4096),
    ("e2m1", 32, 1, False, "BF16", False, 2880, 2880),
]
#: Small, medium and large numbers of rows.
ROWS = (1, 40, 1000)


def quantised_products(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    """Launch products with a weight in each format."""
    for codes, group, scaled, zeros, scale_type, fp8, outputs, inputs in FORMATS:
        form = WeightFormat(
            "test",
            codes,
            "elements",
            group,
            scaled,
            zeros,
            scale_type=scale_type,
            fp8_activations=fp8,
        )
        block = Block("layer", (outputs, inputs), range(outputs), range(inputs), outputs)
        weight = Quantised(form, [block], inputs, dtype, CPU)
        packed = KernelPacking(MULTIPROCESSORS, has_fp8=True).pack_quantised(weight)
        bias = torch.zeros(outputs, dtype=dtype)
        for number in rows:
            packed.multiply(torch.zeros(number, inputs, dtype=dtype), bias)


def mixtures(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    """Launch mixtures of experts: dense as in Qwen3-30B-A3B, and MXFP4 as in gpt-oss.

    There are fewer experts than in these models.
    """
    mxfp4 = WeightFormat("mxfp4", "e2m1", "stacked", 32, 1, scale_type="BF16")
    shapes: list[tuple[int, int, WeightFormat | None, Activation]] = [
        (2048, 768, None, "silu"),
        (2880, 2880, replace(mxfp4, excluded=("router",)), "gpt_oss"),
    ]
    for hidden, size, form, activation in shapes:
        experts = Experts(8, 4, size, True, router_bias=form is not None)
        layer = LayerSpec(Rope(10000.0, 4), experts=experts)
        spec = ModelSpec(50, hidden, 11, 2, 1, 4, (layer,), 1e-6, 64, False, 0.5)
        names = replace(spec.tensors, router="router")
        spec = replace(spec, activation=activation, tensors=names, mlp_bias=form is not None)
        place = Placement(Group.single(), dtype, CPU, KernelPointwise(), format=form)
        mixture = Mixture("moe", experts, spec, place)
        mixture.pack(KernelPacking(MULTIPROCESSORS, has_fp8=True))
        for number in rows:
            mixture.partial(torch.zeros(number, hidden, dtype=dtype))


def launch_all() -> None:
    """Launch all kernels in every form of a step; first a decoding step of Llama-3.1-8B."""
    attention(Heads(32, 8, 128), torch.bfloat16, DECODE, AttentionForm(0.1))
    pointwise(torch.bfloat16, 4096)
    sampling(128_256)
    quantised_products(torch.bfloat16, ROWS)
    mixtures(torch.bfloat16, (1, 80, 1000))
    for dtype in (torch.float16, torch.float32):
        quantised_products(dtype, ROWS[:1])
        mixtures(dtype, (1,))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dim in (64, 96, 128, 256):
            attention(Heads(8, 2, dim), dtype, MIXED, ALL)
            if dtype != torch.float32:
                attention(Heads(8, 2, dim), dtype, MIXED, ALL, is_fp8=True)
        pointwise(dtype, 1000)
