"""Kernel that rotates queries and keys by position and writes keys and values to their blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.number_formats import to_e4m3


@triton.jit
def turn_and_place(
    rotated,
    value,
    cos,
    sin,
    cache,
    row_of_token,
    positions,
    tables,
    table_width,
    rotated_token_stride,
    rotated_head_stride,
    value_token_stride,
    value_head_stride,
    angle_stride,
    block_stride,
    value_offset,
    NUM_QUERY: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Rotate queries in place, and write rotated keys and values to the cache.

    There is one program per (token, BLOCK_HEADS heads). The heads are those of ``rotated`` [tokens,
    NUM_QUERY + KV_HEADS, HEAD_DIM], queries before keys, followed by those of ``value`` [tokens,
    KV_HEADS, HEAD_DIM]. ``cache`` points to one layer's keys of block 0; the values of a block
    begin ``value_offset`` elements after its keys. Token t belongs to row ``row_of_token[t]`` of
    ``tables`` [rows, ``table_width[0]``], which has the ids of its blocks. IS_FP8 means that the
    cache gets codes of e4m3. Nothing is written for a token with a negative position.

    ``cos`` and ``sin`` fp32 [tokens, 2 * HALF] are an Angle of worker.model.rope. The features i
    and i + HALF of a head are rotated as a pair. Columns i and i + HALF of ``cos`` have the cosine
    of the pair's angle. Column i of ``sin`` has its negated sine, and column i + HALF its sine.
    Features from 2 * HALF on are not rotated; if HALF is 0, nothing is rotated.
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if position < 0:
        return
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    num_rotated: tl.constexpr = NUM_QUERY + KV_HEADS
    is_query = heads < NUM_QUERY
    is_key = (heads >= NUM_QUERY) & (heads < num_rotated)
    is_value = (heads >= num_rotated) & (heads < num_rotated + KV_HEADS)

    table = tables + tl.load(row_of_token + token).to(tl.int64) * tl.load(table_width)
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    kv_heads = (heads - NUM_QUERY) % KV_HEADS
    places = (kv_heads * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
    place = (cache + block * block_stride + places)[:, None]
    source = (rotated + token * rotated_token_stride + heads * rotated_head_stride)[:, None]
    if HALF > 0:
        # One thread handles both features of a pair, so nothing is read after it was overwritten.
        pairs = tl.arange(0, BLOCK_HALF)[None, :]
        is_pair = pairs < HALF
        is_rotated = (heads < num_rotated)[:, None] & is_pair
        first = tl.load(source + pairs, mask=is_rotated, other=0.0)
        second = tl.load(source + HALF + pairs, mask=is_rotated, other=0.0)
        x, y = first.to(tl.float32), second.to(tl.float32)
        angle = token * angle_stride + pairs
        left = x * tl.load(cos + angle, mask=is_pair, other=0.0)
        left += y * tl.load(sin + angle, mask=is_pair, other=0.0)
        right = y * tl.load(cos + HALF + angle, mask=is_pair, other=0.0)
        right += x * tl.load(sin + HALF + angle, mask=is_pair, other=0.0)
        left, right = left.to(first.dtype), right.to(first.dtype)
        tl.store(source + pairs, left, mask=is_query[:, None] & is_pair)
        tl.store(source + HALF + pairs, right, mask=is_query[:, None] & is_pair)
        tl.store(place + pairs, _cached(left, IS_FP8), mask=is_key[:, None] & is_pair)
        tl.store(place + HALF + pairs, _cached(right, IS_FP8), mask=is_key[:, None] & is_pair)
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    if 2 * HALF < HEAD_DIM:
        is_rest = is_key[:, None] & (dims >= 2 * HALF) & (dims < HEAD_DIM)
        rest = tl.load(source + dims, mask=is_rest)
        tl.store(place + dims, _cached(rest, IS_FP8), mask=is_rest)
    given = (value + token * value_token_stride + (heads - num_rotated) * value_head_stride)[
        :, None
    ]
    is_given = is_value[:, None] & (dims < HEAD_DIM)
    values = tl.load(given + dims, mask=is_given)
    tl.store(place + value_offset + dims, _cached(values, IS_FP8), mask=is_given)


@triton.jit
def _cached(numbers, IS_FP8: tl.constexpr):
    return to_e4m3(numbers.to(tl.float32)) if IS_FP8 else numbers
