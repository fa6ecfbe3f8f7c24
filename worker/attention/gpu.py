"""Attention on a GPU, by kernels in Triton (worker.kernels.paged_attention, .placing).

A block lies as the cache's shape says. One parcel a step tells the kernels of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as cache_of
from functools import partial

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
from worker.upload import Parcel


class GpuAttention:
    """The AttentionBackend on a GPU with ``multiprocessors``, and the DecodingBackend of its
    graphs."""

    def __init__(self, cache: KVCache, multiprocessors: int) -> None:
        self._cache = cache
        self._device = cache.tensor.device
        self._multiprocessors = multiprocessors
        #: query heads to a KV head, as layers have had them
        self._groups: set[int] = set()

    def prepare(self, rows: Rows, parcel: Parcel | None = None) -> GpuStep:
        return self._step(parcel or Parcel(self._device), rows.counts, partial(_row_table, rows))

    def decoding(self, positions: Tensor, counts: Tensor, tables: Tensor, width: Tensor) -> GpuStep:
        rows = torch.arange(len(positions), dtype=torch.int32, device=self._device)
        table = RowTable(rows, positions, counts, tables, width, rows, positions)
        once = np.ones(len(positions), np.int64)
        return self._step(Parcel(self._device), once, lambda _: lambda: table)

    def _step(
        self, parcel: Parcel, counts: Ints, table: Callable[[Parcel], Callable[[], RowTable]]
    ) -> GpuStep:
        """What the layers will want is in ``parcel``, but for tiles of the first step of all."""
        known = {group: self._tile_sets(counts, group, parcel) for group in self._groups}

        def tile_sets(group: int) -> list[TileSet]:
            self._groups.add(group)
            sets = known.get(group) or self._tile_sets(counts, group, Parcel(self._device))
            return [each() for each in sets]

        return GpuStep(self._cache, table(parcel), tile_sets)

    def _tile_sets(self, counts: Ints, group: int, parcel: Parcel) -> list[Callable[[], TileSet]]:
        """Of rows with ``counts`` [n] tokens, ``group`` query heads to a KV head. Decoding and
        prompts are separate launches: either would waste the other's tiles."""
        chosen = ((narrow_rows(counts), NARROW), (wide_rows(counts), WIDE))
        return [
            self._tile_set(counts, rows, least, group, parcel)
            for rows, least in chosen
            if len(rows)
        ]

    def _tile_set(
        self, counts: Ints, rows: Ints, least: int, group: int, parcel: Parcel
    ) -> Callable[[], TileSet]:
        block_rows, splits = max(least, power_of_two(group)), 1
        tokens = tokens_of_tiles(counts[rows], block_rows // group)
        tiles = tiles_of(counts, rows, tokens)
        if least == NARROW:
            splits = num_splits(len(tiles), self._cache.kv_heads, self._multiprocessors)
        row_of_tile, offsets = (
            parcel.add(column.astype(np.int32)) for column in (tiles.rows, tiles.offsets)
        )
        return lambda: TileSet(row_of_tile(), offsets(), tokens, block_rows, splits)


class GpuStep:
    """StepAttention over one KVCache. ``table`` and ``tile_sets``, which has those of all rows for
    a number of query heads to a KV head, are on the device once they are asked for."""

    def __init__(
        self,
        cache: KVCache,
        table: Callable[[], RowTable],
        tile_sets: Callable[[int], list[TileSet]],
    ) -> None:
        self._cache = cache
        self._table = cache_of(table)
        self._tile_sets = cache_of(tile_sets)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        place(self._cache, layer, self._table(), key, value, 0, None)

    def turn_and_write(
        self, layer: int, turned: Tensor, num_query: int, value: Tensor, angle: Angle
    ) -> Tensor:
        """Of the heads ``turned`` [tokens, heads, head_dim] the first ``num_query`` are queries, in
        whose place they are turned, and which are returned; the others are keys, which go turned to
        the cache, as does ``value``."""
        assert turned.stride(2) == 1, "a copy would be turned"
        place(self._cache, layer, self._table(), turned, value, num_query, angle)
        return turned[:, :num_query]

    def attend(self, layer: int, query: Tensor, form: AttentionForm) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for tiles in self._tile_sets(query.shape[1] // self._cache.kv_heads):
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
    return lambda: RowTable(*(each() for each in sent))
