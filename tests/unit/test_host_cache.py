"""Copies of KV blocks in the host's memory."""

from __future__ import annotations

import pytest
import torch

from worker.host_cache import HostCache
from worker.kv_cache import KVCache
from worker.plan import BlockCopy

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_block_comes_back_bit_for_bit_wherever_it_goes(device: str, dtype: torch.dtype) -> None:
    cache = KVCache(4, 3, 2, 8, dtype, torch.device(device))
    cache.tensor.normal_()
    cache.tensor[1, 0, 0, 0, 0, :2] = torch.tensor([torch.nan, -0.0])
    bits = cache.tensor.view(torch.int16).clone()
    host = HostCache(cache, 3)
    assert host.num_blocks == 3

    host.save([BlockCopy(1, 2), BlockCopy(3, 0)])
    cache.tensor[[1, 3]] = 7.0
    host.load([BlockCopy(3, 2), BlockCopy(0, 0)])

    now = cache.tensor.view(torch.int16)
    assert torch.equal(now[3], bits[1]) and torch.equal(now[0], bits[3])
    assert torch.equal(now[2], bits[2]) and (cache.tensor[1] == 7.0).all()
