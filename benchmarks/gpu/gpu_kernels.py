"""The kernel table of bench-gpu: what the kernels of one layer, and those that sample, take at the
sizes of ../RESULTS.md, beside torch's own.

Of each: ``ours_s``, ``torch_s`` or, of attention, ``sdpa_s``, over keys and values that lie in one
piece, which a step would have to gather first; ``fa3_s`` and ``flashinfer_s`` where these can
attend to prompts; and the ``bytes`` that it must read and write. One that fails costs no other's
figures: ``failed`` says why.
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
THEIRS: dict[str, BackendClass] = {"fa3_s": FlashAttention3, "flashinfer_s": FlashInfer}
TOKENS = (BATCHES[0], BATCHES[-1], PREFILLS[-1])
DRAWN = (BATCHES[0], BATCHES[-1])
GREEDY, TOP_P = SamplingParams(temperature=0.0), SamplingParams(top_p=0.9, seed=1)
_BYTES = DTYPE.itemsize
_EPS = 1e-5
#: Of what is computed in turn.
_MOST_COPIES = 64


@torch.inference_mode()
def kernels(shape: Shape) -> Iterator[dict[str, Times]]:
    """By kernel and size, all that was found so far."""
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
    for rows in DRAWN:
        yield f"draw_rows, greedy {rows}", partial(draw_rows, shape, rows, GREEDY)
        yield f"draw_rows, top_p {rows}", partial(draw_rows, shape, rows, TOP_P)


def shares(found: Mapping[str, Mapping[str, Any]], bandwidth: float) -> dict[str, float]:
    """Of what a copy reads and writes in a second, by kernel."""
    return {
        f"bandwidth, {name}": times["bytes"] / times["ours_s"] / bandwidth
        for name, times in found.items()
        if "ours_s" in times
    }


def attention(shape: Shape, rows: int, new: int, context: int) -> Times:
    """Of a layer. Layer after layer, of so many that none finds what it reads where it left it."""
    layers = 1 + COLD_BYTES // (rows * context * shape.kv_bytes // shape.layers)
    cache = _cache(shape, rows * blocks_for(context), layers)
    planned = _rows(rows, new, context)
    shapes = ((rows, shape.heads, new), *[(layers, rows, shape.kv_heads, context)] * 2)
    query, keys, values = (_random(*each, shape.head_dim) for each in shapes)
    flat = query.transpose(1, 2).reshape(rows * new, shape.heads, shape.head_dim)
    form = AttentionForm(shape.head_dim**-0.5)

    def of_layers(backend: AttentionBackend) -> float:
        step = backend.prepare(planned)
        attend = [partial(step.attend, layer, flat, form) for layer in range(layers)]
        return replayed_s(_in_turn(attend)) / layers

    def torchs() -> Tensor:
        attend = partial(
            torch.nn.functional.scaled_dot_product_attention, is_causal=new > 1, enable_gqa=True
        )
        return [attend(query, key, value) for key, value in zip(keys, values, strict=True)][-1]

    read = rows * context * shape.kv_bytes // shape.layers
    found: Times = {"bytes": read + 2 * flat.numel() * _BYTES}
    for name, backend in _backends(cache, new).items():
        found[name] = of_layers(backend)
    try:
        found["sdpa_s"] = replayed_s(torchs) / layers
    except RuntimeError as error:
        found["failed"] = repr(error)
    return found


def _backends(cache: KVCache, new: int) -> dict[str, AttentionBackend]:
    """By whose time theirs is. What attends to prompts for us is not ours."""
    if DEVICE.type == "cpu":
        return {"ours_s": choose_attention(cache)}
    # Triton need not be there but for a GPU.
    from worker.attention.gpu import GpuAttention

    multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    found: dict[str, AttentionBackend] = {"ours_s": GpuAttention(cache, multiprocessors)}
    for name, backend in THEIRS.items() if new > 1 else ():
        if (theirs := try_backend(backend, cache)) is not None:
            found[name] = GpuAttention(cache, multiprocessors, theirs)
    return found


def sum_and_norm(shape: Shape, tokens: int) -> Times:
    size, weight = tokens * shape.hidden * _BYTES, _random(shape.hidden)
    pairs = [_random(2, tokens, shape.hidden) for _ in range(_copies(2 * size))]

    def norm(by: Pointwise) -> float:
        works = [partial(by.norm, x, weight, _EPS, False, added) for x, added in pairs]
        return replayed_s(_in_turn(works)) / len(works)

    return _both(norm, 4 * size)


def gate_and_multiply(shape: Shape, tokens: int) -> Times:
    size = tokens * shape.intermediate * _BYTES
    inputs = [_random(tokens, 2 * shape.intermediate) for _ in range(_copies(2 * size))]

    def gate(by: Pointwise) -> float:
        return replayed_s(_in_turn([partial(by.gate, x, "silu") for x in inputs])) / len(inputs)

    return _both(gate, 3 * size)


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
        return replayed_s(_in_turn(works)) / layers

    return {
        "ours_s": turn(choose_pointwise(DTYPE, DEVICE), choose_attention(cache)),
        "torch_s": turn(TORCH, ReferenceAttention(cache)),
        "bytes": 2 * size,
    }


def draw_rows(shape: Shape, rows: int, sampling: SamplingParams) -> Times:
    """Torch's waits for the device, so that it is timed as the host sees it."""
    table, size = SamplingTable(), 4 * rows * shape.vocab
    logits = [torch.randn(rows, shape.vocab, device=DEVICE) for _ in range(_copies(size))]
    for slot in range(rows):
        table.write(slot, sampling, 0)
    metadata = table.metadata(np.arange(rows), np.arange(rows))
    ours = choose_sampling_backend(DEVICE)(metadata, Parcel(DEVICE))
    repeats = 2 if IS_SMALL else 5
    return {
        "ours_s": replayed_s(_in_turn([partial(ours, it) for it in logits])) / len(logits),
        "torch_s": seconds(partial(sample_by_torch, logits[0], metadata, argmax_by_torch), repeats),
        "bytes": size,
    }


def _both(time_of: Callable[[Pointwise], float], num_bytes: int) -> Times:
    ours = choose_pointwise(DTYPE, DEVICE)
    return {"ours_s": time_of(ours), "torch_s": time_of(TORCH), "bytes": num_bytes}


def _in_turn(works: list[Callable[[], Tensor]]) -> Callable[[], Tensor]:
    return lambda: [work() for work in works][-1]


def _copies(num_bytes: int) -> int:
    """Of what takes so many, that are computed in turn."""
    return min(_MOST_COPIES, 1 + COLD_BYTES // num_bytes)


def _cache(shape: Shape, blocks: int, layers: int) -> KVCache:
    cache = KVCache(blocks, layers, shape.kv_heads, shape.head_dim, DTYPE, DEVICE)
    cache.tensor.normal_()
    return cache


def _rows(rows: int, new: int, context: int) -> Rows:
    """With blocks in no order."""
    blocks = blocks_for(context)
    order = iter(torch.randperm(rows * blocks).tolist())
    tables = [tuple(next(order) for _ in range(blocks)) for _ in range(rows)]
    return Rows.of(Row(i, (0,) * new, context - new, table, True) for i, table in enumerate(tables))


def _random(*shape: int) -> Any:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)
