"""Tiles of a step's tokens for attention on a GPU. Pure.

A tile is a few tokens of one row. If tiles are too few for a GPU, as in decoding, the positions
that they see are split.
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
    """Tiles: the row of each and its offset in that row, int64 [m]."""

    rows: Ints
    offsets: Ints

    def __len__(self) -> int:
        return len(self.rows)


def tiles_of(counts: Ints, chosen: Ints, tokens: int) -> Tiles:
    """Cut the rows ``chosen`` with ``counts`` [n] new tokens into tiles of ``tokens``."""
    number = -(-counts[chosen] // tokens)
    firsts = number.cumsum() - number
    offsets = (np.arange(number.sum()) - np.repeat(firsts, number)) * tokens
    return Tiles(np.repeat(chosen, number), offsets)


def narrow_rows(counts: Ints) -> Ints:
    """Return the indices of rows with few new tokens."""
    return np.flatnonzero(counts <= FEW)


def wide_rows(counts: Ints) -> Ints:
    """Return the other rows."""
    return np.flatnonzero(counts > FEW)


def tokens_of_tiles(counts: Ints, most: int) -> int:
    """Return the tokens per tile: ``most``, or 1 if every row has one token."""
    return 1 if counts.max() == 1 else most


def num_splits(tiles: int, kv_heads: int, multiprocessors: int) -> int:
    """Return a power of two, so that few kernels are compiled.

    It depends on the number of tiles and not on what they see: a captured step has to fit rows of
    any length.
    """
    wanted = -(-_PROGRAMS * multiprocessors // (tiles * kv_heads))
    return min(MAX_SPLITS, 1 << (wanted - 1).bit_length())
