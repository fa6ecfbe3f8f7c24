"""Choice of third-party attention kernels for prompts.

Only kernels of an installed library that supports the KV cache and passes a trial are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache as cache_of
from random import Random
from typing import NamedTuple

import torch

from everlift import logs
from everlift.hashes import BLOCK_SIZE
from worker.attention.backend import AttentionForm
from worker.attention.flash_attention import FlashAttention3
from worker.attention.flash_infer import FlashInfer
from worker.attention.prompts import (
    Feature,
    PromptBackend,
    PromptKernels,
    Prompts,
    PromptTensors,
    bounds_of,
)
from worker.attention.reference import ReferenceAttention
from worker.device.kv_cache import KVCache
from worker.device.upload import upload
from worker.engine.limits import blocks_for
from worker.engine.plan import Row, Rows

log = logs.get_logger(__name__)

BackendClass = type[FlashAttention3] | type[FlashInfer]
#: The backends in order of preference: the first one that works is used.
BACKENDS: tuple[BackendClass, ...] = (FlashAttention3, FlashInfer)
_LAYERS, _LAYER = 2, 1
#: Position of the first new token and number of new tokens of each row in a trial: a whole prompt,
#: a later chunk of a prompt, a single token, and a chunk that begins and ends within a block.
_SHAPES = ((0, 70), (45, 40), (33, 1), (5, 20))
_BLOCKS = sum(blocks_for(sum(shape)) for shape in _SHAPES)
_SEED = 8
#: Numbers of query heads per KV head in a trial.
_GROUPS = (1, 4)
_WINDOW, _SOFTCAP = 37, 3.0
#: Largest relative error of a head's output. Rounding to bf16 causes about a quarter of it.
_LARGEST_ERROR = 0.02


class _CacheKind(NamedTuple):
    """Properties of a KV cache that determine whether third-party kernels work with the cache."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def cache(self, num_blocks: int, num_layers: int) -> KVCache:
        return KVCache(num_blocks, num_layers, *self)


def choose_prompt_kernels(cache: KVCache) -> PromptKernels | None:
    """Return the third-party kernels for prompts, or None if Everlift's own must be used.

    If an installed library fails, the cause is logged. Nothing is logged about a library that does
    not support the head dimension, dtype or GPU.
    """
    return next(filter(None, (try_backend(backend, cache) for backend in BACKENDS)), None)


def try_backend(backend_class: BackendClass, cache: KVCache) -> PromptKernels | None:
    """Return the kernels of a backend, or None if they cannot be used with ``cache``.

    The library may be missing, may not support the cache or device, or may fail its trial.
    """
    tensor = cache.tensor
    kind = _CacheKind(cache.kv_heads, tensor.shape[-1], tensor.dtype, tensor.device)
    return _try_cached(backend_class, kind)  # type: ignore[arg-type]  # a class can be hashed


@cache_of
def _try_cached(backend_class: BackendClass, kind: _CacheKind) -> PromptKernels | None:
    try:
        if not backend_class.fits(kind.head_dim, kind.dtype, kind.device):
            return None
        backend = backend_class(kind.device)
    except ModuleNotFoundError:
        return None
    except Exception as error:
        log.warning("attention library not usable", library=backend_class.name, cause=repr(error))
        return None
    features = {feature for feature in _features() if _works(backend, kind, feature)}
    return PromptKernels(backend, features) if Feature(False, False) in features else None


def _features() -> Iterator[Feature]:
    return (Feature(window, softcap) for window in (False, True) for softcap in (False, True))


def _works(backend: PromptBackend, kind: _CacheKind, feature: Feature) -> bool:
    try:
        worst = max(_error(backend, kind, feature, group) for group in _GROUPS)
    except Exception as error:
        facts = {"library": backend.name, **feature._asdict()}
        log.warning("trial of attention library failed", **facts, cause=repr(error))
        return False
    if not worst <= _LARGEST_ERROR:
        facts = {"library": backend.name, **feature._asdict()}
        log.warning("attention library gave wrong results in its trial", **facts, error=worst)
        return False
    return True


@torch.inference_mode()
def _error(backend: PromptBackend, kind: _CacheKind, feature: Feature, group: int) -> float:
    rows = _rows()
    form = AttentionForm(
        kind.head_dim**-0.5,
        window=_WINDOW if feature.window else None,
        softcap=_SOFTCAP if feature.softcap else None,
    )
    random = torch.Generator().manual_seed(_SEED)
    num_query = kind.kv_heads * group
    shape = (rows.num_tokens, num_query + kind.kv_heads, kind.head_dim)
    # The queries are a slice of a tensor that also has the keys, as in a step.
    query = torch.randn(shape, generator=random).to(kind.device, kind.dtype)[:, :num_query]
    cache = _filled(kind, rows, random)
    theirs = backend.prepare(_prompts(rows, kind.device)).attend(cache.layer(_LAYER), query, form)
    cache.tensor.nan_to_num_()
    # ReferenceAttention.prepare clears blocks whose first position a row writes. Restore them.
    kept = cache.tensor.clone()
    step = ReferenceAttention(cache).prepare(rows)
    cache.tensor.copy_(kept)
    right = step.attend(_LAYER, query, form).float()
    error = (theirs.float() - right).norm(dim=-1) / right.norm(dim=-1)
    return float(error.nan_to_num(nan=torch.inf).max())


def _rows() -> Rows:
    free = iter(Random(_SEED).sample(range(_BLOCKS), _BLOCKS))
    return Rows.of(
        Row(
            slot, (0,) * new, start, tuple(next(free) for _ in range(blocks_for(start + new))), True
        )
        for slot, (start, new) in enumerate(_SHAPES)
    )


def _filled(kind: _CacheKind, rows: Rows, random: torch.Generator) -> KVCache:
    cache = kind.cache(_BLOCKS, _LAYERS)
    layer = cache.tensor.fill_(torch.nan)[:, _LAYER]
    for row in rows:
        end = row.start + len(row.tokens)
        for index, block in enumerate(row.block_table):
            part = layer[block, :, :, : end - index * BLOCK_SIZE]
            part.copy_(torch.randn(part.shape, generator=random))
    return cache


def _prompts(rows: Rows, device: torch.device) -> Prompts:
    lengths, tables = rows.starts + rows.counts, rows.tables[rows.slots]
    columns = bounds_of(rows.counts), lengths, tables
    tensors = PromptTensors(*(upload(column, device, torch.int32) for column in columns))
    return Prompts(rows.counts, lengths, tables, tensors)
