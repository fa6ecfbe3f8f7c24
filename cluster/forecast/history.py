"""What a ledger still knows of requests that finished, without their prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from cluster.errors import ForecastFailed
from cluster.forecast.past import Past
from cluster.forecast.record import Record
from cluster.forecast.surroundings import Surroundings
from everlift.errors import UnknownRequest
from router.access.access import Access, store_of
from router.config import RouterConfig
from router.ledger.base import MOST_LISTED, Ledger, Page, Position
from router.ledger.entry import Entry, Event, State, Stored

#: Requests that are read at the same time.
_AT_ONCE = 64
#: Around a request, those that came so many seconds before it, or later; so many are read at most.
_BEFORE_S, _MOST = 600.0, 5_000


class Reading(Protocol):
    """A ledger, as far as it is read here."""

    async def list_requests(
        self,
        tenant: str,
        *,
        states: Sequence[State] = (),
        limit: int = MOST_LISTED,
        before: Position | None = None,
    ) -> Page: ...

    async def get(self, request_id: str) -> Entry: ...

    async def read(self, request_id: str, offsets: Sequence[int] = ()) -> Stored: ...

    async def events(self, request_id: str) -> tuple[Event, ...]: ...


async def finished_requests(ledger: Reading, limit: int) -> list[Record]:
    """Of the ``limit`` newest ones each choice, by arrival; the first arrives at 0. The first token
    is that of all choices, infinite where nobody told of it. Raises LedgerUnavailable."""
    found: list[Record] = []
    async for entries in _listed(ledger, limit):
        for past in await _read_all(ledger, entries):
            found += past.records
    found.sort(key=lambda record: record.arrival.at)
    begin = found[0].arrival.at if found else 0.0
    return [_shifted(record, begin, index) for index, record in enumerate(found)]


def _shifted(record: Record, begin: float, index: int) -> Record:
    return replace(
        record,
        index=index,
        arrival=replace(record.arrival, at=record.arrival.at - begin),
        dispatched=record.dispatched - begin,
        first_token=record.first_token - begin,
        finished=record.finished - begin,
    )


async def weights(
    ledger: Ledger, config: RouterConfig, tenants: Iterable[str]
) -> Mapping[str, float]:
    """Those of ``tenants`` that are not 1, by the cluster's access. Raises SettingsError,
    LedgerUnavailable."""
    if (store := store_of(config, ledger)) is None:
        return {}
    access = await Access.open(store)
    found = {tenant: access.weight_of(tenant) for tenant in tenants}
    return {tenant: weight for tenant, weight in found.items() if weight != 1}


async def surroundings(ledger: Reading, request_id: str) -> Surroundings:
    """Of one that finished, until it would be over if it had taken twice as long: who comes later
    than a request may still be before it. Raises ForecastFailed, UnknownRequest,
    LedgerUnavailable."""
    entry = await ledger.get(request_id)
    if entry.state is not State.FINISHED:
        raise ForecastFailed(f"it is {entry.state.value}: only what finished can be simulated")
    found: list[Past] = []
    for past in await _read_all(ledger, [entry]):
        end = past.records[0].finished
        found = await _between(ledger, entry.arrived - _BEFORE_S, end + (end - entry.arrived))
    around = Surroundings.among(found, request_id)
    if around is None:
        raise ForecastFailed(f"more than {_MOST} requests came while it was there")
    return around


async def _between(ledger: Reading, since: float, until: float) -> list[Past]:
    """Those that came then, in ledger time."""
    found: list[Past] = []
    async for entries in _listed(ledger, _MOST, Position(until, "")):
        near = [entry for entry in entries if entry.arrived >= since]
        found += await _read_all(ledger, near)
        if len(near) < len(entries):
            break
    return found


async def _listed(
    ledger: Reading, limit: int, before: Position | None = None
) -> AsyncIterator[Sequence[Entry]]:
    """Of those that finished, and are listed behind ``before``, the ``limit`` newest ones."""
    while limit > 0:
        page = await ledger.list_requests(
            "", states=[State.FINISHED], limit=min(limit, MOST_LISTED), before=before
        )
        yield page.entries
        limit, before = limit - len(page.entries), page.last
        if before is None:
            return


async def _read_all(ledger: Reading, entries: Sequence[Entry]) -> list[Past]:
    """In their order, without those that were forgotten meanwhile. Of their outputs no token is
    read."""
    found: list[Past | None] = []
    for start in range(0, len(entries), _AT_ONCE):
        part = entries[start : start + _AT_ONCE]
        found += await asyncio.gather(*(_read(ledger, entry) for entry in part))
    return [past for past in found if past is not None]


async def _read(ledger: Reading, entry: Entry) -> Past | None:
    try:
        stored = await ledger.read(entry.request_id, entry.num_tokens)
        events = await ledger.events(entry.request_id)
    except UnknownRequest:
        return None
    return Past.of(stored, events)
