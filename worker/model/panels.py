"""Weights in panels (panels.cpp), the layout with the fastest products on most CPUs (``pays``).

A weight is packed in its own memory unless it is quantised to int8 or needs padding. The product of
a row has the same bits in any batch.
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
from worker.model.matrix import Packing, are_close
from worker.native import native

log = logs.get_logger(__name__)

_SOURCE = Path(__file__).with_name("panels.cpp")
#: With fewer multiplications, one thread finishes before the others have woken up.
_MIN_PARALLEL_SIZE = 1 << 18
#: Preprocessor macros of the weight types.
_WEIGHTS = {
    torch.float32: "WEIGHTS_FLOAT32",
    torch.bfloat16: "WEIGHTS_BFLOAT16",
    torch.int8: "WEIGHTS_INT8",
}
#: Number of outputs that are quantised at a time; it bounds the memory of their fp32 copy.
_QUANTISED_TOGETHER = 1024
#: Supported types of inputs and outputs.
_DTYPES = (torch.float32, torch.bfloat16)


class NativeLinear(ctypes.Structure):
    """Linear of panels.h: the addresses of a weight in panels and of its bias."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs")),
    )


class Panels:
    """Weight [outputs, inputs] in panels.

    ``panels`` has the elements of the weight; its number of outputs is rounded up to whole panels,
    its number of inputs to whole 32-bit words. An int8 weight has ``scales`` [outputs].
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        dtype: torch.dtype,
        panels: Tensor,
        outputs: int,
        inputs: int,
        scales: Tensor | None = None,
    ) -> None:
        """Create the weight; ``dtype`` is the type of its inputs and outputs."""
        self.library = library
        self._panels = panels
        self._dtype = dtype
        self._scales = scales
        self.dtype = panels.dtype
        self.address = panels.data_ptr()
        self.scales_address = None if scales is None else scales.data_ptr()
        self.outputs = outputs
        self.inputs = inputs

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = self._input(x)
        y = x.new_empty(len(x), self.outputs)
        self.library.multiply(
            x.data_ptr(),
            self.address,
            self.scales_address,
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            *self._size(x),
        )
        return y

    def multiply_to_fp32(self, x: Tensor) -> Tensor:
        x = self._input(x)
        y = torch.empty(len(x), self.outputs)
        self.library.multiply_to_fp32(
            x.data_ptr(), self.address, self.scales_address, y.data_ptr(), *self._size(x)
        )
        return y

    def rows(self, ids: Tensor) -> Tensor:
        ids = ids.contiguous()
        out = torch.empty(len(ids), self.inputs, dtype=self._dtype)
        size = len(ids), self.inputs
        threads = _num_threads(math.prod(size))
        self.library.look_up(
            self.address, self.scales_address, ids.data_ptr(), out.data_ptr(), *size, threads
        )
        return out

    def native(self, bias: Tensor | None) -> NativeLinear:
        """Return the structure for C++; it is valid as long as this weight and ``bias`` exist."""
        address = None if bias is None else bias.data_ptr()
        return NativeLinear(self.address, self.scales_address, address, self.outputs, self.inputs)

    def _input(self, x: Tensor) -> Tensor:
        assert x.dtype == self._dtype and x.shape[1] == self.inputs
        return x.contiguous()

    def _size(self, x: Tensor) -> tuple[int, int, int, int]:
        size = len(x), self.outputs, self.inputs
        return *size, _num_threads(math.prod(size))


class PanelPacking:
    """Packing of weights into panels of type ``weights``, for inputs and outputs of ``dtype``."""

    supports_rows = True

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, weights: torch.dtype) -> None:
        pointer, size, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        library.width.restype = size
        library.pack.argtypes = (pointer, size, size, count)
        library.multiply.argtypes = (*[pointer] * 5, *[size] * 3, count)
        library.multiply_to_fp32.argtypes = (*[pointer] * 4, *[size] * 3, count)
        library.look_up.argtypes = (*[pointer] * 4, *[size] * 2, count)
        functions = library.pack, library.multiply, library.multiply_to_fp32, library.look_up
        for function in functions:
            function.restype = None
        self._library = library
        self._dtype = dtype
        self._weights = weights
        #: whether to pack an embedding that is only looked up and never multiplied with
        self.packs_embeddings = weights == torch.int8
        #: outputs in a panel
        self.width = int(library.width())

    def of_experts(self) -> Packing:
        return self

    def pack(self, weight: Tensor) -> Panels:
        """Return ``weight`` in panels; may overwrite ``weight``, which must not be used afterwards.

        For panels of int8, a weight of any float type is quantised into new memory. New memory is
        also used if the weight must be padded: its outputs must fill whole panels, and its inputs
        whole 32-bit words.
        """
        outputs, inputs = weight.shape
        scales = None
        if self._weights == torch.int8:
            weight, scales = quantised(weight)
        assert weight.dtype == self._weights
        padding = -inputs % (4 // weight.itemsize), -outputs % self.width
        panels = functional.pad(weight, (0, padding[0], 0, padding[1])) if any(padding) else weight
        self._library.pack(panels.data_ptr(), *panels.shape, torch.get_num_threads())
        return Panels(self._library, self._dtype, panels, outputs, inputs, scales)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``weight`` [outputs, inputs] in int8 and its scales [outputs] in fp32.

    The scale of an output is its largest magnitude divided by 127, or 1 if all its weights are 0.
    """
    numbers = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for first in range(0, len(weight), _QUANTISED_TOGETHER):
        part = slice(first, first + _QUANTISED_TOGETHER)
        exact = weight[part].float()
        largest = exact.abs().amax(dim=1, keepdim=True)
        scale = torch.where(largest > 0, largest / 127, 1.0)
        numbers[part] = (exact / scale).round_().to(torch.int8)
        scales[part] = scale[:, 0]
    return numbers, scales


