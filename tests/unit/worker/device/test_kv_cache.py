"""Memory layout of the KV cache."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from everlift.hashes import BLOCK_SIZE
from worker.device.kv_cache import KVCache, block_bytes

CPU = torch.device("cpu")


def test_kv_block_is_contiguous_over_layers() -> None:
    cache = KVCache(5, 3, 2, 8, torch.bfloat16, CPU)
    assert cache.num_blocks == 5
    assert cache.tensor.shape == (5, 3, 2, 2, BLOCK_SIZE, 8)
    assert cache.tensor[1].is_contiguous()
    assert cache.tensor[0].nbytes == block_bytes(3, 2, 8, torch.bfloat16) == 3 * 2 * 2 * 32 * 8 * 2


def test_kv_layer_is_view_of_cache() -> None:
    cache = KVCache(2, 3, 1, 4, torch.float32, CPU)
    cache.tensor.zero_()
    cache.layer(1)[0, 1, 0, 31] = torch.arange(4.0)
    assert cache.tensor[0, 1, 1, 0, 31].tolist() == [0, 1, 2, 3]
    assert cache.tensor.sum() == 6


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory comes as it is written to")
def test_kv_cache_prefaults_pages_and_keeps_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.device.kv_cache._PREFAULT_BYTES", 64 << 20)
    cache = KVCache(128, 4, 8, 128, torch.float32, CPU)
    cache.tensor[10].fill_(5)
    before = _resident_bytes()
    cache.prefault().join()
    assert 0.9 * (62 << 20) < _resident_bytes() - before < 1.1 * (62 << 20)
    assert (cache.tensor[10] == 5).all()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
