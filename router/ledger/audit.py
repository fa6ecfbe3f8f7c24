"""What a ledger holds, all of it, to be looked at and never touched. Pure.

An audit goes through a ledger that is in use: what one item says is true at one moment, but two
items may be of two moments. Whoever finds something wrong looks again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from router.ledger.entry import Entry, Event, State


@dataclass(frozen=True, slots=True)
class Audited:
    """A request. ``owned`` says that its gateway's set of unfinished requests has it, ``listed``
    that the listings have it at its arrival, ``immortal`` which of its keys the server would keep
    for ever, ``missing`` which are not there. ``finished_by`` is the epoch whose append finished
    it, 0 for none."""

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
    """``gateway``'s set of unfinished requests names this one, whose own ``state`` and ``owner``
    follow; None and empty where there is no such request."""

    request_id: str
    gateway: str
    state: State | None
    owner: str


@dataclass(frozen=True, slots=True)
class Listed:
    """A tenant's listing names this request. ``is_kept_up``: as the listing of all does, so that it
    leaves both when it is gone."""

    request_id: str
    tenant: str
    is_kept_up: bool


Item: TypeAlias = Audited | Stray | Claim | Listed


class Audit(Protocol):
    def items(self) -> AsyncIterator[Item]:
        """Everything. Raises LedgerUnavailable."""
        ...

    async def again(self, items: Sequence[Item]) -> list[Item]:
        """The same as they are by now, without those that are gone. Raises LedgerUnavailable."""
        ...
