"""Weights in panels (panels.cpp): bfloat16, for a CPU that multiplies it by AVX-512.

Packing takes a weight's own memory. A row's product is the same in any batch.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from everlift import logs
from worker.model.matrix import agree
from worker.native import native

log = logs.get_logger(__name__)

_SOURCE = Path(__file__).with_name("panels.cpp")
#: Outputs in a panel.
WIDTH = 64
#: Multiplications that one thread does in the time that the others take to wake up.
_ALONE = 1 << 18


class Panels:
    """A weight [outputs, inputs]: ``panels`` [outputs rounded up, inputs] has its memory."""

    def __init__(self, library: ctypes.CDLL, panels: Tensor, outputs: int) -> None:
        self._library = library
        self._panels = panels
        self.address = panels.data_ptr()
        self.outputs = outputs
        self.inputs = panels.shape[1]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = self._input(x)
        y = x.new_empty(len(x), self.outputs)
        self._library.multiply(
            x.data_ptr(),
            self.address,
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            *self._size(x),
        )
        return y

    def multiply_to_fp32(self, x: Tensor) -> Tensor:
        x = self._input(x)
        y = torch.empty(len(x), self.outputs)
        self._library.multiply_to_fp32(x.data_ptr(), self.address, y.data_ptr(), *self._size(x))
        return y

    def rows(self, ids: Tensor) -> Tensor:
        pairs = self._panels.view(torch.int32).view(-1, self.inputs // 2, WIDTH)
        return pairs[ids // WIDTH, :, ids % WIDTH].view(torch.bfloat16)

    def _input(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16 and x.shape[1] == self.inputs
        return x.contiguous()

    def _size(self, x: Tensor) -> tuple[int, int, int, int]:
        size = len(x), self.outputs, self.inputs
        return *size, _num_threads(math.prod(size))


class PanelPacking:
    keeps_rows = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def pack(self, weight: Tensor) -> Panels | None:
        """None where the inputs make no pairs. It takes more memory than ``weight`` has only where
        its outputs fill no whole number of panels."""
        outputs, inputs = weight.shape
        if inputs % 2:
            return None
        panels = functional.pad(weight, (0, 0, 0, -outputs % WIDTH)) if outputs % WIDTH else weight
        self._library.pack(panels.data_ptr(), len(panels), inputs, torch.get_num_threads())
        return Panels(self._library, panels, outputs)


@cache
def panel_packing() -> PanelPacking | None:
    """None where it does not pay or cannot be; the log says if it should have been."""
    if not pays():
        return None
    library = native.compiled(_SOURCE)
    if library is None:
        return None
    pointer, size, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.pack.argtypes = (pointer, size, size, count)
    library.multiply.argtypes = (*[pointer] * 4, *[size] * 3, count)
    library.multiply_to_fp32.argtypes = (*[pointer] * 3, *[size] * 3, count)
    for function in (library.pack, library.multiply, library.multiply_to_fp32):
        function.restype = None
    packing = PanelPacking(library)
    if not _is_right(packing):
        log.warning("products in panels are wrong: slower code is used")
        return None
    return packing


def pays() -> bool:
    """AMX, where it is, does more than AVX-512, and oneDNN uses it."""
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16")) and not features.get("amx_bf16")


def _is_right(packing: PanelPacking) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = ((13, 96), (WIDTH + 20, 96), (WIDTH + 20,))
    x, weight, bias = (torch.randn(s, generator=generator).to(torch.bfloat16) for s in shapes)
    panels = packing.pack(weight.clone())
    return panels is not None and all(
        agree(panels.multiply(x[:n], bias), functional.linear(x[:n], weight, bias), x.shape[1])
        for n in range(1, len(x) + 1)
    )


def _num_threads(multiplications: int) -> int:
    return 1 if multiplications < _ALONE else torch.get_num_threads()
