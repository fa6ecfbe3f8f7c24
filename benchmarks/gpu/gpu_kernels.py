"""Kernel times of bench-gpu: the kernels of one layer, and of sampling, beside those of torch.

Figures of a kernel, in seconds per call at the sizes of ../RESULTS.md:

    ours_s                Everlift's kernel
    torch_s               the same by torch operators
    sdpa_s                for attention: torch's SDPA on contiguous keys and values, which a step
                          with a paged cache would have to gather first
    fa3_s, flashinfer_s   attention of prompts by FlashAttention 3 and FlashInfer, if available
    bytes                 bytes that the kernel must read and write
    failed                cause, if the kernel failed; other kernels are still measured
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.gpu_shapes import Shape
from benchmarks.gpu.gpu_timing import (
    BATCHES,
    COLD_BYTES,
    CONTEXT,
    DEVICE,
    DTYPE,
    IS_SMALL,
    PREFILLS,
    replayed_s,
    seconds,
)
from everlift.hashes import BLOCK_SIZE
from everlift.sampling import SamplingParams
from worker.attention.backend import AttentionBackend, AttentionForm
from worker.attention.choice import choose_attention
from worker.attention.flash_attention import FlashAttention3
from worker.attention.flash_infer import FlashInfer
from worker.attention.prompt_choice import BackendClass, try_backend
from worker.attention.reference import ReferenceAttention
from worker.device.kv_cache import KVCache
from worker.device.upload import Parcel
from worker.engine.limits import blocks_for
from worker.engine.plan import Row, Rows
from worker.kernels.trial import why_no_kernels
from worker.model.compiled_pointwise import choose_pointwise
from worker.model.pointwise import TORCH, Pointwise
from worker.model.rope import RotaryTable
from worker.model.spec import Rope
from worker.native.argmax import argmax_by_torch
from worker.runner.sampling_backend import SamplingTable, choose_sampling_backend, sample_by_torch

Times = dict[str, Any]
OTHER_BACKENDS: dict[str, BackendClass] = {"fa3_s": FlashAttention3, "flashinfer_s": FlashInfer}
TOKENS = (BATCHES[0], BATCHES[-1], PREFILLS[-1])
SAMPLED_ROWS = (BATCHES[0], BATCHES[-1])
GREEDY, TOP_P = SamplingParams(temperature=0.0), SamplingParams(top_p=0.9, seed=1)
_BYTES = DTYPE.itemsize
_EPS = 1e-5
#: Largest number of copies of a kernel's data (see ``_copies``).
_MOST_COPIES = 64


@torch.inference_mode()
def kernels(shape: Shape) -> Iterator[dict[str, Times]]:
    """Measure each kernel at each size; after each, yield all figures so far, by kernel and size.

    On a GPU, raises AssertionError if the compiled kernels do not work there.
    """
    assert IS_SMALL or (cause := why_no_kernels(DEVICE)) == "", cause
    found: dict[str, Times] = {}
    for name, measure in _planned(shape):
        try:
            found[name] = measure()
        except Exception as error:
            found[name] = {"failed": repr(error)}
        yield found


def _planned(shape: Shape) -> Iterator[tuple[str, Callable[[], Times]]]:
    for batch in BATCHES:
        decode = partial(attention, shape, batch, 1, CONTEXT)
        yield f"attention, decode {batch} x {CONTEXT}", decode
    for length in PREFILLS:
        yield f"attention, prefill {length}", partial(attention, shape, 1, length, length)
    for tokens in TOKENS:
        yield f"sum_and_norm {tokens}", partial(sum_and_norm, shape, tokens)
        yield f"turn_and_place {tokens}", partial(turn_and_place, shape, tokens)
        yield f"gate_and_multiply {tokens}", partial(gate_and_multiply, shape, tokens)
    for rows in SAMPLED_ROWS:
        yield f"draw_rows, greedy {rows}", partial(draw_rows, shape, rows, GREEDY)
        yield f"draw_rows, top_p {rows}", partial(draw_rows, shape, rows, TOP_P)


def bandwidth_shares(found: Mapping[str, Mapping[str, Any]], bandwidth: float) -> dict[str, float]:
    """Return the bandwidth of each of our kernels, as a share of ``bandwidth`` (bytes/s)."""
    return {
        f"bandwidth, {name}": times["bytes"] / times["ours_s"] / bandwidth
        for name, times in found.items()
        if "ours_s" in times
    }


def attention(shape: Shape, rows: int, new: int, context: int) -> Times:
    """Time the attention of one layer, for ``rows`` sequences with ``new`` query tokens each.

    ``context`` is the number of tokens of a sequence, with the new ones. Layers are computed one
    after the other. There are so many that their keys and values do not fit into the GPU's cache.
    """
    layers = 1 + COLD_BYTES // (rows * context * shape.kv_bytes // shape.layers)
    cache = _cache(shape, rows * blocks_for(context), layers)
    planned = _rows(rows, new, context)
    shapes = ((rows, shape.heads, new), *[(layers, rows, shape.kv_heads, context)] * 2)
    query, keys, values = (_random(*each, shape.head_dim) for each in shapes)
    flat = query.transpose(1, 2).reshape(rows * new, shape.heads, shape.head_dim)
    form = AttentionForm(shape.head_dim**-0.5)

    def layer_s(backend: AttentionBackend) -> float:
        step = backend.prepare(planned)
        attend = [partial(step.attend, layer, flat, form) for layer in range(layers)]
        return replayed_s(_in_sequence(attend)) / layers

    def sdpa() -> Tensor:
        attend = partial(
            torch.nn.functional.scaled_dot_product_attention, is_causal=new > 1, enable_gqa=True
        )
        return [attend(query, key, value) for key, value in zip(keys, values, strict=True)][-1]

    read = rows * context * shape.kv_bytes // shape.layers
    found: Times = {"bytes": read + 2 * flat.numel() * _BYTES}
    for name, backend in _backends(cache, new).items():
        found[name] = layer_s(backend)
    try:
        found["sdpa_s"] = replayed_s(sdpa) / layers
    except RuntimeError as error:
        found["failed"] = repr(error)
    return found


def _backends(cache: KVCache, new: int) -> dict[str, AttentionBackend]:
    """Return the attention backends by the name of their figure.

    ``ours_s`` is Everlift's own kernel, even if the product would choose another one for prompts.
    """
    if DEVICE.type == "cpu":
        return {"ours_s": choose_attention(cache)}
    # Without a GPU, Triton need not be installed.
    from worker.attention.gpu import GpuAttention

    multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    found: dict[str, AttentionBackend] = {"ours_s": GpuAttention(cache, multiprocessors)}
    for name, backend in OTHER_BACKENDS.items() if new > 1 else ():
        if (other := try_backend(backend, cache)) is not None:
            found[name] = GpuAttention(cache, multiprocessors, other)
    return found


def sum_and_norm(shape: Shape, tokens: int) -> Times:
    """Time the sum of a residual, with the norm of the result."""
    size, weight = tokens * shape.hidden * _BYTES, _random(shape.hidden)
    pairs = [_random(2, tokens, shape.hidden) for _ in range(_copies(2 * size))]

    def norm(by: Pointwise) -> float:
        works = [partial(by.norm, x, weight, _EPS, False, added) for x, added in pairs]
        return replayed_s(_in_sequence(works)) / len(works)

    return _compare(norm, 4 * size)


def gate_and_multiply(shape: Shape, tokens: int) -> Times:
    """Time the gated activation of an MLP: SiLU of one half, times the other half."""
    size = tokens * shape.intermediate * _BYTES
    inputs = [_random(tokens, 2 * shape.intermediate) for _ in range(_copies(2 * size))]

    def gate(by: Pointwise) -> float:
        return replayed_s(_in_sequence([partial(by.gate, x, "silu") for x in inputs])) / len(inputs)

    return _compare(gate, 3 * size)


def turn_and_place(shape: Shape, tokens: int) -> Times:
    """Time the rotation of queries and keys (RoPE) with the write of keys and values to the cache.

    ``tokens`` is the length of a prompt if it is PREFILLS[-1], else a number of decoding sequences.
    """
    is_prompt = tokens == PREFILLS[-1]
    rows = _rows(1, tokens, tokens) if is_prompt else _rows(tokens, 1, BLOCK_SIZE)
    size = (shape.heads + 2 * shape.kv_heads) * shape.head_dim * tokens * _BYTES
    layers = _copies(size)
    cache = _cache(shape, 1 + int(rows.tables.max()), layers)
    table = RotaryTable(Rope(dim=shape.head_dim, theta=500_000.0), PREFILLS[-1], DEVICE)
    angle = table.at(torch.from_numpy(rows.positions).to(DEVICE))
    heads = [
        _random(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim).tensor_split(
            [shape.heads + shape.kv_heads], dim=1
        )
        for _ in range(layers)
    ]

    def turn(by: Pointwise, backend: AttentionBackend) -> float:
        step = backend.prepare(rows)
        works = [
            partial(by.rotate_and_write, rotated, shape.heads, value, angle, layer, step)
            for layer, (rotated, value) in enumerate(heads)
        ]
        return replayed_s(_in_sequence(works)) / layers

    return {
        "ours_s": turn(choose_pointwise(DTYPE, DEVICE), choose_attention(cache)),
        "torch_s": turn(TORCH, ReferenceAttention(cache)),
        "bytes": 2 * size,
    }


def draw_rows(shape: Shape, rows: int, sampling: SamplingParams) -> Times:
    """Time the sampling of one token for each of ``rows`` rows of logits.

    Torch's sampling synchronises with the device, so its time includes that of the host.
    """
    table, size = SamplingTable(), 4 * rows * shape.vocab
    logits = [torch.randn(rows, shape.vocab, device=DEVICE) for _ in range(_copies(size))]
    for slot in range(rows):
        table.write(slot, sampling, 0)
    metadata = table.metadata(np.arange(rows), np.arange(rows))
    ours = choose_sampling_backend(DEVICE)(metadata, Parcel(DEVICE))
    repeats = 2 if IS_SMALL else 5
    return {
        "ours_s": replayed_s(_in_sequence([partial(ours, it) for it in logits])) / len(logits),
        "torch_s": seconds(partial(sample_by_torch, logits[0], metadata, argmax_by_torch), repeats),
        "bytes": size,
    }


def _compare(time_of: Callable[[Pointwise], float], num_bytes: int) -> Times:
    """Time the chosen pointwise kernels and torch's."""
    ours = choose_pointwise(DTYPE, DEVICE)
    return {"ours_s": time_of(ours), "torch_s": time_of(TORCH), "bytes": num_bytes}


def _in_sequence(works: list[Callable[[], Tensor]]) -> Callable[[], Tensor]:
    """Return a function that calls all ``works`` and returns the last result."""
    return lambda: [work() for work in works][-1]


def _copies(num_bytes: int) -> int:
    """Return how many copies of ``num_bytes`` bytes exceed the GPU's cache, _MOST_COPIES at most.

    Copies are used one after the other, so that each call reads from memory.
    """
    return min(_MOST_COPIES, 1 + COLD_BYTES // num_bytes)


def _cache(shape: Shape, blocks: int, layers: int) -> KVCache:
    cache = KVCache(blocks, layers, shape.kv_heads, shape.head_dim, DTYPE, DEVICE)
    cache.tensor.normal_()
    return cache


def _rows(rows: int, new: int, context: int) -> Rows:
    """Return ``rows`` rows with ``new`` tokens each, whose KV blocks are in random order."""
    blocks = blocks_for(context)
    order = iter(torch.randperm(rows * blocks).tolist())
    tables = [tuple(next(order) for _ in range(blocks)) for _ in range(rows)]
    return Rows.of(Row(i, (0,) * new, context - new, table, True) for i, table in enumerate(tables))


def _random(*shape: int) -> Any:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)
