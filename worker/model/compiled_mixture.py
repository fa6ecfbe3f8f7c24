"""Mixture of experts on a CPU, in one C++ call (mixture.h).

A loop over experts in Python makes several calls for each expert. All threads but one are idle
between the calls, and each call divides the panels of only one expert among the threads. A panel is
the packed weights of several outputs of a linear layer (panels.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from worker.model.compiled_pointwise import ACTIVATIONS
from worker.model.layers import ColumnLinear, RowLinear
from worker.model.mlp import Mlp
from worker.model.panels import NativeLinear, Panels
from worker.model.spec import Experts

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Expert(ctypes.Structure):
    _fields_ = (("gate_up", NativeLinear), ("down", NativeLinear))


class NativeMixture(ctypes.Structure):
    """Struct ``Mixture`` of mixture.h."""

    _fields_ = (
        ("router", NativeLinear),
        ("experts", _POINTER),
        *((name, _SIZE) for name in ("number", "top_k", "normalised", "activation")),
    )


class CompiledMixture:
    """Router and experts in panels; a call returns this rank's part of their result."""

    def __init__(self, form: Experts, router: ColumnLinear, experts: Sequence[Mlp]) -> None:
        panels = router.weight.form
        assert isinstance(panels, Panels)
        library = panels.library
        self._mix = library.mix
        native = ctypes.POINTER(NativeMixture)
        self._mix.argtypes = (native, _POINTER, _POINTER, _SIZE, _POINTER, ctypes.c_int)
        self._mix.restype = None
        self._bytes = library.mixture_bytes
        self._bytes.argtypes = (native, _SIZE)
        self._bytes.restype = _SIZE
        #: keeps the tensors alive that the structures point to
        self._parts = router, experts
        self._experts = (_Expert * len(experts))(
            *(
                _Expert(native_linear(expert.gate_up), native_linear(expert.down))
                for expert in experts
            )
        )
        self.native = NativeMixture(
            router=native_linear(router),
            experts=ctypes.addressof(self._experts),
            number=form.number,
            top_k=form.top_k,
            normalised=form.normalised,
            activation=ACTIVATIONS[experts[0].activation],
        )

    def __call__(self, x: Tensor) -> Tensor:
        x, tokens = x.contiguous(), len(x)
        out = torch.empty_like(x)
        memory = torch.empty(self.num_bytes(tokens), dtype=torch.uint8)
        threads = torch.get_num_threads()
        self._mix(self.native, x.data_ptr(), out.data_ptr(), tokens, memory.data_ptr(), threads)
        return out

    def num_bytes(self, tokens: int) -> int:
        """Return the size of the work space of a call for ``tokens`` tokens."""
        return int(self._bytes(self.native, tokens))


def compiled_mixture(
    form: Experts, router: ColumnLinear, experts: Sequence[Mlp]
) -> CompiledMixture | None:
    """Return the compiled mixture, or None unless all weights are in panels."""
    linears = [router, *(linear for e in experts for linear in (e.gate_up, e.down))]
    if not all(isinstance(linear.weight.form, Panels) for linear in linears):
        return None
    return CompiledMixture(form, router, experts)


def native_linear(linear: ColumnLinear | RowLinear) -> NativeLinear:
    """Return the structure of a linear layer for C++. Its weight must be in panels."""
    panels = linear.weight.form
    assert isinstance(panels, Panels)
    return panels.native(linear.own_bias if isinstance(linear, RowLinear) else linear.bias)
