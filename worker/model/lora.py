"""LoRA adapters in a linear layer: y += scaling * B (A x), with the matrices of each row's adapter.

One C++ call computes the rows of all adapters on a CPU, or the compiled decoder does so within its
own call (lora.h). A row then has the same bits in any batch, whichever adapters the other rows
have. torch computes one adapter after the other on a GPU, or if there is no compiled code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from worker.device.upload import upload
from worker.engine.plan import Ints
from worker.native import native

_SOURCE = Path(__file__).with_name("lora.cpp")
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
#: Padding of the matrices, as in lora.h: ranks and inputs of A, and outputs of B.
_PADDED_RANKS, _PADDED_INPUTS, _PANEL = 4, 16, 64


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Matrices of an adapter for consecutive outputs of a linear layer, the first being ``first``.

    ``a`` is [ranks, inputs] and ``b`` [outputs, ranks], where ``ranks`` is the LoRA rank.
    """

    a: Tensor
    b: Tensor
    scaling: float
    first: int = 0

    @property
    def ranks(self) -> int:
        return len(self.a)


class _Part(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("a", "b")),
        *((name, _SIZE) for name in ("ranks", "first", "outputs")),
        ("scaling", ctypes.c_float),
    )


class _Parts(ctypes.Structure):
    _fields_ = (("parts", _POINTER), ("number", _SIZE))


class NativeAdapters(ctypes.Structure):
    """Struct ``Linear`` of lora.h."""

    _fields_ = (
        ("adapters", _POINTER),
        *((name, _SIZE) for name in ("inputs", "outputs", "most_ranks", "most_panels")),
    )


class StepAdapters:
    """Adapters of a step's tokens: ``numbers`` [T] count from 1, and are 0 for the model itself."""

    def __init__(self, numbers: Ints, device: torch.device) -> None:
        self.numbers = torch.from_numpy(numbers)
        self._device = device

    @cached_property
    def rows(self) -> list[tuple[int, Tensor]]:
        """Number of each adapter in the step, and the indices of its tokens on the device."""
        numbers = sorted({*self.numbers.tolist()} - {0})
        return [
            (number, upload((self.numbers == number).nonzero()[:, 0], self._device))
            for number in numbers
        ]


@dataclass(frozen=True, slots=True, eq=False)
class PackedParts:
    """Matrices of one adapter for one linear layer, ready to be placed in a slot.

    ``parts`` has the matrices if there is no compiled code; otherwise ``native`` describes them to
    C++. ``ranks`` is the sum of the padded LoRA ranks of C++'s parts. ``panels`` is the number of
    their panels, which are 64 outputs of B each (lora.h). ``memory`` keeps alive what ``native``
    points to.
    """

    parts: Sequence[LowRank] = ()
    native: _Parts | None = None
    ranks: int = 0
    panels: int = 0
    memory: Sequence[object] = ()

    @property
    def num_bytes(self) -> int:
        """Size in bytes of ``parts``; 0 with compiled code, whose memory is not counted."""
        return sum(part.a.nbytes + part.b.nbytes for part in self.parts)


_EMPTY = PackedParts()


