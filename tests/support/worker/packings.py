"""The packing of our own, for tests."""

from __future__ import annotations

import shutil

import pytest
import torch

from worker.model.panels import PanelPacking, panel_packing, pays


def panels_or_skip(dtype: torch.dtype, weights: torch.dtype) -> PanelPacking:
    """Skips where it cannot be: where it could, it has to be."""
    if not pays(dtype, weights):
        pytest.skip("a CPU for which these panels are not meant")
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler here")
    packing = panel_packing(dtype, weights)
    assert packing is not None
    return packing
