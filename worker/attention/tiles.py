"""Tiles of a step's tokens for attention on a GPU. Pure.

A tile is a few tokens of one row (the new tokens of one sequence). Narrow tiles are for rows with
few new tokens, wide tiles for the others. If there are too few narrow tiles to occupy a GPU, as in
decoding, the positions to which a tile attends are split among several programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.engine.plan import Ints

#: Rows with at most this many new tokens (decoding, or verifying drafts) have narrow tiles.
FEW = 16
#: Target number of programs of narrow tiles for each multiprocessor.
_PROGRAMS = 2
MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of a step: each tile's row index, and its first token's index in the row, int64 [m]."""

    rows: Ints
    offsets: Ints

    def __len__(self) -> int:
        return len(self.rows)


def tiles_of(counts: Ints, chosen: Ints, tokens: int) -> Tiles:
    """Split the rows with indices ``chosen`` into tiles of up to ``tokens`` tokens.

    ``counts`` [n] are the numbers of new tokens of all rows.
    """
    number = -(-counts[chosen] // tokens)
    firsts = number.cumsum() - number
    offsets = (np.arange(number.sum()) - np.repeat(firsts, number)) * tokens
    return Tiles(np.repeat(chosen, number), offsets)


def narrow_rows(counts: Ints) -> Ints:
    """Return the indices of the rows with at most FEW new tokens."""
    return np.flatnonzero(counts <= FEW)


def wide_rows(counts: Ints) -> Ints:
    """Return the indices of the rows with more than FEW new tokens."""
    return np.flatnonzero(counts > FEW)


def tokens_of_tiles(counts: Ints, most: int) -> int:
    """Return the number of tokens per tile: 1 if every row has only one new token, else ``most``.

    ``counts`` are the rows' numbers of new tokens.
    """
    return 1 if counts.max() == 1 else most


def num_splits(tiles: int, kv_heads: int, multiprocessors: int) -> int:
    """Return the number of programs among which the positions of a tile's context are divided.

    ``tiles`` is the number of tiles. The result is a power of two, so that few kernels are
    compiled. It does not depend on the lengths of the rows, because a captured step must serve rows
    of any length.
    """
    splits = -(-_PROGRAMS * multiprocessors // (tiles * kv_heads))
    return min(MAX_SPLITS, 1 << (splits - 1).bit_length())
