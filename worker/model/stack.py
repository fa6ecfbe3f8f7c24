"""Compiled decoder for CPUs: tokens to hidden states in one call, logits in another (stack.cpp).

If the layers run one by one, every operation is a call from Python. Between the calls the other
threads are idle: for a third of the time when a single sequence decodes. On a single rank, the
compiled decoder also computes nothing after the last layer's attention for tokens whose hidden
states are not requested, such as most tokens of a prompt.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from everlift.hashes import BLOCK_SIZE
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
from worker.model.compiled_mixture import native_linear
from worker.model.compiled_pointwise import ACTIVATIONS, CompiledPointwise
from worker.model.decoder import AllHeadsNorms, Layer, LayerByLayer, Stack
from worker.model.layers import ColumnLinear, RmsNorm, RowLinear, VocabTable
from worker.model.lora import StepAdapters
from worker.model.matrix import Plain
from worker.model.mixture import Mixture
from worker.model.mlp import Mlp
from worker.model.panels import NativeLinear, Panels, panel_flags
from worker.model.rope import RotaryTable
from worker.model.weight_format import CodeType
from worker.native import native

_SOURCE = Path(__file__).with_name("stack.cpp")
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


#: Callback that sums elements over the ranks, in place. Arguments: their address and number.
_SumOverRanks = ctypes.CFUNCTYPE(None, _POINTER, _SIZE)


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("eps", ctypes.c_float), ("one", ctypes.c_float))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("before_attention", "query", "key", "after_attention")),
        *((name, NativeLinear) for name in ("qkv", "out")),
        ("form", NativeForm),
        ("angles", _SIZE),
        *((name, _Norm) for name in ("before_mlp", "after_mlp")),
        *((name, NativeLinear) for name in ("gate_up", "down")),
        ("mixture", _POINTER),
        *((f"{name}_adapters", _POINTER) for name in ("qkv", "out", "gate_up", "down")),
    )


class _Angles(ctypes.Structure):
    _fields_ = (("cos", _POINTER), ("sin", _POINTER), ("pairs", _SIZE), ("stride", _SIZE))


class _Embedding(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("weight", "scales")),
        *((name, _SIZE) for name in ("in_panels", "vocab", "start", "stop")),
        ("multiplier", ctypes.c_float),
    )


class _Stack(ctypes.Structure):
    _fields_ = (
        ("embedding", _Embedding),
        ("angles", _POINTER),
        ("positions", _SIZE),
        ("layers", _POINTER),
        *((name, _SIZE) for name in ("num_layers", "width", "heads", "kv_heads")),
        *((name, _SIZE) for name in ("activation", "norms_all")),
        *((name, ctypes.c_float) for name in ("residual_multiplier", "clip")),
        ("norm", _Norm),
        ("head", NativeLinear),
        ("sum_over_ranks", _SumOverRanks),
    )


class _Tokens(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("ids", "positions")),
        ("number", _SIZE),
        ("sites", _POINTER),
        ("num_sites", _SIZE),
        *((name, _POINTER) for name in ("adapters", "low_rank")),
    )


class _Space(ctypes.Structure):
    _fields_ = tuple(
        (name, _POINTER)
        for name in ("normed", "qkv", "attended", "added", "gate_up", "gated", "mixture")
    )


class CompiledStack:
    """Stack (decoder.py) in C++, which computes the same as ``plain`` and uses its parameters."""

    def __init__(self, library: ctypes.CDLL, plain: LayerByLayer, kernel: Kernel | None) -> None:
        """Create the stack from ``library`` (stack.cpp) and the packed layers ``plain``.

        ``kernel`` is the compiled attention kernel of the same head dimension and type. For a step
        whose attention does not use it, ``plain`` computes the hidden states.
        """
        self._kernel = kernel
        self._hidden = library.hidden_states
        self._hidden.argtypes = (
            *map(ctypes.POINTER, (_Stack, NativeCache, NativeStep, _Tokens)),
            *(_POINTER, ctypes.POINTER(_Space), ctypes.c_int),
        )
        self._hidden.restype = ctypes.c_int
        self._logits = library.logits
        self._logits.argtypes = (
            *(ctypes.POINTER(_Stack), _POINTER, _POINTER, _POINTER),
            *(_SIZE, ctypes.c_int),
        )
        self._logits.restype = None
        #: keeps the tensors alive that the structures point to
        self._plain = plain
        sinks = [layer.attention.form.sinks for layer in plain.layers]
        self._sinks = [None if each is None else each.float() for each in sinks]
        layers = [
            _layer(*each)
            for each in zip(plain.layers, plain.table_of_layer, self._sinks, strict=True)
        ]
        self._dtype = plain.norm.weight.dtype
        self._group = plain.embedding.group
        #: error of a reduction in the current step, kept because a callback cannot raise it
        self._failure: BaseException | None = None
        self._layers = (_Layer * len(layers))(*layers)
        self._angles = (_Angles * len(plain.tables))(*map(_angles, plain.tables))
        self._stack = _stack(plain, self._layers, self._angles)
        if self._group.size > 1:
            self._stack.sum_over_ranks = _SumOverRanks(self._sum_over_ranks)
        self._mixtures = [
            layer.mlp.compiled
            for layer in plain.layers
            if isinstance(layer.mlp, Mixture) and layer.mlp.compiled is not None
        ]
        #: slots for LoRA adapters of all linear layers
        self._adapters = [
            linear.adapters
            for layer in plain.layers
            for linear in layer.adapted_linears()
            if linear.adapters is not None
        ]
        first = layers[0]
        #: elements per token of each field of _Space but the last
        self._widths = (
            first.qkv.inputs,
            first.qkv.outputs,
            first.out.inputs,
            first.out.outputs,
            max(layer.gate_up.outputs for layer in layers),
            max(layer.down.inputs for layer in layers),
        )
        self._memory = torch.empty(0, dtype=self._dtype)
        self._mixture_memory = torch.empty(0, dtype=torch.uint8)
        self._logits_memory = torch.empty(0)
        #: work space within ``_memory``, and the number of tokens that fit
        self._space, self._capacity = _Space(), 0

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        sites: Tensor | None,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Return the hidden states of all tokens, or of those at ``sites``; see Decoder.forward.

        Raises IndexError for an invalid token or position, and RuntimeError if a rank is lost.
        """
        if not isinstance(attention, CpuStep) or attention.kernel is not self._kernel:
            return self._plain.hidden(tokens, positions, attention, sites, adapters)
        number, num_sites = len(tokens), len(tokens if sites is None else sites)
        hidden = torch.empty(number, self._stack.width, dtype=self._dtype)
        low_rank = torch.empty(0 if adapters is None else number * self._most_ranks())
        described = _Tokens(
            _ints(tokens),
            _ints(positions),
            number,
            None if sites is None else _ints(sites),
            num_sites,
            None if adapters is None else _ints(adapters.numbers),
            low_rank.data_ptr(),
        )
        done = self._hidden(
            self._stack,
            attention.cache,
            attention.step,
            described,
            hidden.data_ptr(),
            self._space_for(number),
            torch.get_num_threads(),
        )
        if not done:
            raise IndexError("a token is outside the vocabulary, or a position is too large")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return hidden[:num_sites]

    def _most_ranks(self) -> int:
        return max(adapters.most_ranks for adapters in self._adapters)

    def _sum_over_ranks(self, address: int, number: int) -> None:
        if self._failure is not None:
            return
        memory = (ctypes.c_byte * (number * self._dtype.itemsize)).from_address(address)
        try:
            self._group.all_reduce(torch.frombuffer(memory, dtype=self._dtype))
        except BaseException as error:
            self._failure = error

    def logits(self, hidden: Tensor) -> Tensor | None:
        assert hidden.dtype == self._dtype and hidden.is_contiguous()
        logits = self._memory_for_logits(len(hidden))
        self._logits(
            self._stack,
            hidden.data_ptr(),
            self._space_for(len(hidden)).normed,
            logits.data_ptr(),
            len(hidden),
            torch.get_num_threads(),
        )
        return self._plain.head.gather_logits(logits, self._dtype)

    def _memory_for_logits(self, number: int) -> Tensor:
        """Return memory for this rank's logits, float32 [number, outputs of the head].

        The memory is reused by later calls, because newly allocated memory of this size costs a
        page fault for every 4 KiB.
        """
        if number > len(self._logits_memory):
            self._logits_memory = torch.empty(0)
            capacity = 1 << (number - 1).bit_length()
            self._logits_memory = torch.empty(capacity, self._stack.head.outputs)
        return self._logits_memory[:number]

    def _space_for(self, tokens: int) -> _Space:
        """Return work space for at least ``tokens`` tokens, which later steps reuse."""
        if tokens > self._capacity:
            # Free the old memory before the new memory is allocated, which may fail.
            self._capacity = 0
            self._memory = torch.empty(0, dtype=self._dtype)
            self._mixture_memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(tokens * sum(self._widths), dtype=self._dtype)
            num_bytes = max((mixture.num_bytes(tokens) for mixture in self._mixtures), default=0)
            self._mixture_memory = torch.empty(num_bytes, dtype=torch.uint8)
            self._capacity = tokens
            parts = self._memory.split_with_sizes([tokens * width for width in self._widths])
            self._space = _Space(
                *(part.data_ptr() for part in parts), self._mixture_memory.data_ptr()
            )
        return self._space


