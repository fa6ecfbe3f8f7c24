"""Queries and keys are turned by their position's angle; keys and values go to their blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn_and_place(
    turned,
    value,
    cos,
    sin,
    cache,
    row_of_token,
    positions,
    tables,
    table_width,
    turned_token_stride,
    turned_head_stride,
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
):
    """A program for each (token, head) of ``turned`` [tokens, NUM_QUERY + KV_HEADS, HEAD_DIM], the
    queries' heads and then the keys', and of ``value`` [tokens, KV_HEADS, HEAD_DIM]. Queries are
    turned where they are; keys go turned, and values as they are, to ``cache``, which points to one
    layer's keys of block 0. Of a token at a negative position nothing is written.

    ``cos`` and ``sin`` fp32 [tokens, 2 * HALF] are the Angle of model.rope; with HALF 0 nothing is
    turned, and features from 2 * HALF on are not.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    if position < 0:
        return
    place = cache
    if head >= NUM_QUERY:
        row = tl.load(row_of_token + token).to(tl.int64)
        table = tables + row * tl.load(table_width)
        block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        kv_head = (head - NUM_QUERY) % KV_HEADS
        place += block * block_stride
        place += (kv_head * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
    dims = tl.arange(0, BLOCK_DIM)
    if head >= NUM_QUERY + KV_HEADS:
        kv_head = head - NUM_QUERY - KV_HEADS
        source = value + token * value_token_stride + kv_head * value_head_stride
        plain = tl.load(source + dims, mask=dims < HEAD_DIM)
        tl.store(place + value_offset + dims, plain, mask=dims < HEAD_DIM)
    else:
        source = turned + token * turned_token_stride + head * turned_head_stride
        is_key = head >= NUM_QUERY
        if HALF > 0:
            # One thread has both of a pair: nothing is read after it was written.
            pairs = tl.arange(0, BLOCK_HALF)
            is_pair = pairs < HALF
            angle = token * angle_stride + pairs
            first = tl.load(source + pairs, mask=is_pair)
            second = tl.load(source + HALF + pairs, mask=is_pair)
            x, y = first.to(tl.float32), second.to(tl.float32)
            left = x * tl.load(cos + angle, mask=is_pair)
            left += y * tl.load(sin + angle, mask=is_pair)
            right = y * tl.load(cos + HALF + angle, mask=is_pair)
            right += x * tl.load(sin + HALF + angle, mask=is_pair)
            if is_key:
                tl.store(place + pairs, left.to(first.dtype), mask=is_pair)
                tl.store(place + HALF + pairs, right.to(first.dtype), mask=is_pair)
            else:
                tl.store(source + pairs, left.to(first.dtype), mask=is_pair)
                tl.store(source + HALF + pairs, right.to(first.dtype), mask=is_pair)
        if 2 * HALF < HEAD_DIM:
            if is_key:
                is_rest = (dims >= 2 * HALF) & (dims < HEAD_DIM)
                tl.store(place + dims, tl.load(source + dims, mask=is_rest), mask=is_rest)
