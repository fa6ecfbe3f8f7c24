"""How a step's tokens are cut for attention on a GPU. Pure.

A tile is a few tokens of one row. Rows with few tokens, as those that decode, have tiles of few,
of which there may be so few that most of a GPU would idle: the positions that they see are then
cut into splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.engine.plan import Ints

#: New tokens of a row, decoding or checking drafts, that narrow tiles take.
FEW = 16
#: Programs that each multiprocessor is to have of narrow tiles.
_PROGRAMS = 2
MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Tiles:
    """By tile, its row and where in it the tile begins, int64 [m]."""

    rows: Ints
    offsets: Ints

    def __len__(self) -> int:
        return len(self.rows)


def tiles_of(counts: Ints, chosen: Ints, tokens: int) -> Tiles:
    """Of the rows ``chosen``, which have ``counts`` [n] new tokens, in tiles of ``tokens``."""
    number = -(-counts[chosen] // tokens)
    firsts = number.cumsum() - number
    offsets = (np.arange(number.sum()) - np.repeat(firsts, number)) * tokens
    return Tiles(np.repeat(chosen, number), offsets)


def narrow_rows(counts: Ints) -> Ints:
    """Indices of those with few new tokens."""
    return np.flatnonzero(counts <= FEW)


def wide_rows(counts: Ints) -> Ints:
    """Return the other rows."""
    return np.flatnonzero(counts > FEW)


def tokens_of_tiles(counts: Ints, most: int) -> int:
    """Of rows with ``counts`` [n], at least one: as many as fit; 1 where every row has one, for
    nothing is merged then for tokens that there are not."""
    return 1 if counts.max() == 1 else most


def num_splits(tiles: int, kv_heads: int, multiprocessors: int) -> int:
    """Return a power of two, so that few kernels are compiled. It depends on the number of tiles and not
    on what they see: a captured step has to fit rows of any length."""
    wanted = -(-_PROGRAMS * multiprocessors // (tiles * kv_heads))
    return min(MAX_SPLITS, 1 << (wanted - 1).bit_length())
