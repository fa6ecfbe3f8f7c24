"""Shards of a model: heads, features and slices of tensors on tensor-parallel ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """Run of ``length`` elements from element ``start`` of the tensor on."""

    start: int
    length: int


def bounds_of(slices: Sequence[slice], shape: Sequence[int]) -> tuple[range, ...]:
    """Return the range of each dimension that ``slices`` (step 1, first dimensions) take."""
    whole = (slice(None),) * (len(shape) - len(slices))
    return tuple(range(size)[part] for part, size in zip((*slices, *whole), shape, strict=True))


def runs(shape: Sequence[int], bounds: Sequence[range]) -> Iterator[Run]:
    """Yield the contiguous runs of the slice ``bounds`` of a tensor of ``shape``, in order.

    The tensor has at least one dimension.
    """
    row = math.prod(shape[1:])
    if all(len(bound) == size for bound, size in zip(bounds[1:], shape[1:], strict=True)):
        yield Run(bounds[0].start * row, len(bounds[0]) * row)
        return
    for index in bounds[0]:
        for run in runs(shape[1:], bounds[1:]):
            yield Run(index * row + run.start, run.length)


@dataclass(frozen=True, slots=True)
class Share:
    """Share of one rank: ``width`` places of things that are numbered over the whole model.

    The first places hold ``start`` to ``stop``; the rest are padding.
    """

    start: int
    stop: int
    width: int

    @property
    def held(self) -> int:
        return self.stop - self.start

    def of(self, size: int) -> Share:
        """Return the same share of things that are ``size`` of those each."""
        return Share(self.start * size, self.stop * size, self.width * size)

    def moved(self, by: int) -> Share:
        """Return the same things, where ``by`` others are counted first."""
        return Share(self.start + by, self.stop + by, self.width)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Query heads and KV heads of one rank.

    Each KV head is read by equally many places of ``query``, one KV head's after the other's.
    """

    query: Share
    kv: Share


def tail_padded(size: int, parts: int, part: int) -> Share:
    """Return part ``part`` of ``size`` things: as wide as the others, the last ones filled less."""
    width = -(-size // parts)
    return Share(min(part * width, size), min((part + 1) * width, size), width)


def share_heads(num_heads: int, num_kv_heads: int, ranks: int, rank: int) -> HeadShare:
    """Return rank ``rank``'s heads.

    With fewer KV heads than ranks, neighbours hold the same one and part its query heads between
    them.
    """
    group = num_heads // num_kv_heads
    if num_kv_heads >= ranks:
        kv = tail_padded(num_kv_heads, ranks, rank)
        return HeadShare(kv.of(group), kv)
    head = rank * num_kv_heads // ranks
    first, after = (-(-h * ranks // num_kv_heads) for h in (head, head + 1))
    own = tail_padded(group, after - first, rank - first)
    widest = -(-group // (ranks // num_kv_heads))
    query = Share(head * group + own.start, head * group + own.stop, widest)
    return HeadShare(query, Share(head, head + 1, 1))


def local_kv_heads(num_kv_heads: int, ranks: int) -> int:
    """Places for KV heads on each rank: what its KV cache is made for."""
    return tail_padded(num_kv_heads, ranks, 0).width