def choose_stack(plain: LayerByLayer, head_dim: int, codes: CodeType | None = None) -> Stack:
    """Return the compiled stack, or ``plain`` if stack.cpp lacks a feature or cannot be compiled.

    The weights of ``plain`` must be packed, because only weights in panels are supported. ``codes``
    is the type of the codes of quantised weights, if there are any.
    """
    if not _has_supported_tables(plain) or not all(map(_is_supported, plain.layers)):
        return plain
    dtype = plain.norm.weight.dtype
    assert isinstance(plain.head.weight.form, Panels)
    library = stack_library(head_dim, dtype, plain.head.weight.form.dtype, codes)
    if library is None:
        return plain
    return CompiledStack(library, plain, compiled_kernel(head_dim, dtype))


@cache
def stack_library(
    head_dim: int, dtype: torch.dtype, weights: torch.dtype, codes: CodeType | None = None
) -> ctypes.CDLL | None:
    """Return the compiled stack.cpp, or None, with the cause logged, if it cannot be compiled."""
    return native.compiled(_SOURCE, stack_flags(head_dim, dtype, weights, codes))


def stack_flags(
    head_dim: int, dtype: torch.dtype, weights: torch.dtype, codes: CodeType | None = None
) -> tuple[str, ...]:
    """Return the library's compiler flags for a head dimension and types.

    ``dtype`` is the type of inputs and outputs.
    """
    return (
        *panel_flags(dtype, weights, codes),
        f"-DHEAD_DIM={head_dim}",
        f"-DBLOCK_SIZE={BLOCK_SIZE}",
    )


