"""Listings of a ledger, page by page, and the items of its audit. Pure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol, TypeAlias

from router.ledger.base import MAX_PAGE_SIZE, Page, Position
from router.ledger.entry import Entry, Event, State


class Row(NamedTuple):
    """Row of a listing; ``entry`` is None for a request that does not belong on the page.

    The request is then in a state that was not asked for, or no longer exists.
    """

    position: Position
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Part:
    """Next rows of a listing from one shard, newest first.

    ``is_end`` is True if the shard has no further rows.
    """

    rows: Sequence[Row]
    is_end: bool


class Listing:
    """Builder of a page of up to ``limit`` entries, which begins after the position ``last``.

    If ``last`` is None, the page begins with the newest request. ``last`` advances with the rows
    that are added. The page is complete when ``is_over`` is True: it has ``limit`` entries,
    MAX_PAGE_SIZE rows were examined, or no rows are left.
    """

    def __init__(self, limit: int, last: Position | None) -> None:
        self._limit = limit
        self._entries: list[Entry] = []
        self._num_examined = 0
        self.last = last
        self.is_over = False

    @property
    def missing(self) -> int:
        """Number of entries that the page still lacks."""
        return self._limit - len(self._entries)

    def add(self, parts: Sequence[Part]) -> None:
        """Add the next rows of all shards; ``parts`` has one part for each shard.

        Rows that are not after the position ``last`` are skipped.
        """
        rows, is_end = _merged(parts, self.last)
        assert rows or is_end, "a shard that has more rows must return at least one of them"
        for row in rows:
            if not self.missing or self._num_examined == MAX_PAGE_SIZE:
                self.is_over = True
                return
            self._examine(row)
        if is_end:
            self.last, self.is_over = None, True

    def _examine(self, row: Row) -> None:
        self._num_examined += 1
        self.last = row.position
        if row.entry is not None:
            self._entries.append(row.entry)

    def page(self) -> Page:
        return Page(tuple(self._entries), self.last)


def _merged(parts: Sequence[Part], last: Position | None) -> tuple[list[Row], bool]:
    """Return the next rows after ``last`` over all shards, and whether they are the last ones.

    The rows are sorted, newest first. A part without ``is_end`` must have a row; further rows of
    its shard are older than the last row of the part. Rows of other shards that are older than
    this last row are left out, because some of the further rows may be newer.
    """
    floors = [part.rows[-1].position for part in parts if not part.is_end]
    rows = _after(chain.from_iterable(part.rows for part in parts), last)
    if floors:
        floor = max(floors)
        rows = [row for row in rows if row.position >= floor]
    return sorted(rows, reverse=True, key=lambda row: row.position), not floors


def _after(rows: Iterable[Row], last: Position | None) -> list[Row]:
    return [row for row in rows if last is None or row.position < last]


@dataclass(frozen=True, slots=True)
class Audited:
    """State of a request, as found by an audit of the ledger.

    ``owned`` tells whether its router's set of unfinished requests contains the request. ``listed``
    tells whether the listings of all requests, of its tenant and of its session contain the request
    with the correct arrival time. ``immortal`` has the names of its keys without a time to live.
    ``missing`` has those of its keys, and of its prompt's chunks and images, that do not exist.
    ``finished_by`` is the epoch (number of the attempt) whose append finished the request, 0 if
    none did.
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
    """Request id that the set of unfinished requests of the router ``gateway`` contains.

    ``state`` and ``owner`` are read from the request itself; they are None and empty if the request
    does not exist.
    """

    request_id: str
    gateway: str
    state: State | None
    owner: str


@dataclass(frozen=True, slots=True)
class Listed:
    """Request id that the listing of a tenant or of a session contains.

    The listing is that of ``tenant`` or, if ``tenant`` is empty, of the session named ``session``.
    ``is_maintained`` is True if two conditions hold: the request belongs to this tenant or session,
    and the listing of all requests contains the id. The ledger removes such an id from this listing
    when the request no longer exists; an id for which ``is_maintained`` is False may remain.
    """

    request_id: str
    tenant: str
    is_maintained: bool
    session: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk of prompts, or image, on a shard.

    ``is_linked`` is True if the chunk before it exists, or if it is a first chunk or an image.
    """

    shard: int
    name: str
    is_linked: bool


Item: TypeAlias = Audited | Stray | Claim | Listed | Chunk


class Audit(Protocol):
    def items(self) -> AsyncIterator[Item]:
        """Return an iterator over all requests, keys and ids that the ledger contains.

        The iterator raises LedgerUnavailable.
        """
        ...

    async def reread(self, items: Sequence[Item]) -> list[Item]:
        """Return the current state of ``items``, without those that no longer exist.

        Raises LedgerUnavailable.
        """
        ...
