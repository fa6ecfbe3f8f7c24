"""Native code is compiled at once, and by nobody a second time."""

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_decoder_wants_is_there(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    precompile(64, dtype, CPU, ranks=1)
    monkeypatch.setattr(native, "compiled", refuse)
    compiled_kernel(64, dtype)
    choose_pointwise(dtype, CPU)
    choose_argmax(CPU)
    if dtype == torch.bfloat16 and pays():
        panel_packing()
        stack_library(64)


def test_a_gpu_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "compiled", refuse)
    precompile(96, torch.bfloat16, torch.device("cuda"), ranks=1)


def test_several_ranks_want_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.model.precompile.stack_library", refuse)
    precompile(64, torch.bfloat16, CPU, ranks=2)
