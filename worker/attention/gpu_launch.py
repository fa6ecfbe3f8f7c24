"""Launches of the attention kernels, each for one layer of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everlift.hashes import BLOCK_SIZE
from worker.attention.backend import AttentionForm
from worker.device.kv_cache import FP8_CODES, KVCache
from worker.kernels.paged_attention import attend_tiles, merge_splits
from worker.kernels.rotate_and_cache import turn_and_place
from worker.model.rope import Angle

#: Number of queries of a narrow tile (the minimum for tensor cores) and of a wide tile.
NARROW, WIDE = 16, 64
#: Number of keys that a program reads per iteration, for narrow and for wide tiles, and the maximum
#: size of these keys in bytes. A multiprocessor of an Ada GPU has 99 KiB for all data of its
#: program. In single precision the maximum size is half of this, because the products are computed
#: in registers, without tensor cores.
_NARROW_KEYS, _WIDE_KEYS, _KEY_BYTES = 32, 64, 16 << 10
_LEAST_KEYS = 16
#: Sizes of a key in bytes: of 128 features in half precision, and of 256 features in single
#: precision. Wide tiles whose keys are larger than the first size, or in single precision, prefetch
#: less, and use more warps, because the results are held in registers. Wide tiles whose keys have
#: at least the second size prefetch nothing.
_COMMON_BYTES, _LARGE_BYTES = 256, 1024
#: Number of heads of a token that one program rotates or writes to the cache.
_HEADS = 8


@dataclass(frozen=True, slots=True, eq=False)
class TileSet:
    """Tiles on the device that one launch computes, each with up to ``tokens`` tokens of one row.

    ``rows`` int32 [m] has each tile's row, and ``offsets`` int32 [m] the index of its first token
    in the row. A tile's queries of one KV head are padded to ``block_rows`` queries. The positions
    that a tile sees are divided among ``splits`` programs.
    """

    rows: Tensor
    offsets: Tensor
    tokens: int
    block_rows: int
    splits: int


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Rows of a step on the device, as int32 tensors.

    Row i has ``counts[i]`` tokens. The first of them has the index ``firsts[i]`` in the step and
    the position ``starts[i]`` in its sequence. ``tables`` [n, ``width``] has the blocks of each
    row; in a captured step it is flat, [n * ``width``] or longer. ``row_of_token`` [T] and
    ``positions`` [T] have the row and the position of each token. The position is negative if
    nothing is to be written to the cache.
    """

    firsts: Tensor
    starts: Tensor
    counts: Tensor
    tables: Tensor
    #: number of columns of ``tables``, [1]
    width: Tensor
    row_of_token: Tensor
    positions: Tensor


