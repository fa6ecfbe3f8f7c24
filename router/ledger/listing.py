"""A listing of requests that is gone through part by part. Pure.

Requests are spread over shards, and each shard answers so many of its own. Of these nothing is
known below the last one of a shard that has more:

    shard 0   9 7 6 | ...      has more
    shard 1   8 3 (end)        of these, 9 8 7 6 come now, and 3 with the next part
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from router.ledger.base import MOST_LISTED, Page, Position
from router.ledger.entry import Entry


class Row(NamedTuple):
    """A request that is listed; ``entry`` is None where it is not asked for, or gone."""

    position: Position
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Part:
    """What comes next on a shard, newest first. ``is_end``: nothing is left there."""

    rows: Sequence[Row]
    is_end: bool


class Listing:
    """Up to ``limit`` entries of what lies behind ``last``, from MOST_LISTED requests at most."""

    def __init__(self, limit: int, last: Position | None) -> None:
        self._limit = limit
        self._entries: list[Entry] = []
        self._looked_at = 0
        self.last = last
        self.is_over = False

    @property
    def missing(self) -> int:
        """Entries that are still to be found."""
        return self._limit - len(self._entries)

    def add(self, parts: Sequence[Part]) -> None:
        """What each shard has behind ``last``."""
        rows, is_end = _merged(parts, self.last)
        assert rows or is_end, "a shard that has more answers at least one of it"
        for row in rows:
            if not self.missing or self._looked_at == MOST_LISTED:
                self.is_over = True
                return
            self._look_at(row)
        if is_end:
            self.last, self.is_over = None, True

    def _look_at(self, row: Row) -> None:
        self._looked_at += 1
        self.last = row.position
        if row.entry is not None:
            self._entries.append(row.entry)

    def page(self) -> Page:
        return Page(tuple(self._entries), self.last)


def _merged(parts: Sequence[Part], last: Position | None) -> tuple[list[Row], bool]:
    """Those behind ``last`` of which none can be missing in between, and whether that is all."""
    floors = [part.rows[-1].position for part in parts if not part.is_end]
    rows = _behind(chain.from_iterable(part.rows for part in parts), last)
    if floors:
        floor = max(floors)
        rows = [row for row in rows if row.position >= floor]
    return sorted(rows, reverse=True, key=lambda row: row.position), not floors


def _behind(rows: Iterable[Row], last: Position | None) -> list[Row]:
    return [row for row in rows if last is None or row.position < last]
