"""Pointwise kernels, run in Triton's interpreter without a GPU, compared with torch."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.support.worker.attention_support import KERNELS_ON
from worker.model.kernel_pointwise import KernelPointwise
from worker.model.pointwise import TORCH
from worker.model.spec import Activation

EPS = 1e-5
KERNEL = KernelPointwise()
#: Triton's interpreter does not round to bf16 as a GPU does.
DTYPES = [torch.float32, torch.float16, *[torch.bfloat16] * (KERNELS_ON.type == "cuda")]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(KERNELS_ON, dtype)


def close(got: Tensor, expected: Tensor) -> None:
    """Check equality except for the order of sums, and for one rounding instead of two."""
    assert got.dtype == expected.dtype
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(got, expected, rtol=max(2 * eps, 2e-6), atol=1e-5)


@every_dtype
@pytest.mark.parametrize("width", [64, 83, 1000])
@pytest.mark.parametrize("add_one", [False, True])
def test_kernel_norm_matches_torch(width: int, add_one: bool, dtype: torch.dtype) -> None:
    x, weight = random(3, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    close(KERNEL.norm(x, weight, EPS, add_one), TORCH.norm(x, weight, EPS, add_one))


@every_dtype
def test_kernel_norm_writes_sum_in_place(dtype: torch.dtype) -> None:
    x, added, weight = (random(3, 83, dtype=dtype, seed=seed) for seed in range(3))
    expected_sum = x.clone()
    expected = TORCH.norm(expected_sum, weight[0], EPS, False, added)
    close(KERNEL.norm(x, weight[0], EPS, False, added), expected)
    assert torch.equal(x, expected_sum)


@every_dtype
def test_kernel_norm_accepts_strided_heads(dtype: torch.dtype) -> None:
    heads, weight = random(3, 5, 16, dtype=dtype)[:, 1:4], random(16, dtype=dtype)
    close(KERNEL.norm(heads, weight, EPS, False), TORCH.norm(heads, weight, EPS, False))


@every_dtype
@pytest.mark.parametrize("activation", get_args(Activation))
def test_kernel_gate_matches_torch(activation: Activation, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * 1100, dtype=dtype)[:, 100:] * (4 if activation == "gpt_oss" else 1)
    close(KERNEL.gate(gate_up, activation), TORCH.gate(gate_up, activation))
