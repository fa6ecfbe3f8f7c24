"""Memory pages of tensors in host memory."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask the kernel to back a tensor with huge pages, if it is in host memory.

    A CPU that reads all weights in each step then needs fewer address translations. The request
    applies to pages that have not been written to yet. A kernel without huge pages ignores it.
    """
    if tensor.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        pages = whole_pages(tensor)
        advise(pages.start, len(pages), mmap.MADV_HUGEPAGE)


def whole_pages(tensor: Tensor) -> range:
    """Return the addresses of the pages that belong to ``tensor`` alone."""
    begin, size = tensor.data_ptr(), mmap.PAGESIZE
    return range(begin + -begin % size, (begin + tensor.nbytes) // size * size)


def advise(begin: int, size: int, advice: int) -> bool:
    """Call madvise(2) for ``size`` bytes from ``begin`` on; return whether it succeeded."""
    refused = ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
    return not refused
