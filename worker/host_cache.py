"""Copies of KV blocks in the host's memory: where the blocks of preempted sequences wait.

    [places, layers, 2 (key, value), kv_heads, BLOCK_SIZE, head_dim]    as in kv_cache.py

Which place holds what is decided elsewhere (host_store.py); this only copies, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from worker.kv_cache import KVCache
from worker.plan import BlockCopy


class HostCache:
    """``num_blocks`` places for blocks of ``cache``, with no meaning yet.

    Both copies are ordered like all that the current stream computes. Neither waits for its end:
    page-locked memory lets a GPU copy on its own.
    """

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        self._device = cache.tensor
        self._host = torch.empty(
            (num_blocks, *cache.tensor.shape[1:]),
            dtype=cache.tensor.dtype,
            pin_memory=cache.tensor.is_cuda,
        )

    @property
    def num_blocks(self) -> int:
        return self._host.shape[0]

    def save(self, copies: Iterable[BlockCopy]) -> None:
        """Blocks to their places."""
        # One run of memory each: indexing many at once would copy them twice.
        for block, place in copies:
            self._host[place].copy_(self._device[block], non_blocking=True)

    def load(self, copies: Iterable[BlockCopy]) -> None:
        """Places to their blocks."""
        for block, place in copies:
            self._device[block].copy_(self._host[place], non_blocking=True)