def _has_supported_tables(plain: LayerByLayer) -> bool:
    looked_up = plain.embedding.weight.form
    return (
        len(plain.layers) > 0
        and isinstance(plain.head.weight.form, Panels)
        and isinstance(looked_up, Plain | Panels)
    )


def _is_supported(layer: Layer) -> bool:
    attention, mlp = layer.attention, layer.mlp
    linears: list[ColumnLinear | RowLinear] = [attention.qkv, attention.out]
    if isinstance(mlp, Mlp):
        linears += [mlp.gate_up, mlp.down]
    elif mlp.compiled is None:
        return False
    return (
        isinstance(attention.pointwise, CompiledPointwise)
        and all(isinstance(linear.weight.form, Panels) for linear in linears)
        and all(it.adapters is None or it.adapters.native is not None for it in linears)
        and not (isinstance(attention.norms, AllHeadsNorms) and attention.out.group.size > 1)
    )


def _stack(
    plain: LayerByLayer, layers: ctypes.Array[_Layer], angles: ctypes.Array[_Angles]
) -> _Stack:
    attention, mlp = plain.layers[0].attention, plain.layers[0].mlp
    head = plain.head.weight.form
    assert isinstance(head, Panels)
    return _Stack(
        embedding=_embedding(plain.embedding, plain.embedding_multiplier),
        angles=ctypes.addressof(angles),
        positions=min(len(table.cos) for table in plain.tables),
        layers=ctypes.addressof(layers),
        num_layers=len(layers),
        width=layers[0].out.outputs,
        heads=attention.num_query,
        kv_heads=attention.num_rotated - attention.num_query,
        activation=ACTIVATIONS[mlp.activation],
        norms_all=isinstance(attention.norms, AllHeadsNorms),
        residual_multiplier=plain.layers[0].around_mlp.multiplier,
        clip=attention.clip or 0.0,
        norm=_norm(plain.norm),
        head=head.native(None),
    )


