"""What loading weights needs of ranks and models, and no more."""

from __future__ import annotations

from collections.abc import Iterator

from worker.model.decoder import Decoder
from worker.model.layers import Piece
from worker.parallel.group import Group


class Rank(Group):
    """Of a group whose other ranks are not there: nothing is computed here."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


class Pieces(Decoder):
    """In a decoder's place: only what it holds of a checkpoint."""

    def __init__(self, *pieces: Piece) -> None:
        self._pieces = pieces
        self.unread = ()
        self.tied = None

    def pieces(self) -> Iterator[Piece]:
        yield from self._pieces
