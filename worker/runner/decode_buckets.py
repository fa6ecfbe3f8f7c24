"""Steps that only decode, padded to a few sizes, each of which is captured once. Pure.

Of a step with n rows and the smallest bucket that has room for them, all that changes lies in one
array of int32, so that one copy brings it to the device:

    width [1] | tokens, slots, positions, counts: [bucket] each | tables [n, width] | a parcel

each part from a multiple of 16 bytes on. The parcel (worker.device.upload) tells how tokens are
drawn. Rows that only pad have no tokens (``counts`` 0) and the position -1: nothing of theirs is
written to the cache, and nothing read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker.engine.limits import blocks_for
from worker.engine.plan import Rows

#: Integers that 16 bytes hold.
_ALIGNED = 4
#: Integers that are told of a token that is to be drawn: its slot, filters, keys and position,
#: eight numbers of 8 bytes, in four arrays.
_TOLD_OF_DRAW, _PARTS_OF_DRAW = 16, 4
#: Up to here powers of two, then multiples: decoding a few more rows takes no longer.
_STEP = 16
#: Larger steps compute for so long that launching them shows no more.
_LARGEST = 256


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, 16, 32, 48 ... and ``max_num_seqs``, up to _LARGEST."""
    most = min(max_num_seqs, _LARGEST)
    sizes = [1, 2, 4, 8, *range(_STEP, most, _STEP)]
    return (*(size for size in sizes if size < most), most)


def bucket_for(rows: Rows, buckets: Sequence[int]) -> int | None:
    """Return the smallest bucket for ``rows``; None if they do not only decode, or are too many."""
    decode = len(rows) == rows.num_tokens and rows.samples.all() and not rows.scores_prompt.any()
    index = bisect_left(buckets, len(rows))
    return buckets[index] if decode and 0 < len(rows) and index < len(buckets) else None


class Parts(NamedTuple):
    """Offsets of the parts in the array; ``tables`` up to its end."""

    width: slice
    tokens: slice
    slots: slice
    positions: slice
    counts: slice
    tables: slice

    @classmethod
    def of(cls, bucket: int) -> Parts:
        size = _aligned(bucket)
        *firsts, end = (_ALIGNED + i * size for i in range(5))
        tokens, slots, positions, counts = (slice(first, first + bucket) for first in firsts)
        return cls(slice(0, 1), tokens, slots, positions, counts, slice(end, None))


def room_for(bucket: int, width: int) -> int:
    """Integers of the array, where the tables are at most ``width`` blocks wide."""
    return int(Parts.of(bucket).tables.start) + _aligned(bucket * width)


def room_for_parcel(bucket: int) -> int:
    """Integers of what is told of tokens that are to be drawn."""
    return bucket * _TOLD_OF_DRAW + _ALIGNED * _PARTS_OF_DRAW


def describe(rows: Rows, bucket: int) -> NDArray[np.int32]:
    """Return the array of ``rows``, which decode."""
    count, width = len(rows), blocks_for(int(rows.starts.max()) + 1)
    parts = Parts.of(bucket)
    num_blocks = count * width
    array = np.zeros(room_for(bucket, 0) + _aligned(num_blocks), np.int32)
    array[parts.width] = width
    array[parts.tokens][:count] = rows.tokens
    array[parts.slots][:count] = rows.slots
    array[parts.positions] = -1
    array[parts.positions][:count] = rows.starts
    array[parts.counts][:count] = 1
    array[parts.tables][:num_blocks] = rows.tables[rows.slots, :width].reshape(-1)
    return array


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
