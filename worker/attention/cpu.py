"""Attention on a CPU, by a C++ kernel that is compiled for each head dimension and dtype.

The kernel reads keys and values in place; paged.h documents the layout of a block. One table per
step describes all rows to the kernel.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everlift.hashes import BLOCK_SIZE
from worker.attention.backend import AttentionForm
from worker.device.kv_cache import KVCache
from worker.device.upload import Parcel
from worker.engine.plan import Rows
from worker.native import native

_SOURCE = Path(__file__).with_name("paged.cpp")
#: Largest work that one thread does alone: the number of key elements to write, and the number of
#: multiplications of queries by keys. Such work is done before other threads could take part, even
#: if they wait actively.
_MAX_SERIAL_WRITE = 1 << 11
_MAX_SERIAL_ATTEND = 1 << 18


_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class NativeCache(ctypes.Structure):
    _fields_ = (("blocks", _POINTER), ("layers", _INT), ("kv_heads", _INT))


class NativeStep(ctypes.Structure):
    _fields_ = (("rows", _POINTER), ("tables", _POINTER), ("num_rows", _INT), ("num_tiles", _INT))


class NativeForm(ctypes.Structure):
    _fields_ = (
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", _INT),
        ("sinks", _POINTER),
    )


class Kernel:
    """Functions of the compiled library for one head dimension and dtype."""

    def __init__(self, library: ctypes.CDLL) -> None:
        step = (ctypes.POINTER(NativeCache), ctypes.POINTER(NativeStep), _INT)
        self.write = library.write_paged
        self.write.argtypes = (*step, _POINTER, _INT, _POINTER, _INT, _INT)
        self.write.restype = None
        self.attend = library.attend_paged
        self.attend.argtypes = (
            *step,
            _POINTER,
            _INT,
            _POINTER,
            _INT,
            ctypes.POINTER(NativeForm),
            _INT,
        )
        self.attend.restype = None
        self.tile_tokens = int(library.tile_tokens())


@cache
def compiled_kernel(head_dim: int, dtype: torch.dtype, *flags: str) -> Kernel | None:
    """Return the compiled kernel, or None if it cannot be compiled.

    The cause of a failure is logged. ``flags`` are additional compiler flags.
    """
    library = native.compiled(_SOURCE, (*kernel_flags(head_dim, dtype), *flags))
    return None if library is None else Kernel(library)


def kernel_flags(head_dim: int, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the library's compiler flags for a head dimension and dtype."""
    return f"-DBLOCK_SIZE={BLOCK_SIZE}", f"-DHEAD_DIM={head_dim}", f"-D{native.DTYPES[dtype]}"


class CpuAttention:
    """AttentionBackend for CPUs; ``kernel`` must match the cache's head dimension and dtype."""

    name = "CpuAttention"

    def __init__(self, cache: KVCache, kernel: Kernel) -> None:
        self._tensor = cache.tensor
        self._kernel = kernel
        layers = cache.tensor.shape[1]
        self._cache = NativeCache(cache.tensor.data_ptr(), layers, cache.kv_heads)

    def prepare(self, rows: Rows, parcel: Parcel | None = None) -> CpuStep:
        return CpuStep(self._kernel, self._cache, rows)


class CpuStep:
    """StepAttention of CpuAttention."""

    def __init__(self, kernel: Kernel, cache: NativeCache, rows: Rows) -> None:
        self.kernel = kernel
        self.cache = cache
        self._threads = torch.get_num_threads()
        self._rows = rows
        tiles = (rows.counts + (kernel.tile_tokens - 1)) // kernel.tile_tokens
        ends = tiles.cumsum()
        #: table of rows; the kernel reads it, so it must live as long as the step
        self._table = np.empty((len(rows), 5), np.int64)
        self._table[:, 0] = rows.firsts
        self._table[:, 1] = rows.counts
        self._table[:, 2] = rows.starts
        self._table[:, 3] = rows.slots * rows.tables.shape[1]
        self._table[:, 4] = ends - tiles
        assert rows.tables.flags.c_contiguous
        self.step = NativeStep(
            _address(self._table), _address(rows.tables), len(rows), int(ends[-1])
        )

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        key, value = _contiguous_tokens(key), _contiguous_tokens(value)
        self.kernel.write(
            self.cache,
            self.step,
            layer,
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            self._threads_for(key.numel(), _MAX_SERIAL_WRITE),
        )

    def attend(self, layer: int, query: Tensor, form: AttentionForm) -> Tensor:
        query = _contiguous_tokens(query)
        out = torch.empty(query.shape, dtype=query.dtype)
        sinks = None if form.sinks is None else form.sinks.float()
        self.kernel.attend(
            self.cache,
            self.step,
            layer,
            query.data_ptr(),
            query.stride(0),
            out.data_ptr(),
            query.shape[1],
            native_form(form, sinks),
            self._threads_for(self._num_pairs() * query[0].numel(), _MAX_SERIAL_ATTEND),
        )
        return out

    def _num_pairs(self) -> int:
        return int(self._rows.counts @ (self._rows.starts + self._rows.counts))

    def _threads_for(self, work: int, max_serial: int) -> int:
        return 1 if work <= max_serial else self._threads


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def native_form(form: AttentionForm, sinks: Tensor | None) -> NativeForm:
    """Return ``form`` as a structure of the kernel.

    ``sinks`` are the form's sinks in fp32, or None; they must live as long as the structure.
    """
    return NativeForm(
        form.scale,
        form.softcap or 0.0,
        form.window or 0,
        None if sinks is None else sinks.data_ptr(),
    )


def _contiguous_tokens(heads: Tensor) -> Tensor:
    """Return ``heads`` [tokens, heads, head_dim], copied if a token's heads are not contiguous."""
    head_dim = heads.shape[2]
    return heads if heads.stride()[1:] == (head_dim, 1) else heads.contiguous()
