"""Attention on a GPU, by kernels in Triton (worker.kernels.paged_attention, .rotate_and_cache).

The shape of KVCache is the layout of its blocks. The data that describes the rows of a step to the
kernels is copied to the device in one parcel (worker.device.upload). Prompts may be computed by
third-party kernels (worker.attention.prompts).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as cache_of
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.attention.backend import AttentionForm
from worker.attention.gpu_launch import (
    NARROW,
    WIDE,
    RowTable,
    TileSet,
    attend,
    place,
    power_of_two,
)
from worker.attention.prompts import PromptAttention, PromptKernels, span_of_prompts
from worker.attention.tiles import (
    narrow_rows,
    num_splits,
    tiles_of,
    tokens_of_tiles,
    wide_rows,
)
from worker.device.kv_cache import KVCache
from worker.device.upload import Parcel
from worker.engine.limits import blocks_for
from worker.engine.plan import Ints, Rows
from worker.model.rope import Angle


class TileKey(NamedTuple):
    """Key of a step's tiles (attention/tiles.py) for layers with ``group`` query heads per KV head.

    If ``is_for_all`` is true, the tiles cover all rows of the step. Otherwise they cover only the
    rows that no third-party kernel computes.
    """

    group: int
    is_for_all: bool


_TileSets = Callable[[TileKey], list[TileSet]]


class GpuAttention:
    """AttentionBackend for a GPU, which is also a DecodingBackend for the capture of CUDA graphs.

    ``multiprocessors`` is the number of the GPU's multiprocessors. ``prompt_kernels``, if given,
    compute the attention of rows with many new tokens.
    """

    def __init__(
        self, cache: KVCache, multiprocessors: int, prompt_kernels: PromptKernels | None = None
    ) -> None:
        self._cache = cache
        self._device = cache.tensor.device
        self._multiprocessors = multiprocessors
        self._prompt_kernels = prompt_kernels
        #: tiles that layers have requested so far
        self._requested: set[TileKey] = set()

    @property
    def name(self) -> str:
        ours, kernels = type(self).__name__, self._prompt_kernels
        return ours if kernels is None else f"{ours}, prompts by {kernels.name}"

    def prepare(self, rows: Rows, parcel: Parcel | None = None) -> GpuStep:
        parcel = parcel or Parcel(self._device)
        table, span, prompts = _row_table(rows, parcel), None, None
        if self._prompt_kernels is not None:
            span = span_of_prompts(rows.counts)
        if self._prompt_kernels is not None and span is not None:
            prompts = self._prompt_kernels.of_step(rows, span, lambda: table().tables[span], parcel)
        tile_sets = self._tile_sets(rows.counts, span, parcel)
        return GpuStep(self._cache, table, tile_sets, prompts)

    def decoding(self, positions: Tensor, counts: Tensor, tables: Tensor, width: Tensor) -> GpuStep:
        rows = torch.arange(len(positions), dtype=torch.int32, device=self._device)
        table = RowTable(rows, positions, counts, tables, width, rows, positions)
        once = np.ones(len(positions), np.int64)
        tile_sets = self._tile_sets(once, None, Parcel(self._device))
        return GpuStep(self._cache, lambda: table, tile_sets, None)

    def _tile_sets(self, counts: Ints, span: slice | None, parcel: Parcel) -> _TileSets:
        """Return a function that maps a TileKey to its tile sets on the device.

        The rows have ``counts`` [n] new tokens. Rows in ``span`` may be computed by third-party
        kernels. Tile sets with the keys that earlier steps requested are added to ``parcel``. Tile
        sets with other keys are copied to the device when they are requested.
        """
        likely = (key for key in self._requested if key.is_for_all or span is not None)
        known = {key: self._sent(counts, span, key, parcel) for key in likely}

        def tile_sets(tile_key: TileKey) -> list[TileSet]:
            self._requested.add(tile_key)
            sent = known.get(tile_key) or self._sent(counts, span, tile_key, Parcel(self._device))
            return [tiles() for tiles in sent]

        return tile_sets

    def _sent(
        self, counts: Ints, span: slice | None, tile_key: TileKey, parcel: Parcel
    ) -> list[Callable[[], TileSet]]:
        """Add the tile sets of ``tile_key`` to ``parcel``; return a getter of each TileSet.

        ``counts`` and ``span`` are those of ``_tile_sets``. There are at most two tile sets: the
        kernel is launched separately for rows with few new tokens and for the other rows.
        """
        is_ours = np.ones(len(counts), np.bool_)
        if span is not None and not tile_key.is_for_all:
            is_ours[span] = False
        chosen = ((narrow_rows(counts), NARROW), (wide_rows(counts), WIDE))
        ours = ((rows[is_ours[rows]], min_queries) for rows, min_queries in chosen)
        return [
            self._tile_set(counts, rows, min_queries, tile_key.group, parcel)
            for rows, min_queries in ours
            if len(rows)
        ]

    def _tile_set(
        self, counts: Ints, rows: Ints, min_queries: int, group: int, parcel: Parcel
    ) -> Callable[[], TileSet]:
        block_rows, splits = max(min_queries, power_of_two(group)), 1
        tokens = tokens_of_tiles(counts[rows], block_rows // group)
        tiles = tiles_of(counts, rows, tokens)
        if min_queries == NARROW:
            splits = num_splits(len(tiles), self._cache.kv_heads, self._multiprocessors)
        row_of_tile, offsets = (
            parcel.add(column.astype(np.int32)) for column in (tiles.rows, tiles.offsets)
        )
        return lambda: TileSet(row_of_tile(), offsets(), tokens, block_rows, splits)


class GpuStep:
    """StepAttention of GpuAttention.

    ``table`` and ``tile_sets`` are functions that return data on the device; they are called when
    the data is first needed. ``prompts``, if given, computes the attention of some of the rows.
    """

    def __init__(
        self,
        cache: KVCache,
        table: Callable[[], RowTable],
        tile_sets: _TileSets,
        prompts: PromptAttention | None,
    ) -> None:
        self._cache = cache
        self._table = cache_of(table)
        self._tile_sets = cache_of(tile_sets)
        self._prompts = prompts

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        place(self._cache, layer, self._table(), key, value, 0, None)

    def rotate_and_write(
        self, layer: int, rotated: Tensor, num_query: int, value: Tensor, angle: Angle
    ) -> Tensor:
        """Rotate queries in place and return them; write rotated keys and ``value`` to the cache.

        ``rotated`` [tokens, heads, head_dim] has ``num_query`` query heads followed by the key
        heads.
        """
        assert rotated.stride(2) == 1, "a copy would be rotated"
        place(self._cache, layer, self._table(), rotated, value, num_query, angle)
        return rotated[:, :num_query]

    def attend(self, layer: int, query: Tensor, form: AttentionForm) -> Tensor:
        if self._prompts is None:
            return self._attend(layer, query, form, is_for_all=True)
        attended = self._prompts.attend(self._cache.layer(layer), query, form)
        if attended is None:
            return self._attend(layer, query, form, is_for_all=True)
        if len(attended) == len(query):
            return attended
        out = self._attend(layer, query, form, is_for_all=False)
        out[self._prompts.tokens] = attended
        return out

    def _attend(self, layer: int, query: Tensor, form: AttentionForm, is_for_all: bool) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        tile_key = TileKey(query.shape[1] // self._cache.kv_heads, is_for_all)
        for tiles in self._tile_sets(tile_key):
            attend(self._cache, layer, self._table(), tiles, query, form, out)
        return out


def _row_table(rows: Rows, parcel: Parcel) -> Callable[[], RowTable]:
    width = blocks_for(int((rows.starts + rows.counts).max()))
    sent = [
        parcel.add(column.astype(np.int32))
        for column in (
            rows.firsts,
            rows.starts,
            rows.counts,
            rows.tables[rows.slots, :width],
            np.array([width]),
            rows.spread(np.arange(len(rows))),
            rows.positions,
        )
    ]
    return lambda: RowTable(*(column() for column in sent))