def place(
    cache: KVCache,
    layer: int,
    table: RowTable,
    rotated: Tensor,
    value: Tensor,
    num_query: int,
    angle: Angle | None,
) -> None:
    """Launch the kernel that rotates queries and keys and writes keys and values to the cache.

    ``rotated`` [tokens, heads, head_dim] has ``num_query`` query heads followed by the key heads.
    Its queries are rotated in place; its keys are rotated only in the cache. ``value`` is [tokens,
    kv_heads, head_dim]. Nothing is rotated if ``angle`` is None. Each head of ``rotated`` must be
    contiguous if there are query heads, because a copy would be rotated otherwise.
    """
    rotated, value = _contiguous_heads(rotated), _contiguous_heads(value)
    keys = cache.layer(layer)
    kv_heads, head_dim = value.shape[1:]
    cos, sin = (value, value) if angle is None else angle
    half = 0 if angle is None else cos.shape[-1] // 2
    turn_and_place[(len(value), -(-(num_query + 2 * kv_heads) // _HEADS))](
        rotated,
        value,
        cos,
        sin,
        keys,
        table.row_of_token,
        table.positions,
        table.tables,
        table.width,
        rotated.stride(0),
        rotated.stride(1),
        value.stride(0),
        value.stride(1),
        2 * half,
        keys.stride(0),
        keys.stride(1),
        NUM_QUERY=num_query,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=power_of_two(head_dim),
        HALF=half,
        BLOCK_HALF=power_of_two(max(1, half)),
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_HEADS=_HEADS,
        IS_FP8=keys.dtype == FP8_CODES,
        num_warps=1,
    )


def attend(
    cache: KVCache,
    layer: int,
    table: RowTable,
    tiles: TileSet,
    query: Tensor,
    form: AttentionForm,
    out: Tensor,
) -> None:
    """Launch the kernels that write to ``out`` the attention of ``tiles`` in one layer.

    ``query`` and ``out`` [tokens, heads, head_dim] contain all tokens of the step; ``out`` is
    contiguous.
    """
    query = _contiguous_heads(query)
    keys = cache.layer(layer)
    num_tiles, heads, head_dim = len(tiles.rows), *query.shape[1:]
    sums, states = _split_buffers(tiles, heads, head_dim, query.device)
    sinks = None if form.sinks is None else form.sinks.float()
    described: dict[str, Any] = {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": max(16, power_of_two(head_dim)),
        "TOKENS": tiles.tokens,
        "SPLITS": tiles.splits,
        "HAS_SINKS": sinks is not None,
    }
    attend_tiles[(num_tiles, cache.kv_heads, tiles.splits)](
        out,
        sums,
        states,
        query,
        keys,
        out if sinks is None else sinks,
        tiles.rows,
        tiles.offsets,
        table.firsts,
        table.starts,
        table.counts,
        table.tables,
        table.width,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        form.scale,
        form.softcap or 0.0,
        form.window or 0,
        **described,
        GROUP=heads // cache.kv_heads,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_ROWS=tiles.block_rows,
        HAS_WINDOW=form.window is not None,
        HAS_SOFTCAP=form.softcap is not None,
        IS_FP8=keys.dtype == FP8_CODES,
        **_program(tiles, described["BLOCK_DIM"], query.element_size()),
    )
    if tiles.splits > 1:
        merge_splits[(num_tiles * tiles.tokens, heads)](
            out,
            sums,
            states,
            out if sinks is None else sinks,
            tiles.rows,
            tiles.offsets,
            table.firsts,
            table.counts,
            **described,
            num_warps=4,
        )


def _program(tiles: TileSet, dim: int, item_bytes: int) -> dict[str, int]:
    """Return launch arguments of attend_tiles: BLOCK_KEYS, num_warps and num_stages.

    ``dim`` is the padded head dimension, and ``item_bytes`` the size of an element of the queries.
    """
    is_wide, key_bytes = tiles.block_rows > NARROW, dim * item_bytes
    is_single = item_bytes == 4
    most_bytes = _KEY_BYTES // 2 if is_single else _KEY_BYTES
    most = _WIDE_KEYS if is_wide else _NARROW_KEYS
    num_keys = max(_LEAST_KEYS, min(most, most_bytes // key_bytes))
    if is_wide and key_bytes >= _LARGE_BYTES:
        num_warps = 16 if is_single else 8
        return {"BLOCK_KEYS": num_keys, "num_warps": num_warps, "num_stages": 1}
    if is_wide and (key_bytes > _COMMON_BYTES or is_single):
        return {"BLOCK_KEYS": num_keys, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_KEYS": num_keys, "num_warps": 4, "num_stages": 3}


def _split_buffers(
    tiles: TileSet, heads: int, head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    if tiles.splits == 1:
        nothing = torch.empty(1, device=device)
        return nothing, nothing
    parts = len(tiles.rows) * tiles.tokens * heads * tiles.splits
    return torch.empty(parts, head_dim, device=device), torch.empty(parts, 2, device=device)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def _contiguous_heads(heads: Tensor) -> Tensor:
    """Return ``heads`` [tokens, heads, head_dim], copied unless each head is contiguous."""
    return heads if heads.stride(2) == 1 else heads.contiguous()
