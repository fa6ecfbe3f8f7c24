"""Requests of huge pages for large tensors in host memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.worker.packings import panels_or_skip
from worker.device.kv_cache import KVCache
from worker.model.layers import Placement
from worker.model.panels import quantised
from worker.model.quantised import Block, Quantised
from worker.model.weight_format import WeightFormat
from worker.parallel.group import Group

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here"
)


def has_request(tensor: Tensor) -> bool:
    """Return whether huge pages are requested for the middle of a tensor."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return " hg" in line
    raise AssertionError("the tensor is not in memory")


def test_kv_cache_requests_huge_pages() -> None:
    assert not has_request(torch.empty(64 << 20))
    assert has_request(KVCache(64, 1, 2, 128, torch.float32, CPU).tensor)


def test_weight_requests_huge_pages() -> None:
    weight = Placement(Group.single(), torch.float32, CPU).empty_weight(4096, 4096)
    assert has_request(weight)


def test_quantised_weight_requests_huge_pages() -> None:
    form = WeightFormat("test", "int8", "elements", None, 1, False)
    block = Block("layer", (4096, 4096), range(4096), range(4096), 4096)
    weight = Quantised(form, [block], 4096, torch.float32, CPU)
    assert has_request(weight.values) and not weight.values.any()
    assert has_request(quantised(torch.ones(4096, 4096))[0])


def test_padded_panels_request_huge_pages() -> None:
    packing = panels_or_skip(torch.float32, torch.float32)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(4091, 4096, generator=generator)
    x = torch.randn(1, 4096, generator=generator)
    expected = x @ weight.T
    panels = packing.pack(weight)
    assert has_request(panels._panels)
    assert torch.allclose(panels.multiply(x, None), expected, atol=1e-3)
