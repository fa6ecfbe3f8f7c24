"""Listings of a ledger, page by page, and the items of its audit. Pure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol, TypeAlias

from router.ledger.base import MOST_LISTED, Page, Position
from router.ledger.entry import Entry, Event, State


class Row(NamedTuple):
    """Row of a listing; ``entry`` is None if its state is not requested or it is gone."""

    position: Position
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Part:
    """Next rows of one shard, newest first; ``is_end`` is True if the shard has no more."""

    rows: Sequence[Row]
    is_end: bool


class Listing:
    """Builder of a page of ``limit`` entries that begins after the position ``last``.

    ``last`` advances with the rows that were added. A page is made of at most MOST_LISTED rows.
    """

    def __init__(self, limit: int, last: Position | None) -> None:
        self._limit = limit
        self._entries: list[Entry] = []
        self._looked_at = 0
        self.last = last
        self.is_over = False

    @property
    def missing(self) -> int:
        """Number of entries that the page still lacks."""
        return self._limit - len(self._entries)

    def add(self, parts: Sequence[Part]) -> None:
        """Add the rows of each shard that follow the position ``last``."""
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
    floors = [part.rows[-1].position for part in parts if not part.is_end]
    rows = _behind(chain.from_iterable(part.rows for part in parts), last)
    if floors:
        floor = max(floors)
        rows = [row for row in rows if row.position >= floor]
    return sorted(rows, reverse=True, key=lambda row: row.position), not floors


def _behind(rows: Iterable[Row], last: Position | None) -> list[Row]:
    return [row for row in rows if last is None or row.position < last]


@dataclass(frozen=True, slots=True)
class Audited:
    """State of a request, as found by an audit of the ledger.

    ``owned`` tells whether its gateway's set of unfinished requests contains it, ``listed`` whether
    all its listings have it at its arrival time. ``immortal`` are its keys without a time to live,
    ``missing`` its keys that do not exist. ``finished_by`` is the epoch whose append finished it, 0
    for none.
    """

    entry: Entry
    max_tokens: int
    finished_by: int
    events: tuple[Event, ...]
    owned: bool
    listed: bool = True
    immortal: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def request_id(self) -> str:
        return self.entry.request_id


@dataclass(frozen=True, slots=True)
class Stray:
    """Key of the ledger that belongs to a request that does not exist."""

    request_id: str
    key: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Request id in the set of ``gateway``'s unfinished requests.

    ``state`` and ``owner`` are those of the request itself; None and empty if it does not exist.
    """

    request_id: str
    gateway: str
    state: State | None
    owner: str


@dataclass(frozen=True, slots=True)
class Listed:
    """Request id in a tenant's listing.

    ``is_kept_up`` tells whether the tenant is the request's own, and the listing of all tenants has
    the request too. If so, it is removed from both when it no longer exists.
    """

    request_id: str
    tenant: str
    is_kept_up: bool


Item: TypeAlias = Audited | Stray | Claim | Listed


class Audit(Protocol):
    def items(self) -> AsyncIterator[Item]:
        """Return an iterator over all items of the ledger. Raises LedgerUnavailable."""
        ...

    async def again(self, items: Sequence[Item]) -> list[Item]:
        """Return the current state of ``items``, without those that no longer exist.

        Raises LedgerUnavailable.
        """
        ...
