"""Shares of a model's heads, features and tensor slices for tensor-parallel ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """Run of ``length`` consecutive elements of a row-major tensor, from element ``start`` on."""

    start: int
    length: int


def bounds_of(slices: Sequence[slice], shape: Sequence[int]) -> tuple[range, ...]:
    """Return the indices that ``slices`` select in each dimension of a tensor of ``shape``.

    ``slices`` have step 1 and apply to the first dimensions; the others are selected whole.
    """
    whole = (slice(None),) * (len(shape) - len(slices))
    return tuple(range(size)[part] for part, size in zip((*slices, *whole), shape, strict=True))


def runs(shape: Sequence[int], bounds: Sequence[range]) -> Iterator[Run]:
    """Yield the contiguous runs of a slice of a row-major tensor of ``shape``, in memory order.

    ``bounds`` are the indices that the slice selects in each dimension. The tensor must have at
    least one dimension.
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
    """Share of one rank in items that are numbered over the whole model, such as heads.

    The share has ``width`` slots. The first ones hold the items from ``start`` to before ``stop``;
    the others are padding.
    """

    start: int
    stop: int
    width: int

    @property
    def num_items(self) -> int:
        return self.stop - self.start

    def of(self, size: int) -> Share:
        """Return this share in smaller units, where each item consists of ``size`` units.

        For example, ``of(head_dim)`` converts a share of heads into a share of features.
        """
        return Share(self.start * size, self.stop * size, self.width * size)

    def moved(self, by: int) -> Share:
        """Return this share with all item numbers increased by ``by``."""
        return Share(self.start + by, self.stop + by, self.width)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Query heads and KV heads of one rank.

    ``query`` is ordered by KV head: each KV head has equally many consecutive query heads.
    """

    query: Share
    kv: Share


def tail_padded(size: int, parts: int, part: int) -> Share:
    """Return the share with index ``part`` if ``size`` items are split into ``parts`` shares.

    All shares have equal width; the last ones hold fewer items, or none, and are padded.
    """
    width = -(-size // parts)
    return Share(min(part * width, size), min((part + 1) * width, size), width)


def share_heads(num_heads: int, num_kv_heads: int, ranks: int, rank: int) -> HeadShare:
    """Return the query heads and KV heads of rank ``rank``.

    With fewer KV heads than ranks, neighbouring ranks hold the same KV head and divide its query
    heads among themselves.
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
    """Return the number of KV heads in each rank's KV cache, including padding."""
    return tail_padded(num_kv_heads, ranks, 0).width
