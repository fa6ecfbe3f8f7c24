"""The paged KV cache of one rank: one tensor, in which each block is contiguous.

    [blocks, layers, 2 (key, value), kv_heads, BLOCK_SIZE, head_dim]

The attention backend may arrange the elements of a head's keys or values of a block in another
order. The scheduler decides which sequence owns which block.
"""

from __future__ import annotations

import math
import sys
import threading

import torch
from torch import Tensor

from everlift.hashes import BLOCK_SIZE
from worker.device.huge_pages import advise, advise_huge_pages, whole_pages

#: Type of the elements of a cache in FP8: codes of e4m3 without a scale, which kernels decode.
FP8_CODES = torch.int8
#: Linux has had MADV_POPULATE_WRITE since 5.14; Python's mmap does not define it.
_MADV_POPULATE_WRITE = 23
#: Number of bytes whose pages one madvise call allocates: a huge page.
_PREFAULT_STEP_BYTES = 2 << 20
#: Number of bytes whose pages are allocated at the start, which takes 0.17 s of CPU time.
#: Allocating many more would slow down a batch that arrives at the same time
#: (benchmarks/RESULTS.md).
_PREFAULT_BYTES = 256 << 20


class KVCache:
    """KV cache of ``num_blocks`` uninitialised blocks, for the ``kv_heads`` heads of this rank."""

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, *_block_shape(num_layers, kv_heads, head_dim))
        self.kv_heads = kv_heads
        self.tensor = torch.empty(shape, dtype=dtype, device=device)
        # A sequence's blocks are scattered. With pages of 4 KiB, nearly every head of a block would
        # need an address translation of its own.
        advise_huge_pages(self.tensor)
        self.runs_per_block = num_layers * 2 * kv_heads
        #: [num_blocks * runs_per_block, BLOCK_SIZE * head_dim], a view: each row has one head's
        #: keys or values of one block in one layer
        self.runs = self.tensor.view(-1, BLOCK_SIZE * head_dim)

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[0]

    def prefault(self) -> threading.Thread:
        """Start a thread that makes the kernel allocate the cache's first memory pages; return it.

        The steps of the first requests then do not wait for these allocations. No content is
        changed, so the cache may be used meanwhile. Only for a cache in host memory.
        """
        thread = threading.Thread(
            target=_prefault, args=(self.tensor,), name="kv-cache-memory", daemon=True
        )
        thread.start()
        return thread

    def layer(self, index: int) -> Tensor:
        """Return a view [blocks, 2, kv_heads, BLOCK_SIZE, head_dim] of layer ``index``."""
        return self.tensor[:, index]


def block_bytes(num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of bytes of one block on one rank."""
    return math.prod(_block_shape(num_layers, kv_heads, head_dim)) * dtype.itemsize


def _prefault(tensor: Tensor) -> None:
    """Make the kernel allocate the memory pages of the first ``_PREFAULT_BYTES`` of ``tensor``.

    Each madvise call allocates ``_PREFAULT_STEP_BYTES``, so that other threads can allocate memory
    between two calls. Stops at the first call that the kernel refuses, and thus does nothing if the
    kernel does not support MADV_POPULATE_WRITE. Does nothing on other systems than Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    pages = whole_pages(tensor)[:_PREFAULT_BYTES]
    for begin in pages[::_PREFAULT_STEP_BYTES]:
        if not advise(begin, min(_PREFAULT_STEP_BYTES, pages.stop - begin), _MADV_POPULATE_WRITE):
            return


def _block_shape(num_layers: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    return num_layers, 2, kv_heads, BLOCK_SIZE, head_dim
