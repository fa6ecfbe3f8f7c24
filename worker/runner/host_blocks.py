"""Room for KV blocks in the host's memory.

Torch takes page-locked memory in powers of two: 5,000 MiB in one piece would be 8,192. So it is
taken in pieces that are hardly less than one.

    1000 blocks of 5 MiB    204 in each of 4 GiB; then 102 (512 MiB), 51 (256), 25 (128), 3, 1, 1, 1
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

_LARGEST_PIECE = 1 << 30


class HostBlocks:
    """Host memory for ``num_blocks`` blocks, page-locked for a GPU."""

    def __init__(
        self, block: Tensor, num_blocks: int, allocate: Callable[..., Tensor] = torch.empty
    ) -> None:
        sizes = piece_sizes(num_blocks, block.nbytes) if block.is_cuda else [num_blocks]
        self._pieces = [
            allocate((size, *block.shape), dtype=block.dtype, pin_memory=block.is_cuda)
            for size in sizes
        ]
        #: of each piece, and the end
        self._firsts = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, number: int) -> Tensor:
        piece = bisect_right(self._firsts, number) - 1
        return self._pieces[piece][number - self._firsts[piece]]


def piece_sizes(num_blocks: int, block_bytes: int) -> list[int]:
    """Return the blocks of each piece: the most in a power of two of bytes, at least one."""
    sizes = []
    while num_blocks:
        room = _power_of_two_within(min(num_blocks * block_bytes, _LARGEST_PIECE))
        sizes.append(max(1, room // block_bytes))
        num_blocks -= sizes[-1]
    return sizes


def _power_of_two_within(count: int) -> int:
    return 1 << (count.bit_length() - 1)