class LinearAdapters:
    """Slots for the matrices of adapters of one linear layer, or of this rank's share of it.

    There are ``num_slots`` slots, whose numbers count from 1. All are empty at first: an empty slot
    adds nothing. The matrices have the type ``dtype`` of the layer's inputs and outputs. An adapter
    has at most ``most_parts`` pairs of matrices.
    """

    def __init__(
        self,
        num_slots: int,
        inputs: int,
        outputs: int,
        most_parts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._library = lora_library(dtype) if device.type == "cpu" else None
        self._dtype, self._device = dtype, device
        self._most_parts, self._inputs, self._outputs = most_parts, inputs, outputs
        #: by number; number 0 is the model itself
        self._slots = [_EMPTY] * (num_slots + 1)
        self._described = (_Parts * (num_slots + 1))()
        #: structure for C++, valid as long as this object exists; None without compiled code
        self.native: NativeAdapters | None = None
        if self._library is not None:
            self.native = NativeAdapters(ctypes.addressof(self._described), inputs, outputs, 0, 0)

    @property
    def most_ranks(self) -> int:
        """Largest sum of the padded LoRA ranks of one adapter's parts, over all slots.

        C++ needs as many fp32 elements of work space for each token. The value is 0 without
        compiled code.
        """
        return 0 if self.native is None else int(self.native.most_ranks)

    def reserved_bytes(self, rank: int) -> int:
        """Return the bytes to reserve for adapters of LoRA rank ``rank`` in all slots.

        The adapters are assumed to change all outputs of the layer. The bytes of the adapters that
        the slots have are subtracted, except with compiled code.
        """
        largest = rank * (self._most_parts * self._inputs + self._outputs) * self._dtype.itemsize
        return sum(max(0, largest - slot.num_bytes) for slot in self._slots[1:])

    def pack(self, parts: Sequence[LowRank]) -> PackedParts:
        """Copy the matrices of an adapter into the layout of a slot. May run in any thread."""
        if self._library is not None:
            return _packed([_with_type(part, self._dtype) for part in parts])
        return PackedParts([_with_type(part, self._dtype) for part in parts])

    def place(self, number: int, packed: PackedParts | None) -> None:
        """Fill slot ``number``, or empty it if ``packed`` is None; call it between two steps."""
        packed = packed or _EMPTY
        if self.native is None:
            moved = [_moved(part, self._device) for part in packed.parts]
            self._slots[number] = PackedParts(moved)
            return
        self._described[number] = packed.native or _Parts()
        self._slots[number] = packed
        self.native.most_ranks = max(slot.ranks for slot in self._slots)
        self.native.most_panels = max(slot.panels for slot in self._slots)

    def add(self, step: StepAdapters, x: Tensor, y: Tensor) -> Tensor:
        """Add scaling * B (A x) of each token's adapter to ``y`` in place, and return ``y``.

        ``x`` is [T, inputs], and ``y`` is [T, outputs] and contiguous. ``step`` has the adapters of
        the tokens; the outputs of a token without an adapter are unchanged.
        """
        if self._library is None:
            for number, rows in step.rows:
                for part in self._slots[number].parts:
                    low = functional.linear(x[rows], part.a) * part.scaling
                    end = part.first + len(part.b)
                    y[rows, part.first : end] += functional.linear(low, part.b)
            return y
        x, number = x.contiguous(), len(x)
        assert y.is_contiguous() and len(step.numbers) == number
        memory = torch.empty(number * self.most_ranks)
        self._library.update(
            self.native,
            step.numbers.data_ptr(),
            number,
            x.data_ptr(),
            y.data_ptr(),
            memory.data_ptr(),
            torch.get_num_threads(),
        )
        return y


def _with_type(part: LowRank, dtype: torch.dtype) -> LowRank:
    return LowRank(part.a.to(dtype), part.b.to(dtype), part.scaling, part.first)


def _moved(part: LowRank, device: torch.device) -> LowRank:
    return LowRank(part.a.to(device), part.b.to(device), part.scaling, part.first)


def _packed(parts: Sequence[LowRank]) -> PackedParts:
    memory: list[object] = []
    array = (_Part * len(parts))(*(_packed_part(part, memory) for part in parts))
    memory.append(array)
    return PackedParts(
        native=_Parts(ctypes.addressof(array), len(parts)),
        ranks=sum(map(_padded_ranks, parts)),
        panels=sum(-(-len(part.b) // _PANEL) for part in parts),
        memory=memory,
    )


def _packed_part(part: LowRank, memory: list[object]) -> _Part:
    """Pack the matrices of ``part``, append them to ``memory``, and return the structure for C++.

    The structure is valid as long as the matrices in ``memory`` exist.
    """
    (ranks, inputs), outputs = part.a.shape, len(part.b)
    padding = 0, -inputs % _PADDED_INPUTS, 0, -ranks % _PADDED_RANKS
    a = functional.pad(part.a, padding).contiguous()
    b = functional.pad(part.b, (0, 0, 0, -outputs % _PANEL))
    b = b.view(-1, _PANEL, ranks).transpose(1, 2).contiguous()
    memory += [a, b]
    return _Part(a.data_ptr(), b.data_ptr(), ranks, part.first, outputs, part.scaling)


def _padded_ranks(part: LowRank) -> int:
    return part.ranks + -part.ranks % _PADDED_RANKS


@cache
def lora_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the compiled lora.cpp, or None, with the cause logged, if it cannot be compiled."""
    library = native.compiled(_SOURCE, lora_flags(dtype))
    if library is not None:
        pointers = ctypes.POINTER(NativeAdapters), _POINTER, _SIZE, _POINTER, _POINTER, _POINTER
        library.update.argtypes = (*pointers, ctypes.c_int)
        library.update.restype = None
    return library


def lora_flags(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the library's compiler flags for inputs and outputs of ``dtype``."""
    return (f"-D{native.DTYPES[dtype]}",)
