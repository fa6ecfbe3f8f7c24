"""Precompilation of native code, which is not compiled again at its use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from worker.attention.cpu import compiled_kernel
from worker.model.compiled_pointwise import choose_pointwise
from worker.model.panels import panel_packing, pays
from worker.model.precompile import precompile
from worker.model.stack import stack_library
from worker.native import native
from worker.native.argmax import choose_argmax

CPU = torch.device("cpu")


def refuse(source: Path, flags: Sequence[str] = ()) -> None:
    raise AssertionError(f"{source.name} is compiled again")


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_precompile_builds_all_libraries_of_decoder(
    dtype: torch.dtype, weights: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    precompile(64, dtype, weights, CPU)
    monkeypatch.setattr(native, "compiled", refuse)
    compiled_kernel(64, dtype)
    choose_pointwise(dtype, CPU)
    choose_argmax(CPU)
    if pays(dtype, weights):
        panel_packing(dtype, weights)
        stack_library(64, dtype, weights, None)


def test_precompile_builds_nothing_for_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "compiled", refuse)
    precompile(96, torch.bfloat16, torch.bfloat16, torch.device("cuda"))
