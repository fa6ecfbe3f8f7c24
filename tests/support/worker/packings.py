"""The packing of our own, for tests."""

from __future__ import annotations

import shutil

import pytest
import torch

from worker.model.panels import PanelPacking, panel_packing


def panels_or_skip() -> PanelPacking:
    """Skips where it cannot be: where it could, it has to be."""
    features = torch.cpu.get_capabilities()
    if not features.get("avx512_bf16") or features.get("amx_bf16"):
        pytest.skip("a CPU for which panels are not meant")
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler here")
    packing = panel_packing()
    assert packing is not None
    return packing
