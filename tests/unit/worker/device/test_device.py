"""Device and dtype that a configuration selects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from worker.device.device import (
    arithmetic,
    choose_device,
    choose_dtype,
    kind_of,
    name_of,
    use_threads,
)
from worker.device.device_kind import DeviceKind
from worker.native import native

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("there", [True, False])
def test_auto_device_prefers_gpu(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert choose_device("auto").type == ("cuda" if there else "cpu")
    assert choose_device("cpu").type == "cpu"


def test_device_kind_is_read_from_gpu_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = SimpleNamespace(total_memory=85_029_158_912, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h100)
    assert kind_of(torch.device("cuda")) is DeviceKind.LARGE_GPU
    assert kind_of(CPU) is DeviceKind.CPU


def test_choose_device_rejects_absent_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        choose_device("cuda")


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the CPU level that limits the other tests."""
    monkeypatch.delenv(native.LEVEL_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("features", "dtype"),
    [
        ({"avx2": True}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": False}, torch.float32),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_auto_dtype_is_bfloat16_if_cpu_supports_it(
    features: dict[str, bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert choose_dtype("auto", CPU) is dtype


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_auto_dtype_is_bfloat16_if_gpu_supports_it(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(major=capability[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    expected = torch.bfloat16 if capability >= (8, 0) else torch.float32
    assert choose_dtype("auto", torch.device("cuda")) is expected


def test_auto_dtype_is_float32_if_cpu_level_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(native, "level_limit", lambda: native.LEVELS[-1])
    assert choose_dtype("auto", CPU) is torch.float32


def test_choose_dtype_keeps_explicit_dtype() -> None:
    assert choose_dtype("float32", CPU) is torch.float32
    assert choose_dtype("bfloat16", CPU) is torch.bfloat16


def test_threads_default_to_the_available_cores() -> None:
    use_threads(None)
    assert torch.get_num_threads() == len(os.sched_getaffinity(0))
    use_threads(1)
    assert torch.get_num_threads() == 1


def test_arithmetic_is_named_where_bits_do_not_depend_on_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda")
    assert arithmetic(CPU, torch.float32)
    assert not arithmetic(CPU, torch.float16) and not arithmetic(gpu, torch.bfloat16)
    own = arithmetic(CPU, torch.bfloat16)
    monkeypatch.setenv(native.LEVEL_VARIABLE, "avx2")
    assert arithmetic(CPU, torch.bfloat16) == "cpu avx2" != own
    monkeypatch.setattr(native, "has_amx", lambda: True)
    assert arithmetic(CPU, torch.float32) and not arithmetic(CPU, torch.bfloat16)
    monkeypatch.setattr(native, "has_amx", lambda: False)
    monkeypatch.setattr(native, "why_no_code", lambda: "no compiler")
    assert not arithmetic(CPU, torch.bfloat16)


def test_device_name_of_cpu_includes_threads() -> None:
    use_threads(3)
    name, _, threads = name_of(CPU).rpartition(", ")
    assert name and threads == "3 threads"


@pytest.mark.parametrize(
    ("works", "name"), [(True, "NVIDIA cuda:1"), (False, "NVIDIA cuda:1, without kernels")]
)
def test_device_name_of_gpu_notes_missing_kernels(
    works: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA {device}")
    monkeypatch.setattr("worker.device.device.kernels_work", lambda device: works)
    assert name_of(torch.device("cuda:1")) == name
