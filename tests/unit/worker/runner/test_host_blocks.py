"""Page-locked memory for KV blocks, with a stand-in for torch's allocator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from worker.runner.host_blocks import HostBlocks, piece_sizes

MIB = 1 << 20


def page_locked(num_bytes: int) -> int:
    """Return the bytes that torch's CachingHostAllocator takes for ``num_bytes``."""
    return 1 << (num_bytes - 1).bit_length()


def taken(sizes: list[int], block_bytes: int) -> int:
    return sum(page_locked(size * block_bytes) for size in sizes)


def test_host_block_pieces_are_just_below_powers_of_two() -> None:
    sizes = piece_sizes(1000, 5 * MIB)
    assert sizes == [204] * 4 + [102, 51, 25, 3, 1, 1, 1]
    assert page_locked(5000 * MIB) == 8192 * MIB
    assert taken(sizes, 5 * MIB) == 5032 * MIB


@given(st.integers(0, 100_000), st.integers(1, 40 * MIB))
def test_host_block_pieces_waste_less_than_one_block_each(
    num_blocks: int, block_bytes: int
) -> None:
    sizes = piece_sizes(num_blocks, block_bytes)
    assert sum(sizes) == num_blocks
    assert taken(sizes, block_bytes) <= (num_blocks + len(sizes)) * block_bytes
    assert len(sizes) <= 2 * num_blocks * block_bytes // (1 << 30) + 40


class Memory:
    """Allocator of ordinary memory in place of page-locked memory, which records sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, shape: tuple[int, ...], *, dtype: Any, pin_memory: bool) -> Tensor:
        assert pin_memory
        self.sizes.append(shape[0])
        return torch.empty(shape, dtype=dtype)


def test_host_blocks_have_separate_places() -> None:
    memory = Memory()
    block: Any = SimpleNamespace(is_cuda=True, nbytes=12, shape=(3,), dtype=torch.float32)
    blocks = HostBlocks(block, 23, memory)
    assert (len(blocks), memory.sizes) == (23, [21, 1, 1])
    for number in range(23):
        blocks[number].fill_(number)
    assert [blocks[number].tolist() for number in range(23)] == [[n] * 3 for n in range(23)]


@pytest.mark.parametrize("number", [5, 9])
def test_host_blocks_reject_index_beyond_last(number: int) -> None:
    with pytest.raises(IndexError):
        HostBlocks(torch.empty(3), 5)[number]
