"""Tensors of a GGUF file under the names and in the layout of a Hugging Face checkpoint.

Quantised tensors are dequantised by the library gguf while they are read, a few blocks at a time.
Two changes of llama.cpp's converter are undone: the rows of Llama's query and key projections are
interleaved for llama.cpp's rope, and 1 is added to the weights of Gemma's norms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import gguf
import numpy
import torch
from torch import Tensor

from everlift.gguf_config import UnsupportedGguf, config_of
from everlift.gguf_header import BadGguf, GgufHeader, GgufTensor, read_gguf_header
from worker.model.checkpoint import BadCheckpoint, StoredTensor, some
from worker.model.filling import Read, read_exactly
from worker.model.sharing import Run

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FAMILY_LAYER_NAMES = {
    "gemma2": _GEMMA_LAYER_NAMES,
    "gemma3": _GEMMA_LAYER_NAMES,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
#: Tensors that everlift.gguf_config has already converted to entries of the config.
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_INTERLEAVED = re.compile(r"\.attn_[qk]\.")
#: Types that are not quantised; safetensors uses the same names.
_PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class GgufStoredTensor(StoredTensor):
    """Tensor of a GGUF file, with the name and shape that it has in a Hugging Face checkpoint.

    Elements have the type ``type`` in the file, and are read as ``dtype``. Groups of ``unit``
    consecutive elements are dequantised and rearranged together. ``unit`` is a multiple of the
    type's block size, and in an interleaved tensor the number of elements in the rows of one head.
    """

    type: gguf.GGMLQuantizationType
    unit: int
    #: whether a unit has the rows of both halves of a head's features in alternation
    is_interleaved: bool
    #: subtracted from each element
    offset: float


def read_gguf_tensors(path: Path) -> list[GgufStoredTensor]:
    """Return the tensors of a GGUF file in the order of their data.

    Raises BadCheckpoint if the file is malformed or truncated, or has an unsupported architecture
    or type, and OSError if it cannot be read.
    """
    path = path.resolve()
    try:
        header = read_gguf_header(path)
        config = config_of(header)
        file_size = path.stat().st_size
    except (BadGguf, UnsupportedGguf) as error:
        raise BadCheckpoint(str(error)) from None
    architecture = config["model_type"].removesuffix("_text")
    stored = [
        (tensor.name, _stored(header, tensor, architecture, config["head_dim"]))
        for tensor in sorted(header.tensors, key=lambda tensor: tensor.start)
        if tensor.name not in _IN_CONFIG
    ]
    cut = [name for name, tensor in stored if tensor.end > file_size]
    if cut:
        raise BadCheckpoint(f"{path} is truncated: it ends before or within {some(cut)}")
    for (name, tensor), (following_name, following) in pairwise(stored):
        if following.start < tensor.end:
            raise BadCheckpoint(f"{path}: {name} and {following_name} overlap")
    return [tensor for _, tensor in stored]


def gguf_reading(descriptor: int, tensor: GgufStoredTensor) -> Read:
    """Return a function that reads runs of ``tensor``'s elements from the open file ``descriptor``.

    The function raises BadCheckpoint if the file has been truncated meanwhile.
    """
    block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.type]

    def read(runs: Iterable[Run], into: Tensor) -> None:
        end = 0
        for run in runs:
            begin, end = end, end + run.length
            first = run.start // tensor.unit * tensor.unit
            last = -(-(run.start + run.length) // tensor.unit) * tensor.unit
            place = tensor.start + first // block * block_bytes
            stored = _read(descriptor, (last - first) // block * block_bytes, place, tensor)
            values = _arranged(tensor, gguf.dequantize(stored, tensor.type).reshape(-1))
            skipped = run.start - first
            into[begin:end] = torch.from_numpy(values[skipped : skipped + run.length])

    return read


def _arranged(tensor: GgufStoredTensor, values: numpy.ndarray) -> numpy.ndarray:
    if tensor.is_interleaved:
        row = tensor.shape[1] if len(tensor.shape) > 1 else 1
        pairs = values.reshape(-1, tensor.unit // row // 2, 2, row)
        values = pairs.swapaxes(1, 2).reshape(-1)
    return values - tensor.offset if tensor.offset else values


def _read(descriptor: int, count: int, place: int, tensor: StoredTensor) -> numpy.ndarray:
    stored = numpy.empty(count, numpy.uint8)
    if not read_exactly(descriptor, stored.data, place):
        raise BadCheckpoint(f"{tensor.path} became shorter while it was read")
    return stored


def _stored(
    header: GgufHeader, tensor: GgufTensor, architecture: str, head_dim: int
) -> GgufStoredTensor:
    kind = _type_of(header.path, tensor)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % block:
        raise BadCheckpoint(
            f"{header.path}: {tensor.name} has rows of {tensor.shape[-1]} elements, not a "
            f"multiple of the block size of {kind.name}"
        )
    size = math.prod(tensor.shape)
    row = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    is_interleaved = architecture == "llama" and bool(_INTERLEAVED.search(tensor.name))
    unit = head_dim * row if is_interleaved else block
    if is_interleaved and (size % unit or unit // row % 2):
        raise BadCheckpoint(f"{header.path}: {tensor.name} does not consist of whole heads")
    is_norm = tensor.name.endswith("norm.weight")
    return GgufStoredTensor(
        name=_name_of(tensor.name, architecture),
        path=header.path,
        dtype=kind.name if kind.name in _PLAIN else "F32",
        shape=tensor.shape,
        start=tensor.start,
        end=tensor.start + size // block * block_bytes,
        type=kind,
        unit=unit,
        is_interleaved=is_interleaved,
        offset=1.0 if is_norm and architecture.startswith("gemma") else 0.0,
    )


def _name_of(name: str, architecture: str) -> str:
    """Return the Hugging Face name of the GGUF tensor ``name``, or ``name`` if it has no other."""
    stem, _, suffix = name.rpartition(".")
    layer = _LAYER.fullmatch(stem)
    if layer is None:
        return f"{_NAMES[stem]}.{suffix}" if stem in _NAMES else name
    names = _LAYER_NAMES | _FAMILY_LAYER_NAMES.get(architecture, {})
    number, part = layer.groups()
    return f"model.layers.{number}.{names[part]}.{suffix}" if part in names else name


def _type_of(path: Path, tensor: GgufTensor) -> gguf.GGMLQuantizationType:
    try:
        kind = gguf.GGMLQuantizationType(tensor.type)
    except ValueError:
        kind = None
    if kind is None or not _can_dequantise(kind):
        supported = ", ".join(
            known.name for known in gguf.GGMLQuantizationType if _can_dequantise(known)
        )
        raise BadCheckpoint(
            f"{path}: {tensor.name} is of type {kind.name if kind else tensor.type}; supported: "
            f"{supported}"
        )
    return kind


@cache
def _can_dequantise(kind: gguf.GGMLQuantizationType) -> bool:
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(numpy.zeros((1, block_bytes), numpy.uint8), kind)
    except NotImplementedError:
        return False
    return True
