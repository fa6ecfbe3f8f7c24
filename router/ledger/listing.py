"""Listings of a ledger: a page at a time, and all of it. Pure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol, TypeAlias

from router.ledger.base import MOST_LISTED, Page, Position
from router.ledger.entry import Entry, Event, State


class Row(NamedTuple):
    """A request that is listed; ``entry`` is None where it is not asked for, or gone."""

    position: Position
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Part:
    """Next entries of a shard, newest first. ``is_end``: there are no more."""

    rows: Sequence[Row]
    is_end: bool


class Listing:
    """Page of up to ``limit`` entries after ``last``, from MOST_LISTED requests at most."""

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
        """Add the next entries of each shard."""
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
    """A request.

    ``owned`` says that its gateway's set of unfinished requests has it, ``listed`` that the
    listings have it at its arrival, ``immortal`` which of its keys the server would keep for ever,
    ``missing`` which are not there. ``finished_by`` is the epoch whose append finished it, 0 for
    none.
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
    """A key of a request that is not there."""

    request_id: str
    key: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Entry in the set of ``gateway``'s unfinished requests, with ``state`` and ``owner``.

    None and empty if there is no such request.
    """

    request_id: str
    gateway: str
    state: State | None
    owner: str


@dataclass(frozen=True, slots=True)
class Listed:
    """Listing of a request under its tenant.

    ``is_kept_up``: as the listing of all does, so that it leaves both when it is gone.
    """

    request_id: str
    tenant: str
    is_kept_up: bool


Item: TypeAlias = Audited | Stray | Claim | Listed


class Audit(Protocol):
    def items(self) -> AsyncIterator[Item]:
        """Return all entries. Raises LedgerUnavailable."""
        ...

    async def again(self, items: Sequence[Item]) -> list[Item]:
        """Return the same as they are by now, without those that are gone.

        Raises LedgerUnavailable.
        """
        ...
