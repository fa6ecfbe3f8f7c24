"""The paged KV cache of one rank: one tensor, and a block is one contiguous run of it.

    [blocks, layers, 2 (key, value), kv_heads, BLOCK_SIZE, head_dim]

What the bytes inside a block's layer mean belongs to the attention backend; which sequence owns
which block, to the scheduler.
"""

from __future__ import annotations

import ctypes
import math
import mmap

import torch
from torch import Tensor

from everlift.blockhash import BLOCK_SIZE


class KVCache:
    """``num_blocks`` blocks with no meaning yet; ``kv_heads`` are this rank's own."""

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
        if device.type == "cpu":
            _ask_for_huge_pages(self.tensor)
        self.runs_per_block = num_layers * 2 * kv_heads
        #: [num_blocks * runs_per_block, BLOCK_SIZE * head_dim], a view: each row is one head's keys
        #: or values of one block in one layer
        self.runs = self.tensor.view(-1, BLOCK_SIZE * head_dim)

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[0]

    def layer(self, index: int) -> Tensor:
        """A view [blocks, 2, kv_heads, BLOCK_SIZE, head_dim] of one layer."""
        return self.tensor[:, index]


def block_bytes(num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes on one rank."""
    return math.prod(_block_shape(num_layers, kv_heads, head_dim)) * dtype.itemsize


def _ask_for_huge_pages(tensor: Tensor) -> None:
    """Where the system has them: a sequence's blocks lie anywhere, and with pages of 4 KiB the CPU
    looks up nearly every head of a block anew. They are only taken as they are written to."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    past_page = -tensor.data_ptr() % mmap.PAGESIZE
    whole_pages = (tensor.nbytes - past_page) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole_pages > 0:
        begin = ctypes.c_void_p(tensor.data_ptr() + past_page)
        ctypes.CDLL(None).madvise(begin, ctypes.c_size_t(whole_pages), mmap.MADV_HUGEPAGE)


def _block_shape(num_layers: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    return num_layers, 2, kv_heads, BLOCK_SIZE, head_dim
