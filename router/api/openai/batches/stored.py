"""Batches in the ledger, and the list of those that have not ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from everlift.errors import RequestConflict, UnknownObject
from router.api.openai.batches.record import BatchRecord
from router.api.openai.object_ids import is_id
from router.auth.caller import Caller
from router.ledger.base import MAX_PAGE_SIZE, Ledger
from router.ledger.objects import ObjectConflict, object_name

BATCH_PREFIX = "batch_"
#: ``unfinished_batches`` belong to no tenant, so that routers find all of them in one listing. The
#: id of an entry is the id of a batch, a colon, and its tenant.
_KIND, _UNFINISHED = "batches", "unfinished_batches"
#: Seconds within which the record of a batch is stored after its entry in the list of unfinished
#: batches. An entry without a record is later removed: its router was lost.
_CREATION_S = 10.0


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Batch as it was read from the ledger; ``version`` is that of its object."""

    batch_id: str
    record: BatchRecord
    version: int


class StoredBatches:
    """Reader and writer of batches.

    ``ledger_time`` returns the ledger's time in seconds since 1970. A batch is kept for its
    completion window and ``retention_s`` more seconds.
    """

    def __init__(
        self, ledger: Ledger, ledger_time: Callable[[], float], retention_s: float
    ) -> None:
        self._ledger = ledger
        self.ledger_time = ledger_time
        self._retention_s = retention_s

    async def create(self, caller: Caller, batch_id: str, record: BatchRecord) -> StoredBatch:
        """Store a new batch, or return the existing one if an earlier call created it.

        Raises RequestConflict if the body of the earlier call was different, LedgerFull and
        LedgerUnavailable.
        """
        await self._put_unfinished(caller, batch_id, record)
        try:
            version = await self._put(caller, batch_id, record, 0)
            # The entry was removed if the record was stored late.
            await self._put_unfinished(caller, batch_id, record)
            return StoredBatch(batch_id, record, version)
        except ObjectConflict:
            known = await self.get(caller, batch_id)
        if not known.record.is_same_call(record):
            raise RequestConflict("another batch was created with this idempotency-key")
        return known

    async def _put_unfinished(self, caller: Caller, batch_id: str, record: BatchRecord) -> None:
        with suppress(ObjectConflict):
            entry = _unfinished_name(batch_id, caller.tenant)
            await self._ledger.put_object(entry, b"", 0, self._kept_s(record))

    async def exists(self, caller: Caller, batch_id: str) -> bool:
        """Return whether there is such a batch. Raises LedgerUnavailable."""
        return await self._ledger.get_object(_name(caller, batch_id)) is not None

    async def get(self, caller: Caller, batch_id: str) -> StoredBatch:
        """Return a batch. Raises UnknownObject and LedgerUnavailable."""
        stored = await self._ledger.get_object(_name(caller, batch_id))
        if stored is None:
            raise _unknown(batch_id)
        return StoredBatch(batch_id, BatchRecord.from_bytes(stored.data), stored.version)

    async def put(self, caller: Caller, known: StoredBatch, record: BatchRecord) -> StoredBatch:
        """Replace the record of a batch, and return the batch.

        Raises ObjectConflict if it has changed since ``known`` was read, LedgerFull and
        LedgerUnavailable.
        """
        version = await self._put(caller, known.batch_id, record, known.version)
        if record.is_final:
            await self._ledger.delete_object(_unfinished_name(known.batch_id, caller.tenant))
        return StoredBatch(known.batch_id, record, version)

    async def _put(self, caller: Caller, batch_id: str, record: BatchRecord, version: int) -> int:
        name, data = _name(caller, batch_id), record.to_bytes()
        return await self._ledger.put_object(name, data, version, self._kept_s(record))

    def _kept_s(self, record: BatchRecord) -> float:
        return max(record.expires_at - self.ledger_time(), 0.0) + self._retention_s

    async def change(
        self, caller: Caller, batch_id: str, changed: Callable[[BatchRecord], BatchRecord]
    ) -> StoredBatch:
        """Replace the record of a batch by ``changed(record)``, and return the batch.

        Raises UnknownObject, LedgerFull and LedgerUnavailable.
        """
        while True:
            known = await self.get(caller, batch_id)
            record = changed(known.record)
            if record == known.record:
                return known
            with suppress(ObjectConflict):
                return await self.put(caller, known, record)

    async def list_page(
        self, caller: Caller, after: str, limit: int
    ) -> tuple[Sequence[StoredBatch], bool]:
        """Return up to ``limit`` batches that are older than the batch ``after``, newest first.

        If ``after`` is empty, begin with the newest batch. Also return whether there are more.
        Raises UnknownObject for a malformed ``after``, and LedgerUnavailable.
        """
        start = _name(caller, after) if after else ""
        names = await self._ledger.list_objects(_KIND, caller.tenant, start, limit + 1)
        ids = [name.rpartition("/")[2] for name in names]
        found = await asyncio.gather(
            *(self.get(caller, batch_id) for batch_id in ids[:limit]), return_exceptions=True
        )
        batches: list[StoredBatch] = []
        for each in found:
            if isinstance(each, StoredBatch):
                batches.append(each)
            elif not isinstance(each, UnknownObject):
                raise each
        return batches, len(names) > limit

    async def unfinished(self) -> dict[str, str]:
        """Return the tenants of all batches that have not ended, by batch id."""
        tenants: dict[str, str] = {}
        last = ""
        while True:
            names = await self._ledger.list_objects(_UNFINISHED, "", last)
            for name in names:
                batch_id, _, tenant = name.rpartition("/")[2].partition(":")
                tenants[batch_id] = tenant
            if len(names) < MAX_PAGE_SIZE:
                return tenants
            last = names[-1]

    async def drop_unfinished(self, batch_id: str, tenant: str) -> None:
        """Remove the entry of a batch without a record from the list of unfinished batches.

        Nothing is removed within 10 seconds of the creation of the batch id, because the record may
        not have been stored yet. Raises LedgerUnavailable.
        """
        created_at = int(batch_id[len(BATCH_PREFIX) :][:12], 16) / 1000
        if self.ledger_time() > created_at + _CREATION_S:
            await self._ledger.delete_object(_unfinished_name(batch_id, tenant))


def _unfinished_name(batch_id: str, tenant: str) -> str:
    return object_name("", _UNFINISHED, f"{batch_id}:{tenant}")


def _name(caller: Caller, batch_id: str) -> str:
    if not is_id(BATCH_PREFIX, batch_id):
        raise _unknown(batch_id)
    return object_name(caller.tenant, _KIND, batch_id)


def _unknown(batch_id: str) -> UnknownObject:
    return UnknownObject(f"there is no batch {batch_id[:64]}")
