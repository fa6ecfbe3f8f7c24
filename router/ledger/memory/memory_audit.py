"""An audit of a MemoryLedger, whose listings are of its records themselves. Pure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from router.ledger.audit import Audited, Claim, Item, Listed, Stray
from router.ledger.memory.record import Record


class MemoryAudit:
    """``owned`` are unfinished requests by gateway."""

    def __init__(self, records: Mapping[str, Record], owned: Mapping[str, Collection[str]]) -> None:
        self._records = records
        self._owned = owned

    async def items(self) -> AsyncIterator[Item]:
        for record in list(self._records.values()):
            yield self._audited(record)
        for gateway, owned in list(self._owned.items()):
            for request_id in list(owned):
                yield self._claim(gateway, request_id)

    async def again(self, items: Sequence[Item]) -> list[Item]:
        found = [self._again(item) for item in items]
        return [item for item in found if item is not None]

    def _again(self, item: Item) -> Item | None:
        match item:
            case Audited():
                record = self._records.get(item.request_id)
                return self._audited(record) if record else None
            case Claim():
                owned = self._owned.get(item.gateway, ())
                return (
                    self._claim(item.gateway, item.request_id) if item.request_id in owned else None
                )
            case Stray() | Listed():
                return None

    def _audited(self, record: Record) -> Audited:
        entry = record.entry
        return Audited(
            entry=entry,
            max_tokens=record.request.max_tokens,
            finished_by=record.finished_by,
            events=tuple(record.events),
            owned=entry.request_id in self._owned.get(entry.gateway, ()),
        )

    def _claim(self, gateway: str, request_id: str) -> Claim:
        record = self._records.get(request_id)
        if record is None:
            return Claim(request_id, gateway, None, "")
        return Claim(request_id, gateway, record.entry.state, record.entry.gateway)
