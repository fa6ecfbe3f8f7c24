"""Attention over the paged KV cache: one kernel for decoding and for prompts in chunks.

    program   (tile, KV head, split)
    tile      up to TOKENS new tokens of one row, with all query heads that share the KV head: one
              matrix of BLOCK_ROWS queries, so that keys and values are read once for all of them
    split     a part of the positions to which the tile attends

A program writes the result if there is only one split. Otherwise each program writes its sum and
the state of its softmax, and ``merge_splits`` combines them. The number of programs depends on the
number of tiles but not on the lengths of the rows. A program without tokens ends at once.

Keys and values of positions to which the tile does not attend are not read: they may be NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.number_formats import from_e4m3

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_tiles(
    out,
    sums,
    states,
    query,
    cache,
    sinks,
    tile_rows,
    tile_offsets,
    firsts,
    starts,
    counts,
    tables,
    table_width,
    query_token_stride,
    query_head_stride,
    block_stride,
    value_offset,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Write the attention of tiles to ``out`` [tokens, HEADS, HEAD_DIM], or to sums and states.

    With several splits the results are ``sums`` fp32 [tiles * TOKENS, HEADS, SPLITS, HEAD_DIM] and
    ``states`` fp32 [tiles * TOKENS, HEADS, SPLITS, 2]. A state is the largest score, times log2(e),
    and the sum of the weights relative to it.

    ``query`` is [tokens, HEADS, HEAD_DIM]. ``cache`` points to one layer's keys of block 0; the
    values of a block begin ``value_offset`` elements after its keys. With IS_FP8 they are codes of
    e4m3.

    Row i has ``counts[i]`` tokens; a row with count 0 writes nothing. Its first token has the index
    ``firsts[i]`` in the step and the position ``starts[i]`` in its sequence. Block ids are
    ``tables`` [rows, ``table_width[0]``]. Tile j belongs to row ``tile_rows[j]`` and begins with
    that row's token ``tile_offsets[j]``.

    worker.attention.backend.AttentionForm defines ``scale``, ``softcap``, ``window`` and ``sinks``.
    """
    # The last tile of a row attends to the most positions and takes longest. It starts first, so
    # that shorter tiles occupy the processors that become idle at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    row = tl.load(tile_rows + tile)
    offset = tl.load(tile_offsets + tile)
    count = tl.load(counts + row)
    if offset >= count:
        return
    start = tl.load(starts + row)
    table = tables + row.to(tl.int64) * tl.load(table_width)
    kv_heads: tl.constexpr = HEADS // GROUP

    # The tile's queries are ordered by token, and by head within a token.
    lines = tl.arange(0, BLOCK_ROWS)
    tokens = offset + lines // GROUP
    heads = kv_head * GROUP + lines % GROUP
    is_query = (lines < TOKENS * GROUP) & (tokens < count)
    positions = start + tokens
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    sites = (tl.load(firsts + row) + tokens).to(tl.int64)
    queries = tl.load(
        query + (sites * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :],
        mask=is_query[:, None] & is_dim[None, :],
        other=0.0,
    )

    # The part of the positions [least, end) that this split computes.
    end = start + tl.minimum(offset + TOKENS, count)
    least = 0
    if HAS_WINDOW:
        least = tl.maximum(start + offset - window + 1, 0)
    first_key = least // BLOCK_KEYS * BLOCK_KEYS
    steps = tl.cdiv(tl.cdiv(end - first_key, BLOCK_KEYS), SPLITS)
    begin = first_key + split * steps * BLOCK_KEYS
    split_end = tl.minimum(begin + steps * BLOCK_KEYS, end)

    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    result = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    keys = begin + tl.arange(0, BLOCK_KEYS)
    is_key = (keys >= least) & (keys < end)
    blocks = tl.load(table + keys // BLOCK_SIZE, mask=is_key, other=0)
    for left in range(begin, split_end, BLOCK_KEYS):
        keys = left + tl.arange(0, BLOCK_KEYS)
        is_key = (keys >= least) & (keys < end)
        places = blocks.to(tl.int64) * block_stride
        places += (kv_head * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
        # Blocks of the next iteration are loaded now, so that their keys can be prefetched.
        behind = keys + BLOCK_KEYS
        is_behind = (behind >= least) & (behind < end)
        blocks = tl.load(table + behind // BLOCK_SIZE, mask=is_behind, other=0)
        key = tl.load(
            cache + places[None, :] + dims[:, None],
            mask=is_key[None, :] & is_dim[:, None],
            other=0,
        )
        if IS_FP8:
            key = from_e4m3(key, queries.dtype)
        scores = tl.dot(queries, key, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh(x) = 2 / (1 + exp(-2 x)) - 1
            scores = softcap * (2.0 / (1.0 + tl.exp(scores * (-2.0 / softcap))) - 1.0)
        scores = scores * LOG2_E
        seen = is_key[None, :] & (keys[None, :] <= positions[:, None])
        if HAS_WINDOW:
            seen = seen & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A query that has attended to no position so far has no largest score; its base is 0.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        faded = tl.exp2(largest - base)
        value = tl.load(
            cache + value_offset + places[:, None] + dims[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0,
        )
        if IS_FP8:
            value = from_e4m3(value, queries.dtype)
        total = total * faded + tl.sum(weights, 1)
        result = tl.dot(
            weights.to(value.dtype), value, acc=result * faded[:, None], input_precision="ieee"
        )
        largest = new_largest

    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=is_query, other=0.0) * LOG2_E
            top = tl.maximum(largest, sink)
            faded = tl.exp2(largest - top)
            total = total * faded + tl.exp2(sink - top)
            result = result * faded[:, None]
        # A line without a query has attended to no position; avoid a division by 0.
        total = tl.where(is_query, total, 1.0)
        tl.store(
            out + ((sites * HEADS + heads) * HEAD_DIM)[:, None] + dims[None, :],
            (result / total[:, None]).to(out.dtype.element_ty),
            mask=is_query[:, None] & is_dim[None, :],
        )
    else:
        token = tile.to(tl.int64) * TOKENS + lines // GROUP
        part = (token * (kv_heads * GROUP) + heads) * SPLITS + split
        tl.store(
            sums + (part * HEAD_DIM)[:, None] + dims[None, :],
            result,
            mask=is_query[:, None] & is_dim[None, :],
        )
        tl.store(states + part * 2, largest, mask=is_query)
        tl.store(states + part * 2 + 1, total, mask=is_query)


@triton.jit
def merge_splits(
    out,
    sums,
    states,
    sinks,
    tile_rows,
    tile_offsets,
    firsts,
    counts,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the ``sums`` and ``states`` that attend_tiles wrote; write the attention to ``out``.

    There is one program per (place of a token in a tile, head): [tiles * TOKENS, HEADS]. A program
    whose place has no token ends at once.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    tile = token // TOKENS
    row = tl.load(tile_rows + tile)
    offset = tl.load(tile_offsets + tile) + token % TOKENS
    if offset >= tl.load(counts + row):
        return
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    parts = (token.to(tl.int64) * HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    largest = tl.load(states + parts * 2)
    totals = tl.load(states + parts * 2 + 1)
    top = tl.max(largest, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        top = tl.maximum(top, sink)
    factors = tl.exp2(largest - top)
    total = tl.sum(factors * totals, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    added = tl.load(
        sums + (parts * HEAD_DIM)[:, None] + dims[None, :], mask=is_dim[None, :], other=0.0
    )
    result = tl.sum(added * factors[:, None], 0) / total
    site = (tl.load(firsts + row) + offset).to(tl.int64)
    tl.store(
        out + (site * HEADS + head) * HEAD_DIM + dims,
        result.to(out.dtype.element_ty),
        mask=is_dim,
    )
