"""A decoder's layers on a CPU, all of them in one call (stack.cpp).

Layer by layer, every operation is a call from Python, between which the other threads wait for
work: of a sequence that decodes alone that is a third of the time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from everlift.blockhash import BLOCK_SIZE
from worker import native
from worker.attention.backend import StepAttention
from worker.attention.cpu import (
    CpuStep,
    Kernel,
    NativeCache,
    NativeForm,
    NativeStep,
    compiled_kernel,
    native_form,
)
from worker.model.compiled_pointwise import ACTIVATIONS, CompiledPointwise
from worker.model.decoder import Layer, LayerByLayer, Stack
from worker.model.layers import ColumnLinear, RmsNorm, RowLinear
from worker.model.panels import Panels
from worker.model.rope import Angle

_SOURCE = Path(__file__).with_name("stack.cpp")
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("eps", ctypes.c_float), ("one", ctypes.c_float))


class _Linear(ctypes.Structure):
    _fields_ = (("panels", _POINTER), ("bias", _POINTER), ("outputs", _SIZE), ("inputs", _SIZE))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("before_attention", "query", "key", "after_attention")),
        *((name, _Linear) for name in ("qkv", "out")),
        ("form", NativeForm),
        ("angles", _SIZE),
        *((name, _Norm) for name in ("before_mlp", "after_mlp")),
        *((name, _Linear) for name in ("gate_up", "down")),
    )


class _Stack(ctypes.Structure):
    _fields_ = (
        ("layers", _POINTER),
        *((name, _SIZE) for name in ("num_layers", "width", "heads", "kv_heads")),
        *((name, _SIZE) for name in ("intermediate", "activation")),
    )


class _Angles(ctypes.Structure):
    _fields_ = (("cos", _POINTER), ("sin", _POINTER), ("dim", _SIZE))


class _Space(ctypes.Structure):
    _fields_ = tuple(
        (name, _POINTER) for name in ("normed", "qkv", "attended", "added", "gate_up", "gated")
    )


class CompiledStack:
    """A Stack (decoder.py) that computes what ``plain`` does, whose parameters it uses."""

    def __init__(self, library: ctypes.CDLL, plain: LayerByLayer, kernel: Kernel | None) -> None:
        """``kernel`` lays out a block as the library does."""
        self._kernel = kernel
        self._forward = library.forward
        self._forward.argtypes = (
            *(ctypes.POINTER(each) for each in (_Stack, NativeCache, NativeStep, _Angles)),
            *(_POINTER, _SIZE, ctypes.POINTER(_Space), ctypes.c_int),
        )
        self._forward.restype = None
        #: its tensors are what the structures point to
        self._plain = plain
        layers = [
            _layer(layer, table)
            for layer, table in zip(plain.layers, plain.table_of_layer, strict=True)
        ]
        self._layers = (_Layer * len(layers))(*layers)
        attention = plain.layers[0].attention
        self._stack = _Stack(
            ctypes.addressof(self._layers),
            len(layers),
            layers[0].out.outputs,
            attention.num_query,
            attention.num_turned - attention.num_query,
            layers[0].down.inputs,
            ACTIVATIONS[plain.layers[0].mlp.activation],
        )
        first = layers[0]
        #: elements of a token
        self._widths = (
            first.qkv.inputs,
            first.qkv.outputs,
            first.out.inputs,
            first.out.outputs,
            first.gate_up.outputs,
            first.down.inputs,
        )
        self._memory = torch.empty(0, dtype=torch.bfloat16)

    def forward(self, hidden: Tensor, angles: Sequence[Angle], attention: StepAttention) -> Tensor:
        """In the place of ``hidden``."""
        if not isinstance(attention, CpuStep) or attention.kernel is not self._kernel:
            return self._plain.forward(hidden, angles, attention)
        assert hidden.is_contiguous()
        tables = (_Angles * len(angles))(
            *(_Angles(cos.data_ptr(), sin.data_ptr(), cos.shape[-1]) for cos, sin in angles)
        )
        self._forward(
            self._stack,
            attention.cache,
            attention.step,
            tables,
            hidden.data_ptr(),
            len(hidden),
            self._space(len(hidden)),
            torch.get_num_threads(),
        )
        return hidden

    def _space(self, tokens: int) -> _Space:
        """It is kept, since the largest step comes again."""
        if len(self._memory) < tokens * sum(self._widths):
            # The old memory goes before the new one comes.
            self._memory = torch.empty(0, dtype=torch.bfloat16)
            self._memory = torch.empty(tokens * sum(self._widths), dtype=torch.bfloat16)
        parts, first = [], self._memory.data_ptr()
        for width in self._widths:
            parts.append(first)
            first += tokens * width * self._memory.itemsize
        return _Space(*parts)


def choose_stack(plain: LayerByLayer, head_dim: int) -> Stack:
    """``plain`` where some of it is not as stack.cpp computes it, or that cannot be compiled."""
    if not plain.layers or not all(_is_ours(layer) for layer in plain.layers):
        return plain
    library = _library(head_dim)
    if library is None:
        return plain
    return CompiledStack(library, plain, compiled_kernel(head_dim, torch.bfloat16))


@cache
def _library(head_dim: int) -> ctypes.CDLL | None:
    element = native.DTYPES[torch.bfloat16]
    defined = (f"-D{element}", f"-DHEAD_DIM={head_dim}", f"-DBLOCK_SIZE={BLOCK_SIZE}")
    return native.compiled(_SOURCE, defined)


def _is_ours(layer: Layer) -> bool:
    """On one rank, with weights in panels, and with nothing that few models have."""
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    return (
        isinstance(attention.pointwise, CompiledPointwise)
        and all(isinstance(linear.weight.form, Panels) for linear in linears)
        and attention.out.group.size == 1
        and mlp.activation in ACTIVATIONS
        and attention.form.sinks is None
        and layer.around_attention.multiplier == layer.around_mlp.multiplier == 1.0
    )


def _layer(layer: Layer, table: int) -> _Layer:
    attention, mlp = layer.attention, layer.mlp
    norms = attention.norms
    return _Layer(
        before_attention=_norm(layer.around_attention.before),
        query=_norm(norms.query if norms else None),
        key=_norm(norms.key if norms else None),
        after_attention=_norm(layer.around_attention.after),
        qkv=_linear(attention.qkv),
        out=_linear(attention.out),
        form=native_form(attention.form, None),
        angles=table,
        before_mlp=_norm(layer.around_mlp.before),
        after_mlp=_norm(layer.around_mlp.after),
        gate_up=_linear(mlp.gate_up),
        down=_linear(mlp.down),
    )


def _norm(norm: RmsNorm | None) -> _Norm:
    if norm is None:
        return _Norm(None, 0.0, 0.0)
    return _Norm(norm.weight.data_ptr(), norm.eps, float(norm.add_one))


def _linear(linear: ColumnLinear | RowLinear) -> _Linear:
    form = linear.weight.form
    assert isinstance(form, Panels)
    bias = None if linear.bias is None else linear.bias.data_ptr()
    return _Linear(form.address, bias, form.outputs, form.inputs)
