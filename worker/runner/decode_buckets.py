"""Sizes of captured decode steps ("buckets"), and the layout of a step's inputs. Pure.

A step that only decodes is padded to the smallest bucket with at least as many rows, so that few
sizes are captured. All its inputs are in one int32 array, so that one copy transfers them to the
device. n is the number of rows before padding, and ``width`` the number of blocks per row in
``tables``:

    width [1] | tokens, slots, positions, counts: [bucket] each | tables [n, width] | parcel

Each part begins at a multiple of 16 bytes. The parcel (worker.device.upload) contains the sampling
parameters of the rows. Padding rows have no tokens (``counts`` 0) and the position -1, so that
nothing is written to the cache or read from it for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker.engine.limits import blocks_for
from worker.engine.plan import Rows

#: Number of int32 integers in 16 bytes, to which parts are aligned.
_ALIGNED = 4
#: Number of int32 integers in the parcel per sampled token, and number of arrays: slot, filters,
#: keys and position are eight numbers of 8 bytes in four arrays.
_PARCEL_INTS, _PARCEL_ARRAYS = 16, 4
#: Buckets up to this one are powers of two, larger ones are multiples of it, because a few padding
#: rows take no extra time. The largest bucket may be any number.
_STEP = 16
#: Largest bucket. Larger steps compute for longer than their kernels take to launch.
_LARGEST = 256


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the buckets in ascending order: 1, 2, 4, 8, multiples of 16, and the largest bucket.

    The largest bucket is the lesser of ``max_num_seqs`` and _LARGEST.
    """
    most = min(max_num_seqs, _LARGEST)
    sizes = [1, 2, 4, 8, *range(_STEP, most, _STEP)]
    return (*(size for size in sizes if size < most), most)


def bucket_for(rows: Rows, buckets: Sequence[int]) -> int | None:
    """Return the smallest bucket with at least as many rows as ``rows``.

    Returns None if there are no rows, if there are more than in the largest bucket, or if a row has
    several tokens (as with drafts), samples nothing, or requests log probabilities of its prompt.
    """
    decode = len(rows) == rows.num_tokens and rows.samples.all() and not rows.scores_prompt.any()
    index = bisect_left(buckets, len(rows))
    return buckets[index] if decode and 0 < len(rows) and index < len(buckets) else None


class Parts(NamedTuple):
    """Slices of the parts in the input array; ``tables`` is the slice up to the array's end."""

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


def input_length(bucket: int, width: int) -> int:
    """Return the length of the input array without a parcel, in int32 integers.

    The array is for ``bucket`` rows, whose tables have ``width`` blocks each.
    """
    return int(Parts.of(bucket).tables.start) + _aligned(bucket * width)


def parcel_length(bucket: int) -> int:
    """Return the largest length of the parcel, in int32 integers."""
    return bucket * _PARCEL_INTS + _ALIGNED * _PARCEL_ARRAYS


def describe(rows: Rows, bucket: int) -> NDArray[np.int32]:
    """Return the input array of ``rows``, padded to ``bucket`` rows, without a parcel.

    All rows must decode, and there must be at most ``bucket`` of them.
    """
    count, width = len(rows), blocks_for(int(rows.starts.max()) + 1)
    parts = Parts.of(bucket)
    num_blocks = count * width
    array = np.zeros(input_length(bucket, 0) + _aligned(num_blocks), np.int32)
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
