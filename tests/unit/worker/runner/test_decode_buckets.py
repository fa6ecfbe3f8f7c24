"""Padding of steps to buckets, and the array that describes a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.plan import Row, Rows
from worker.runner.decode_buckets import Parts, bucket_for, decode_buckets, describe, input_length


@pytest.mark.parametrize(
    ("max_num_seqs", "buckets"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (16, (1, 2, 4, 8, 16)),
        (50, (1, 2, 4, 8, 16, 32, 48, 50)),
        (1000, (1, 2, 4, 8, *range(16, 257, 16))),
    ],
)
def test_decode_buckets_for_max_num_seqs(max_num_seqs: int, buckets: tuple[int, ...]) -> None:
    assert decode_buckets(max_num_seqs) == buckets


def decoding(*starts: int, slots: list[int] | None = None) -> Rows:
    tables = np.arange(100 * 4, dtype=np.int32).reshape(100, 4)
    chosen = np.array(slots or range(len(starts)))
    return Rows.decoding(chosen, np.array(starts), np.array(starts) + 7, tables)


@given(st.integers(1, 300), st.integers(1, 300))
def test_decode_bucket_is_smallest_with_room(count: int, max_num_seqs: int) -> None:
    buckets = decode_buckets(max_num_seqs)
    found = bucket_for(decoding(*[5] * count), buckets)
    assert found == min((size for size in buckets if size >= count), default=None)


PROMPT = Row(0, (1, 2), 0, (0,), True)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [PROMPT],
        [Row(0, (1,), 0, (0,), samples=False)],
        [Row(0, (1,), 5, (0,), True), PROMPT],
        [Row(0, (1,), 5, (0,), True, scores_prompt=True)],
    ],
)
def test_decode_bucket_is_none_for_other_steps(rows: list[Row]) -> None:
    assert bucket_for(Rows.of(rows), (1, 2, 4)) is None


def test_decode_array_describes_rows_and_padding() -> None:
    array = describe(decoding(40, 3, 31, slots=[7, 2, 5]), 5)
    parts = Parts.of(5)
    said = {name: array[part].tolist() for name, part in parts._asdict().items()}
    assert said == {
        "width": [2],
        "tokens": [47, 10, 38, 0, 0],
        "slots": [7, 2, 5, 0, 0],
        "positions": [40, 3, 31, -1, -1],
        "counts": [1, 1, 1, 0, 0],
        "tables": [28, 29, 8, 9, 20, 21, 0, 0],
    }
    assert len(array) <= input_length(5, 2)
    assert all(part.start % 4 == 0 for part in parts)
