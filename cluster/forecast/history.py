"""What a ledger still knows of requests that finished, without their prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Protocol

from cluster.forecast.record import Record
from cluster.workloads.arrival import Arrival
from everlift.blockhash import BLOCK_SIZE, block_hashes
from everlift.errors import UnknownRequest
from everlift.request_id import tenant_of
from router.ledger.base import MOST_LISTED, Page, Position
from router.ledger.entry import Entry, Event, State, Stored

#: Requests that are read at the same time.
_AT_ONCE = 64


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

    async def read(self, request_id: str, offsets: Sequence[int] = ()) -> Stored: ...

    async def events(self, request_id: str) -> tuple[Event, ...]: ...


async def finished_requests(ledger: Reading, limit: int) -> list[Record]:
    """Of the ``limit`` newest ones each choice, by arrival; the first arrives at 0. When a first
    token came no ledger knows: it is infinite. Raises LedgerUnavailable."""
    found: list[Record] = []
    async for entries in _pages(ledger, limit):
        for start in range(0, len(entries), _AT_ONCE):
            part = entries[start : start + _AT_ONCE]
            for records in await asyncio.gather(*(_read(ledger, entry) for entry in part)):
                found += records
    found.sort(key=lambda record: record.arrival.at)
    begin = found[0].arrival.at if found else 0.0
    return [_shifted(record, begin, index) for index, record in enumerate(found)]


def _shifted(record: Record, begin: float, index: int) -> Record:
    return replace(
        record,
        index=index,
        arrival=replace(record.arrival, at=record.arrival.at - begin),
        dispatched=record.dispatched - begin,
        finished=record.finished - begin,
    )


async def _pages(ledger: Reading, limit: int) -> AsyncIterator[Sequence[Entry]]:
    last: Position | None = None
    while limit > 0:
        page = await ledger.list_requests(
            "", states=[State.FINISHED], limit=min(limit, MOST_LISTED), before=last
        )
        yield page.entries
        limit, last = limit - len(page.entries), page.last
        if last is None:
            return


async def _read(ledger: Reading, entry: Entry) -> list[Record]:
    """In ledger time, and none of one that was forgotten meanwhile. Of its outputs no token is
    read, and of its prompt nothing is kept."""
    try:
        stored = await ledger.read(entry.request_id, entry.num_tokens)
        events = await ledger.events(entry.request_id)
    except UnknownRequest:
        return []
    return list(_records(stored, events))


def _records(stored: Stored, events: Iterable[Event]) -> Iterator[Record]:
    entry, moments = stored.entry, _moments(events)
    for num_tokens in entry.num_tokens:
        yield Record(
            0,
            _arrival(stored, num_tokens),
            dispatched=moments.get("dispatch", inf),
            finished=moments.get("finish", inf),
            worker=entry.worker,
            output_tokens=num_tokens,
            attempts=entry.attempts,
            preemptions=entry.tally.preemptions,
            migrations=entry.tally.migrations,
            recomputed_tokens=entry.tally.recomputed_tokens,
        )


def _arrival(stored: Stored, num_tokens: int) -> Arrival:
    request, arrived = stored.request, stored.entry.arrived
    return Arrival(
        arrived,
        len(request.prompt_ids),
        max(1, num_tokens),
        request.max_tokens,
        priority=request.priority,
        tenant=tenant_of(request.request_id),
        application=request.application,
        ttft_target_s=inf if request.ttft_target_s is None else request.ttft_target_s,
        deadline_s=inf if request.deadline is None else request.deadline - arrived,
        prefix=tuple(
            int.from_bytes(name[:8], "big")
            for name in block_hashes(request.prompt_ids, request.salt)
        ),
        prefix_part_tokens=BLOCK_SIZE,
    )


def _moments(events: Iterable[Event]) -> dict[str, float]:
    """Of the first event of each kind."""
    moments: dict[str, float] = {}
    for event in events:
        moments.setdefault(event.move, event.time)
    return moments
