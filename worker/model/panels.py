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
from worker.device.huge_pages import advise_huge_pages
from worker.model.matrix import Packing, are_close
from worker.model.quantised import Block, Quantised
from worker.model.weight_format import CodeType, WeightFormat
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
#: Preprocessor macros of the types of a quantised checkpoint's codes.
_CODES: dict[CodeType, str] = {
    "int8": "QUANTISED_INT8",
    "int4": "QUANTISED_INT4",
    "e4m3": "QUANTISED_E4M3",
    "e2m1": "QUANTISED_E2M1",
}
#: Numbers of the types of scales in C++.
_SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Number of outputs that are quantised at a time; it bounds the memory of their fp32 copy.
_QUANTISED_TOGETHER = 1024
#: Supported types of inputs and outputs.
_DTYPES = (torch.float32, torch.bfloat16)


class NativeGroups(ctypes.Structure):
    """Struct ``Groups`` of quantised.h; all zeros for a weight that is not quantised."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("number", "inputs", "first", "length", "words")),
        ("scales", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("scale_type", "columns")),
        *((name, ctypes.c_void_p) for name in ("column", "zeros")),
        ("zero_bytes", ctypes.c_int64),
    )


class NativeLinear(ctypes.Structure):
    """Struct ``Linear`` of panels.h: the addresses of a weight in panels and of its bias."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs")),
        ("groups", NativeGroups),
    )


class Panels:
    """Weight [outputs, inputs] in panels.

    ``panels`` has the elements of the weight; its number of outputs is rounded up to whole panels,
    its number of inputs to whole 32-bit words. An int8 weight has ``scales`` [outputs]. The weight
    of a quantised checkpoint has ``quantised``, whose values are in panels.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        dtype: torch.dtype,
        panels: Tensor,
        outputs: int,
        inputs: int,
        scales: Tensor | None = None,
        quantised: Quantised | None = None,
    ) -> None:
        """Create the weight; ``dtype`` is the type of its inputs and outputs."""
        #: keeps the tensors alive that ``_groups`` points to
        self._quantised = quantised
        self._groups = NativeGroups() if quantised is None else _groups(quantised)
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
            ctypes.byref(self.native(bias)), x.data_ptr(), y.data_ptr(), len(x), self._threads(x)
        )
        return y

    def multiply_to_fp32(self, x: Tensor) -> Tensor:
        x = self._input(x)
        y = torch.empty(len(x), self.outputs)
        self.library.multiply_to_fp32(
            ctypes.byref(self.native(None)), x.data_ptr(), y.data_ptr(), len(x), self._threads(x)
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
        size = self.outputs, self.inputs
        return NativeLinear(self.address, self.scales_address, address, *size, self._groups)

    def _input(self, x: Tensor) -> Tensor:
        assert x.dtype == self._dtype and x.shape[1] == self.inputs
        return x.contiguous()

    def _threads(self, x: Tensor) -> int:
        return _num_threads(len(x) * self.outputs * self.inputs)


def _groups(weight: Quantised) -> NativeGroups:
    column, zeros, groups = weight.column, weight.zeros, weight.groups
    return NativeGroups(
        *(groups.number, len(groups.places), groups.first, groups.length, groups.words),
        weight.scales.data_ptr(),
        _SCALES[weight.scales.dtype],
        weight.scales.shape[1],
        None if column is None else column.data_ptr(),
        None if zeros is None else zeros.data_ptr(),
        0 if zeros is None else zeros.shape[1],
    )


class PanelPacking:
    """Packing of weights into ``Panels``, for inputs and outputs of type ``dtype``.

    ``weights`` is the type of the elements in the panels that ``pack`` returns. ``codes`` is the
    type of the codes of the quantised weights that ``pack_quantised`` takes, or None if no
    quantised weights are packed.
    """

    supports_rows = True
    by_kernels = False

    def __init__(
        self,
        library: ctypes.CDLL,
        dtype: torch.dtype,
        weights: torch.dtype,
        codes: CodeType | None = None,
    ) -> None:
        pointer, size, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        library.width.restype = size
        library.pack.argtypes = (pointer, size, size, count)
        library.multiply.argtypes = (*[pointer] * 3, size, count)
        library.multiply_to_fp32.argtypes = (*[pointer] * 3, size, count)
        library.look_up.argtypes = (*[pointer] * 4, *[size] * 2, count)
        functions = library.pack, library.multiply, library.multiply_to_fp32, library.look_up
        for function in functions:
            function.restype = None
        self._library = library
        self._dtype = dtype
        self._weights = weights
        self._codes = codes
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
        padded = outputs + -outputs % self.width, inputs + -inputs % (4 // weight.itemsize)
        panels = weight if padded == weight.shape else _padded(weight, *padded)
        self._pack_words(panels)
        return Panels(self._library, self._dtype, panels, outputs, inputs, scales)

    def pack_quantised(self, weight: Quantised) -> Panels:
        """Return panels in the memory of ``weight``, which must not be used afterwards."""
        assert weight.format.codes == self._codes
        self._pack_words(weight.values)
        size = weight.outputs, weight.inputs
        return Panels(self._library, self._dtype, weight.values, *size, quantised=weight)

    def _pack_words(self, weight: Tensor) -> None:
        outputs, words = len(weight), weight.shape[1] * weight.itemsize // 4
        self._library.pack(weight.data_ptr(), outputs, words, torch.get_num_threads())


def _padded(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    padded = weight.new_empty(outputs, inputs)
    advise_huge_pages(padded)
    padded[: len(weight), : weight.shape[1]] = weight
    padded[len(weight) :] = 0
    padded[:, weight.shape[1] :] = 0
    return padded


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``weight`` [outputs, inputs] in int8 and its scales [outputs] in fp32.

    The scale of an output is its largest magnitude divided by 127, or 1 if all its weights are 0.
    """
    numbers = torch.empty(weight.shape, dtype=torch.int8)
    advise_huge_pages(numbers)
    scales = torch.empty(len(weight))
    for first in range(0, len(weight), _QUANTISED_TOGETHER):
        part = slice(first, first + _QUANTISED_TOGETHER)
        exact = weight[part].float()
        largest = exact.abs().amax(dim=1, keepdim=True)
        scale = torch.where(largest > 0, largest / 127, 1.0)
        numbers[part] = (exact / scale).round_().to(torch.int8)
        scales[part] = scale[:, 0]
    return numbers, scales


