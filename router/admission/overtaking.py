"""How many that came later left before each of those that wait. Pure.

Tickets are numbers that grow, one for each that comes. Of every ticket that left it is known that
it did, as a byte, and of every block of them, and of every row of blocks, how many did: a count is
three sums over short stretches, however many wait.
"""

from __future__ import annotations

#: Tickets of a block, and blocks of a row.
_BLOCK, _ROW = 512, 64


class Overtaking:
    def __init__(self) -> None:
        #: tickets below are not kept any more
        self._first = 0
        self._left = bytearray()
        self._of_block: list[int] = []
        self._of_row: list[int] = []

    @property
    def num_kept(self) -> int:
        """Tickets that are looked back to."""
        return len(self._left)

    def leave(self, ticket: int) -> None:
        place = ticket - self._first
        if place >= len(self._left):
            self._grow(place)
        self._left[place] = 1
        self._of_block[place // _BLOCK] += 1
        self._of_row[place // (_BLOCK * _ROW)] += 1

    def count(self, ticket: int) -> int:
        """Larger tickets that left."""
        place = ticket - self._first
        if place >= len(self._left):
            return 0
        block = place // _BLOCK
        row = block // _ROW
        return (
            self._left.count(1, place + 1, (block + 1) * _BLOCK)
            + sum(self._of_block[block + 1 : (row + 1) * _ROW])
            + sum(self._of_row[row + 1 :])
        )

    def forget(self, oldest: int) -> None:
        """Nobody asks for tickets below this one any more."""
        rows = min((oldest - self._first) // (_BLOCK * _ROW), len(self._of_row))
        if rows > 0:
            del self._left[: rows * _ROW * _BLOCK]
            del self._of_block[: rows * _ROW]
            del self._of_row[:rows]
            self._first += rows * _ROW * _BLOCK

    def _grow(self, place: int) -> None:
        rows = place // (_BLOCK * _ROW) + 1 - len(self._of_row)
        self._left.extend(bytes(rows * _ROW * _BLOCK))
        self._of_block.extend([0] * (rows * _ROW))
        self._of_row.extend([0] * rows)
