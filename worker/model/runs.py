"""Where a slice of a row-major tensor lies in it. Pure.

tensor[1:3, 2:4]   . . . .      tensor[1:3]   . . . .
                   . . x x                    x x x x
                   . . y y                    x x x x      x, y: a run each
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """``length`` elements one after the other, from element ``start`` of the tensor on."""

    start: int
    length: int


def bounds_of(slices: Sequence[slice], shape: Sequence[int]) -> tuple[range, ...]:
    """What ``slices``, of step 1 and of the first dimensions or all, take of each dimension."""
    whole = (slice(None),) * (len(shape) - len(slices))
    return tuple(range(size)[part] for part, size in zip((*slices, *whole), shape, strict=True))


def runs(shape: Sequence[int], bounds: Sequence[range]) -> Iterator[Run]:
    """What makes up the slice ``bounds`` of a tensor of ``shape``, in the slice's order. The
    tensor has a dimension at least."""
    row = math.prod(shape[1:])
    if all(len(bound) == size for bound, size in zip(bounds[1:], shape[1:], strict=True)):
        yield Run(bounds[0].start * row, len(bounds[0]) * row)
        return
    for index in bounds[0]:
        for run in runs(shape[1:], bounds[1:]):
            yield Run(index * row + run.start, run.length)
