"""Records of the finished requests in a ledger, without their prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Protocol

from cluster.simulator.summary import Record
from cluster.simulator.workloads.arrivals import Arrival
from everlift.errors import UnknownRequest
from everlift.hashes import BLOCK_SIZE, block_hashes
from everlift.request_id import tenant_of
from everlift.v1 import inference_pb2 as pb
from router.auth.access import Access, store_of
from router.config import RouterConfig
from router.ledger.base import MAX_PAGE_SIZE, Ledger, Page, Position
from router.ledger.entry import Entry, Event, State, Stored
from router.requests.explanation import accepting_s, stored_explanation


def records(stored: Stored, events: Sequence[Event]) -> Iterator[Record]:
    """Yield a record of each choice of a request; times are ledger times in seconds.

    ``events`` are the ledger's events of this request. ``first_token`` is the time of the first
    token of any choice, and infinite if unknown. Only the output length is that of the choice. All
    other times and counts are those of the whole request, and equal in all its records.
    """
    explanation = stored_explanation(stored, events)
    entry, times = stored.entry, _first_times(events)
    for num_tokens in entry.num_tokens:
        yield Record(
            0,
            _arrival(stored, num_tokens, explanation),
            dispatched=times.get("dispatch", inf),
            first_token=_first_token(entry.arrived, explanation),
            finished=times.get("finish", inf),
            worker=entry.worker,
            output_tokens=num_tokens,
            attempts=entry.attempts,
            preemptions=entry.tally.preemptions,
            migrations=entry.tally.migrations,
            recomputed_tokens=entry.tally.recomputed_tokens,
            bypassed=explanation.bypassed,
        )


def _first_token(arrived: float, explanation: pb.Explanation) -> float:
    if not explanation.HasField("ttft_s"):
        return inf
    return arrived + explanation.ttft_s - accepting_s(explanation)


def _arrival(stored: Stored, num_tokens: int, explanation: pb.Explanation) -> Arrival:
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
        predicted_tokens=explanation.predicted_output_tokens / request.n or None,
        is_distrusted=explanation.prediction_distrusted,
    )


def _first_times(events: Iterable[Event]) -> dict[str, float]:
    times: dict[str, float] = {}
    for event in events:
        times.setdefault(event.move, event.time)
    return times


#: Number of requests that are read concurrently.
_AT_ONCE = 64


class Reading(Protocol):
    """Methods of a ledger by which this module reads requests."""

    async def list_requests(
        self,
        tenant: str,
        *,
        states: Sequence[State] = (),
        limit: int = MAX_PAGE_SIZE,
        before: Position | None = None,
    ) -> Page: ...

    async def read(self, request_id: str, offsets: Sequence[int] = ()) -> Stored: ...

    async def events(self, request_id: str) -> tuple[Event, ...]: ...


async def finished_requests(ledger: Reading, limit: int) -> list[Record]:
    """Return a record of each choice of the ``limit`` newest finished requests, sorted by arrival.

    Times are in seconds after the arrival of the first record, and infinite if unknown.
    ``first_token`` is the time of the first token of any choice. Requests that the ledger has
    forgotten meanwhile are left out. Raises LedgerUnavailable.
    """
    found: list[Record] = []
    async for entries in _listed(ledger, limit):
        found += await _read_all(ledger, entries)
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
    """Return the fair-share weight of each of ``tenants`` whose weight is not 1.

    The weights are read from the cluster's stored keys and tenants; without access control the
    result is empty. Raises SettingsError if the stored tenants are invalid, and LedgerUnavailable.
    """
    if (store := store_of(config, ledger)) is None:
        return {}
    access = await Access.open(store)
    found = {tenant: access.weight_of(tenant) for tenant in tenants}
    return {tenant: weight for tenant, weight in found.items() if weight != 1}


async def _listed(ledger: Reading, limit: int) -> AsyncIterator[Sequence[Entry]]:
    """Yield the ledger's entries of the ``limit`` newest finished requests, page by page."""
    before: Position | None = None
    while limit > 0:
        page = await ledger.list_requests(
            "", states=[State.FINISHED], limit=min(limit, MAX_PAGE_SIZE), before=before
        )
        yield page.entries
        limit, before = limit - len(page.entries), page.last
        if before is None:
            return


async def _read_all(ledger: Reading, entries: Sequence[Entry]) -> list[Record]:
    """Return the records of the requests that ``entries`` describe, in the same order.

    Requests that the ledger has forgotten in the meantime are left out. No output token is read.
    """
    found: list[Record] = []
    for start in range(0, len(entries), _AT_ONCE):
        part = entries[start : start + _AT_ONCE]
        for those in await asyncio.gather(*(_read(ledger, entry) for entry in part)):
            found += those
    return found


async def _read(ledger: Reading, entry: Entry) -> list[Record]:
    try:
        stored = await ledger.read(entry.request_id, entry.num_tokens)
        events = await ledger.events(entry.request_id)
    except UnknownRequest:
        return []
    return [*records(stored, events)]
