"""Choice of attention kernels on a GPU, by whether they work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker.attention.choice import cache_dtype, check_cache_dtype, choose_attention
from worker.attention.gpu import GpuAttention
from worker.attention.reference import ReferenceAttention
from worker.config import WorkerConfig
from worker.kernels.trial import kernels_work, why_no_kernels
from worker.model.compiled_pointwise import choose_pointwise
from worker.model.kernel_pointwise import KernelPointwise
from worker.model.pointwise import TORCH
from worker.runner.sample_by_kernel import sample_by_kernel
from worker.runner.sampling_backend import choose_sampling_backend

GPU = torch.device("cuda")
CHOOSERS = (
    "worker.attention.choice",
    "worker.runner.sampling_backend",
    "worker.model.compiled_pointwise",
)


@pytest.fixture(autouse=True)
def tried_again() -> Iterator[None]:
    why_no_kernels.cache_clear()
    yield
    why_no_kernels.cache_clear()


def test_kernels_work_passes_trial_run() -> None:
    assert kernels_work(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def test_kernels_work_is_false_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "worker.model.kernel_pointwise", None)
    assert not kernels_work(torch.device("cpu"))
    assert "kernel_pointwise" in why_no_kernels(torch.device("cpu"))


def test_kernels_work_is_false_for_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelPointwise, "norm", lambda self, x, *_, added: added + 1)
    assert why_no_kernels(torch.device("cpu")) == "the result of a kernel differs from torch's"


def cache_on_gpu(head_dim: int) -> Any:
    tensor = SimpleNamespace(device=GPU, shape=(9, 1, 2, 4, 32, head_dim))
    return SimpleNamespace(tensor=tensor, kv_heads=4)


@pytest.mark.parametrize("works", [True, False])
def test_gpu_choosers_use_kernels_only_if_they_work(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in CHOOSERS:
        monkeypatch.setattr(f"{module}.kernels_work", lambda _: works)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert (choose_sampling_backend(GPU) is sample_by_kernel) == works
    pointwise = choose_pointwise(torch.bfloat16, GPU)
    assert isinstance(pointwise, KernelPointwise) if works else pointwise is TORCH
    monkeypatch.setattr("worker.attention.choice.choose_prompt_kernels", lambda _: None)
    attention = GpuAttention if works else ReferenceAttention
    assert isinstance(choose_attention(cache_on_gpu(128)), attention)
    assert isinstance(choose_attention(cache_on_gpu(512)), ReferenceAttention)


def test_fp8_cache_is_refused_without_kernels_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fp8 = (WorkerConfig(model="m", kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    assert cache_dtype(plain, torch.bfloat16) == torch.bfloat16
    assert cache_dtype(fp8, torch.bfloat16).itemsize == 1
    monkeypatch.setattr("worker.attention.choice.why_no_kernels", lambda _: "")
    check_cache_dtype(plain, torch.device("cpu"), torch.float32, 512)
    check_cache_dtype(fp8, GPU, torch.float16, 128)
    with pytest.raises(ValueError, match="kv_cache_dtype fp8 is for GPUs"):
        check_cache_dtype(fp8, torch.device("cpu"), torch.float16, 128)
    with pytest.raises(ValueError, match="needs dtype bfloat16 or float16, not float32"):
        check_cache_dtype(fp8, GPU, torch.float32, 128)
    with pytest.raises(ValueError, match="heads have 512 features"):
        check_cache_dtype(fp8, GPU, torch.float16, 512)
    monkeypatch.setattr("worker.attention.choice.why_no_kernels", lambda _: "no compiler")
    with pytest.raises(ValueError, match="fp8 needs Triton's kernels: no compiler"):
        check_cache_dtype(fp8, GPU, torch.float16, 128)