def _embedding(table: VocabTable, multiplier: float) -> _Embedding:
    form = table.weight.form
    assert isinstance(form, Plain | Panels)
    in_panels = isinstance(form, Panels)
    address = form.address if isinstance(form, Panels) else form.weight.data_ptr()
    scales = form.scales_address if isinstance(form, Panels) else None
    ids = table.local_ids
    return _Embedding(address, scales, in_panels, table.vocab_size, ids.start, ids.stop, multiplier)


def _angles(table: RotaryTable) -> _Angles:
    assert table.cos.is_contiguous() and table.sin.is_contiguous()
    pairs = table.cos.shape[1]
    return _Angles(table.cos.data_ptr(), table.sin.data_ptr(), pairs, pairs)


def _layer(layer: Layer, table: int, sinks: Tensor | None) -> _Layer:
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention.norms, AllHeadsNorms):
        weights = attention.norms.query, attention.norms.key
        query, key = (_Norm(weight.data_ptr(), attention.norms.eps, 0.0) for weight in weights)
    else:
        norms = attention.norms
        query, key = _norm(norms.query if norms else None), _norm(norms.key if norms else None)
    if isinstance(mlp, Mlp):
        gate_up, down, mixture = native_linear(mlp.gate_up), native_linear(mlp.down), None
    else:
        assert mlp.compiled is not None
        gate_up, down = NativeLinear(), NativeLinear()
        mixture = ctypes.addressof(mlp.compiled.native)
    return _Layer(
        before_attention=_norm(layer.around_attention.before),
        query=query,
        key=key,
        after_attention=_norm(layer.around_attention.after),
        qkv=native_linear(attention.qkv),
        out=native_linear(attention.out),
        form=native_form(attention.form, sinks),
        angles=table,
        before_mlp=_norm(layer.around_mlp.before),
        after_mlp=_norm(layer.around_mlp.after),
        gate_up=gate_up,
        down=down,
        mixture=mixture,
        qkv_adapters=_adapters(attention.qkv),
        out_adapters=_adapters(attention.out),
        gate_up_adapters=_adapters(mlp.gate_up) if isinstance(mlp, Mlp) else None,
        down_adapters=_adapters(mlp.down) if isinstance(mlp, Mlp) else None,
    )


def _adapters(linear: ColumnLinear | RowLinear) -> int | None:
    if linear.adapters is None or linear.adapters.native is None:
        return None
    return ctypes.addressof(linear.adapters.native)


def _norm(norm: RmsNorm | None) -> _Norm:
    if norm is None:
        return _Norm(None, 0.0, 0.0)
    return _Norm(norm.weight.data_ptr(), norm.eps, float(norm.add_one))


def _ints(values: Tensor) -> int:
    assert values.dtype == torch.int64 and values.is_contiguous()
    return values.data_ptr()
