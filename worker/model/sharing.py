"""How a model's heads and features are shared out over tensor-parallel ranks. Pure arithmetic.

All ranks have the same sizes, so that they run the same shapes: what does not divide is padded, and
the padding's weights are zero. Query heads follow their KV head, since a rank attends to its own.

    5 KV heads of 2 query heads, 2 ranks        2 KV heads of 3 query heads, 4 ranks

    rank 0   K0 K1 K2   Q0 Q1 Q2 Q3 Q4 Q5       rank 0   K0   Q0 Q1
    rank 1   K3 K4 --   Q6 Q7 Q8 Q9 -- --       rank 1   K0   Q2 --
                                                rank 2   K1   Q3 Q4
                                                rank 3   K1   Q5 --
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's ``width`` places for things that are counted through over the whole model.

    The first of its places hold those from ``start`` to ``stop``; the rest are padding.
    """

    start: int
    stop: int
    width: int

    @property
    def held(self) -> int:
        return self.stop - self.start

    def of(self, size: int) -> Share:
        """The same share of things that are ``size`` of those each."""
        return Share(self.start * size, self.stop * size, self.width * size)

    def moved(self, by: int) -> Share:
        """The same things, where ``by`` others are counted first."""
        return Share(self.start + by, self.stop + by, self.width)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """One rank's query heads and KV heads. Each KV head is read by as many places of ``query`` as
    any other, one KV head's after the other's."""

    query: Share
    kv: Share


def tail_padded(size: int, parts: int, part: int) -> Share:
    """Part ``part`` of ``size`` things: as wide as the others, and the last ones have fewer."""
    width = -(-size // parts)
    return Share(min(part * width, size), min((part + 1) * width, size), width)


def share_heads(num_heads: int, num_kv_heads: int, ranks: int, rank: int) -> HeadShare:
    """Rank ``rank``'s heads. With fewer KV heads than ranks, neighbours hold the same one and part
    its query heads between them."""
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
