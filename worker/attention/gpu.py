"""Attention on a GPU, by kernels in Triton (worker.kernels.paged_attention, .placing).

A block lies as the cache's shape says. One upload a step tells the kernels of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as cache_of

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
from worker.attention.tiles import (
    narrow_rows,
    num_splits,
    tiles_of,
    tokens_of_tiles,
    wide_rows,
)
from worker.kv_cache import KVCache
from worker.limits import blocks_for
from worker.model.rope import Angle
from worker.plan import Ints, Rows
from worker.upload import upload_all


class GpuAttention:
    """The AttentionBackend on a GPU with ``multiprocessors``, and the DecodingBackend of its
    graphs."""

    def __init__(self, cache: KVCache, multiprocessors: int) -> None:
        self._cache = cache
        self._device = cache.tensor.device
        self._multiprocessors = multiprocessors

    def prepare(self, rows: Rows) -> GpuStep:
        table = _row_table(rows, self._device)
        return GpuStep(self._cache, table, lambda group: self._tile_sets(rows.counts, group))

    def decoding(self, positions: Tensor, counts: Tensor, tables: Tensor, width: Tensor) -> GpuStep:
        rows = torch.arange(len(positions), dtype=torch.int32, device=self._device)
        table = RowTable(rows, positions, counts, tables, width, rows, positions)
        once = np.ones(len(positions), np.int64)
        return GpuStep(self._cache, table, lambda group: self._tile_sets(once, group))

    def _tile_sets(self, counts: Ints, group: int) -> list[TileSet]:
        """Of rows with ``counts`` [n] tokens, ``group`` query heads to a KV head. Decoding and
        prompts are separate launches: either would waste the other's tiles."""
        chosen = ((narrow_rows(counts), NARROW), (wide_rows(counts), WIDE))
        return [self._tile_set(counts, rows, least, group) for rows, least in chosen if len(rows)]

    def _tile_set(self, counts: Ints, rows: Ints, least: int, group: int) -> TileSet:
        block_rows, splits = max(least, power_of_two(group)), 1
        tokens = tokens_of_tiles(counts[rows], block_rows // group)
        tiles = tiles_of(counts, rows, tokens)
        if least == NARROW:
            splits = num_splits(len(tiles), self._cache.kv_heads, self._multiprocessors)
        row_of_tile, offsets = upload_all([tiles.rows, tiles.offsets], self._device)
        return TileSet(row_of_tile, offsets, tokens, block_rows, splits)


class GpuStep:
    """StepAttention over one KVCache. ``tile_sets`` makes those of all rows for a number of query
    heads to a KV head."""

    def __init__(
        self, cache: KVCache, table: RowTable, tile_sets: Callable[[int], list[TileSet]]
    ) -> None:
        self._cache = cache
        self._table = table
        self._tile_sets = cache_of(tile_sets)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        place(self._cache, layer, self._table, key, value, 0, None)

    def turn_and_write(
        self, layer: int, turned: Tensor, num_query: int, value: Tensor, angle: Angle
    ) -> Tensor:
        """Of the heads ``turned`` [tokens, heads, head_dim] the first ``num_query`` are queries, in
        whose place they are turned, and which are returned; the others are keys, which go turned to
        the cache, as does ``value``."""
        assert turned.stride(2) == 1, "a copy would be turned"
        place(self._cache, layer, self._table, turned, value, num_query, angle)
        return turned[:, :num_query]

    def attend(self, layer: int, query: Tensor, form: AttentionForm) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for tiles in self._tile_sets(query.shape[1] // self._cache.kv_heads):
            attend(self._cache, layer, self._table, tiles, query, form, out)
        return out


def _row_table(rows: Rows, device: torch.device) -> RowTable:
    width = blocks_for(int((rows.starts + rows.counts).max()))
    return RowTable(
        *upload_all(
            [
                rows.firsts,
                rows.starts,
                rows.counts,
                rows.tables[rows.slots, :width],
                np.array([width]),
                rows.spread(np.arange(len(rows))),
                rows.positions,
            ],
            device,
        )
    )
