"""Which way of packing weights is fastest here."""

from __future__ import annotations

import torch

from worker.model.matrix import Packing
from worker.model.onednn import OneDnnPacking
from worker.model.panels import panel_packing


def choose_packing(dtype: torch.dtype) -> Packing:
    """For weights of ``dtype`` on the CPU."""
    panels = panel_packing() if dtype == torch.bfloat16 else None
    return panels or OneDnnPacking()
