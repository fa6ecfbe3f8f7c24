"""The paged KV cache of one rank: one tensor, and a block is one contiguous run of it.

    [blocks, layers, 2 (key, value), kv_heads, BLOCK_SIZE, head_dim]

What the bytes inside a block's layer mean belongs to the attention backend; which sequence owns
which block, to the scheduler.
"""

from __future__ import annotations

import math

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


def _block_shape(num_layers: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    return num_layers, 2, kv_heads, BLOCK_SIZE, head_dim
