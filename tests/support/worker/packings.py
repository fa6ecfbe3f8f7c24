"""Everlift's own weight packing, for tests."""

from __future__ import annotations

import shutil

import pytest
import torch

from worker.model.panels import PanelPacking, panel_packing, pays
from worker.model.weight_format import CodeType


def panels_or_skip(
    dtype: torch.dtype, weights: torch.dtype, codes: CodeType | None = None
) -> PanelPacking:
    """Return the panel packing; skip the test on a CPU without it, or without a compiler."""
    if not pays(dtype, weights, codes):
        pytest.skip("a CPU for which these panels are not meant")
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler here")
    packing = panel_packing(dtype, weights, codes)
    assert packing is not None
    return packing
