"""Pointwise operations of a layer on a CPU, in C++ (pointwise.cpp).

torch needs several calls for each operation, and every call wakes the threads of its pool again.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from worker.kernels.trial import kernels_work
from worker.model.pointwise import TORCH, Pointwise, TorchPointwise
from worker.model.rope import Angle
from worker.model.spec import Activation
from worker.native import native

_SOURCE = Path(__file__).with_name("pointwise.cpp")
#: Numbers of the activations in pointwise.h.
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu": 2, "gpt_oss": 3}
#: With fewer elements, one thread finishes before a second one would have started.
_MIN_PARALLEL_SIZE = 1 << 14


class CompiledPointwise(TorchPointwise):
    """Pointwise operations in C++, for tensors of type ``dtype`` on a CPU."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype = dtype
        pointer, size, number, count = (
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_float,
            ctypes.c_int,
        )
        self._norm = library.sum_and_norm
        self._norm.argtypes = (*[pointer] * 4, size, size, number, number, count)
        self._gate = library.gate
        self._gate.argtypes = (count, pointer, pointer, size, size, count)
        self._rotate = library.rotate
        self._rotate.argtypes = (pointer, size, pointer, pointer, *[size] * 4, count)
        for function in (self._norm, self._gate, self._rotate):
            function.restype = None

    def norm(
        self, x: Tensor, weight: Tensor, eps: float, add_one: bool, added: Tensor | None = None
    ) -> Tensor:
        width = len(weight)
        assert weight.dtype == self._dtype and x.shape[-1] == width
        if added is None:
            x = self._contiguous(x)
        else:
            assert x.is_contiguous() and added.is_contiguous() and x.shape == added.shape
            assert x.dtype == added.dtype == self._dtype
        out = torch.empty_like(x)
        self._norm(
            x.data_ptr(),
            None if added is None else added.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // width,
            width,
            eps,
            float(add_one),
            _num_threads(x.numel()),
        )
        return out

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate_up = self._contiguous(gate_up)
        tokens, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, width)
        self._gate(
            ACTIVATIONS[activation],
            gate_up.data_ptr(),
            out.data_ptr(),
            tokens,
            width,
            _num_threads(4 * out.numel()),  # an exponential takes as long as a few additions
        )
        return out

    def rotate(self, heads: Tensor, angle: Angle) -> Tensor:
        """Rotate ``heads`` in place and return them."""
        cos, sin = angle
        tokens, number, head_dim = heads.shape
        assert heads.stride()[1:] == (head_dim, 1) and heads.dtype == self._dtype
        assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == torch.float32
        self._rotate(
            heads.data_ptr(),
            heads.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            tokens,
            number,
            head_dim,
            cos.shape[-1],
            _num_threads(heads.numel()),
        )
        return heads

    def _contiguous(self, x: Tensor) -> Tensor:
        assert x.dtype == self._dtype
        return x.contiguous()


def choose_pointwise(dtype: torch.dtype, device: torch.device) -> Pointwise:
    """Return Triton's operations on a GPU and C++ on a CPU, or torch's if these are unavailable."""
    if device.type == "cuda" and kernels_work(device):
        # Imported only for a GPU, because Triton may not be installed elsewhere.
        from worker.model.kernel_pointwise import KernelPointwise

        return KernelPointwise()
    return (_compiled(dtype) if device.type == "cpu" else None) or TORCH


@cache
def _compiled(dtype: torch.dtype) -> CompiledPointwise | None:
    library = native.compiled(_SOURCE, (f"-D{native.DTYPES[dtype]}",))
    return None if library is None else CompiledPointwise(library, dtype)


def _num_threads(elements: int) -> int:
    return 1 if elements < _MIN_PARALLEL_SIZE else torch.get_num_threads()
