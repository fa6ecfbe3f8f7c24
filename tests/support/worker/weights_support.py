"""Minimal ranks and models for loading weights."""

from __future__ import annotations

from collections.abc import Iterator

from worker.model.decoder import Decoder
from worker.model.piece import Piece
from worker.parallel.group import Group


class Rank(Group):
    """Rank of a group whose other ranks do not exist; it cannot compute."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


class Pieces(Decoder):
    """Replacement of a decoder that has only pieces of a checkpoint."""

    def __init__(self, *pieces: Piece) -> None:
        self._pieces = pieces
        self.unread = ()
        self.tied = None
        self.weight_format = None

    def pieces(self) -> Iterator[Piece]:
        yield from self._pieces
