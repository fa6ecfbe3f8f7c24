"""Memory for KV blocks on the host.

Torch allocates page-locked memory in powers of two: one piece of 5,000 MiB would take 8,192 MiB.
Page-locked memory, which is used with a GPU, is therefore allocated in pieces that are slightly
smaller than a power of two. For example, 1000 blocks of 5 MiB are in 11 pieces: 4 of 1 GiB with 204
blocks each, and 7 smaller ones with 102 blocks (512 MiB), 51 (256 MiB), 25 (128 MiB), 3, 1, 1 and 1
blocks. Other memory is one piece.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

_LARGEST_PIECE = 1 << 30


class HostBlocks:
    """Host memory for ``num_blocks`` blocks with the shape and type of ``block``.

    The memory is page-locked if ``block`` is on a GPU.
    """

    def __init__(
        self, block: Tensor, num_blocks: int, allocate: Callable[..., Tensor] = torch.empty
    ) -> None:
        sizes = piece_sizes(num_blocks, block.nbytes) if block.is_cuda else [num_blocks]
        self._pieces = [
            allocate((size, *block.shape), dtype=block.dtype, pin_memory=block.is_cuda)
            for size in sizes
        ]
        #: index of each piece's first block, followed by the number of all blocks
        self._firsts = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, number: int) -> Tensor:
        piece = bisect_right(self._firsts, number) - 1
        return self._pieces[piece][number - self._firsts[piece]]


def piece_sizes(num_blocks: int, block_bytes: int) -> list[int]:
    """Return the number of blocks of each piece of memory; their sum is ``num_blocks``.

    Each piece has as many blocks as fit into the largest power of two of bytes that is at most
    _LARGEST_PIECE and at most the size of the remaining blocks, but at least one block.
    """
    sizes = []
    while num_blocks:
        room = _power_of_two_within(min(num_blocks * block_bytes, _LARGEST_PIECE))
        sizes.append(max(1, room // block_bytes))
        num_blocks -= sizes[-1]
    return sizes


def _power_of_two_within(count: int) -> int:
    return 1 << (count.bit_length() - 1)