def panel_flags(
    dtype: torch.dtype, weights: torch.dtype, codes: CodeType | None = None
) -> tuple[str, ...]:
    """Return the compiler flags for panels with these types.

    ``dtype`` is the type of inputs and outputs, and ``weights`` that of the weights in panels.
    ``codes`` is the type of the codes if there are quantised weights too.
    """
    quantised = () if codes is None else (f"-D{_CODES[codes]}",)
    return f"-D{native.DTYPES[dtype]}", f"-D{_WEIGHTS[weights]}", *quantised


def panel_packing(
    dtype: torch.dtype, weights: torch.dtype, codes: CodeType | None = None
) -> PanelPacking | None:
    """Return the packing into panels, or None if panels are not the fastest layout or do not work.

    If panels would be the fastest layout but do not work, the cause is logged.
    """
    return working_panels(dtype, weights, codes) if pays(dtype, weights, codes) else None


@cache
def working_panels(
    dtype: torch.dtype, weights: torch.dtype, codes: CodeType | None = None
) -> PanelPacking | None:
    """Return the packing into panels, or None if panels do not support these types or do not work.

    If panels support the types but do not work, the cause is logged.
    """
    if not _are_supported(dtype, weights):
        return None
    library = native.compiled(_SOURCE, panel_flags(dtype, weights, codes))
    if library is None:
        return None
    packing = PanelPacking(library, dtype, weights, codes)
    works = _is_right(packing, dtype, weights)
    if not works or (codes is not None and not _multiplies_codes(packing, dtype, codes)):
        log.warning("panel kernels give wrong results: using slower code")
        return None
    return packing


def pays(dtype: torch.dtype, weights: torch.dtype, codes: CodeType | None = None) -> bool:
    """Return whether panels are the fastest layout for these types on this CPU.

    The result is False if panels do not support the types. A CPU with AMX multiplies bfloat16
    faster with oneDNN, which cannot multiply the codes of quantised weights.
    """
    is_fastest = codes is not None or dtype != torch.bfloat16 or not native.has_amx()
    return _are_supported(dtype, weights) and is_fastest


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


def _multiplies_codes(packing: PanelPacking, dtype: torch.dtype, codes: CodeType) -> bool:
    """Return whether products with a random quantised weight are close to those of torch."""
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = packing.width + 20, 97
    zeros = codes == "int4"
    format = WeightFormat("trial", codes, "elements", 32, 1, zeros, scale_type="F16")
    block = Block("trial", (outputs, inputs), range(outputs), range(inputs), outputs)
    weight = Quantised(format, [block], inputs, dtype, torch.device("cpu"))
    # No code of e4m3 is NaN without the highest bit of the exponent.
    mask = 0xBF if codes == "e4m3" else 0xFF
    for bytes_ in (weight.values, weight.zeros):
        if bytes_ is not None:
            bytes_.random_(256, generator=generator).bitwise_and_(mask)
    weight.scales.uniform_(0.5, 1.5, generator=generator)
    x = torch.randn(13, inputs, generator=generator).to(dtype)
    expected = functional.linear(x.float(), weight.dequantised()).to(dtype)
    panels = packing.pack_quantised(weight)
    return all(
        are_close(panels.multiply(x[:n], None), expected[:n], inputs) for n in range(1, len(x) + 1)
    )


def _num_threads(multiplications: int) -> int:
    return 1 if multiplications < _MIN_PARALLEL_SIZE else torch.get_num_threads()