def panel_flags(dtype: torch.dtype, weights: torch.dtype) -> tuple[str, ...]:
    """Return the compiler flags for inputs and outputs of ``dtype`` and weights of ``weights``."""
    return f"-D{native.DTYPES[dtype]}", f"-D{_WEIGHTS[weights]}"


def panel_packing(dtype: torch.dtype, weights: torch.dtype) -> PanelPacking | None:
    """Return the packing into panels, or None if panels are not the fastest layout or do not work.

    If panels would be the fastest layout but do not work, the cause is logged.
    """
    return working_panels(dtype, weights) if pays(dtype, weights) else None


@cache
def working_panels(dtype: torch.dtype, weights: torch.dtype) -> PanelPacking | None:
    """Return the packing into panels, or None if panels do not support these types or do not work.

    If panels support the types but do not work, the cause is logged.
    """
    if not _are_supported(dtype, weights):
        return None
    library = native.compiled(_SOURCE, panel_flags(dtype, weights))
    if library is None:
        return None
    packing = PanelPacking(library, dtype, weights)
    if not _is_right(packing, dtype, weights):
        log.warning("panel kernels give wrong results: using slower code")
        return None
    return packing


def pays(dtype: torch.dtype, weights: torch.dtype) -> bool:
    """Return whether panels are the fastest layout for these types on this CPU.

    On a CPU with AMX, oneDNN multiplies bfloat16 faster.
    """
    return _are_supported(dtype, weights) and (dtype != torch.bfloat16 or not native.has_amx())


def _are_supported(dtype: torch.dtype, weights: torch.dtype) -> bool:
    return dtype in _DTYPES and weights in _WEIGHTS


def _is_right(packing: PanelPacking, dtype: torch.dtype, weights: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = packing.width + 20, 97
    x, bias = (torch.randn(s, generator=generator).to(dtype) for s in ((13, inputs), (outputs,)))
    weight = torch.randn(outputs, inputs, generator=generator)
    if weights == torch.int8:
        numbers, scales = quantised(weight)
        panels, weight = packing.pack(weight), numbers * scales[:, None]
    else:
        weight = weight.to(weights)
        panels = packing.pack(weight.clone())
    expected = functional.linear(x, weight.to(dtype), bias)
    return all(
        are_close(panels.multiply(x[:n], bias), expected[:n], inputs) for n in range(1, len(x) + 1)
    )


def _num_threads(multiplications: int) -> int:
    return 1 if multiplications < _MIN_PARALLEL_SIZE else torch.get_num_threads()
