"""Files in the ledger: a record, and the content in chunks that are objects of their own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from everlift.errors import EverliftError, OutOfRange, RequestConflict, UnknownObject
from router.api.openai.files.record import FileRecord, LineSplitter, ResultChunk, pack, unpack
from router.api.openai.object_ids import is_id, new_id
from router.auth.caller import Caller
from router.ledger.base import MAX_PAGE_SIZE, Ledger
from router.ledger.objects import ObjectConflict, object_name
from router.requests.registry import KeyedLock

FILE_PREFIX = "file-"
_KIND, _CHUNKS, _RESULTS = "files", "file_chunks", "batch_results"
#: A file counts with at least this many bytes toward its tenant's limit.
_MIN_COUNTED_BYTES = 1 << 16
#: Maximum number of records that are read from the ledger at the same time.
_READS_AT_ONCE = 32


class StoredFiles:
    """Reader and writer of files.

    ``ledger_time`` returns the ledger's time in seconds since 1970. Files are kept for
    ``retention_s`` seconds unless they have their own limit. ``create`` fails if the tenant's files
    would then have more than ``max_bytes`` bytes in total. A file counts as at least 64 KiB.
    """

    def __init__(
        self,
        ledger: Ledger,
        ledger_time: Callable[[], float],
        retention_s: float,
        max_bytes: int,
    ) -> None:
        self._ledger = ledger
        self.ledger_time = ledger_time
        self.retention_s = retention_s
        self.max_bytes = max_bytes
        #: held by the upload of a file, by tenant
        self._locks = KeyedLock()

    def new_id(self) -> str:
        return new_id(FILE_PREFIX, self.ledger_time())

    def kept_s(self, seconds: int | None) -> int:
        """Return the seconds for which a file is kept; None means the default retention."""
        return round(self.retention_s) if seconds is None else seconds

    async def create(
        self, caller: Caller, file_id: str, record: FileRecord, parts: AsyncIterator[bytes]
    ) -> FileRecord:
        """Store a file with the content ``parts``, and return its record.

        The parts have at most CHUNK_BYTES each. ``record`` has the number of bytes, but no digest
        and no id of the content. A repeated call stores nothing: the content is compared with that
        of the existing file, whose record is returned. Raises RequestConflict if the contents
        differ, OutOfRange if the tenant has no room for the file, LedgerFull and LedgerUnavailable.
        """
        # Files that are uploaded at the same time must not exceed the limit together.
        async with self._locks.hold(caller.tenant):
            known = await self._read(_name(caller, file_id))
            if known is None:
                await self.check_room(caller, record.num_bytes)
                record = replace(record, content_id=self.new_id())
                digest = await self._put_chunks(caller, record, parts)
                record = replace(record, digest=digest)
                with suppress(ObjectConflict):
                    await self._put(caller, file_id, record, 0)
                    return record
                # The same call was sent to another router at the same time.
                await self._delete_content(caller, record)
                known = await self.get(caller, file_id)
            else:
                digest = await _digest(parts)
        if known.digest != digest:
            raise RequestConflict("another file was uploaded with this idempotency-key")
        return known

    async def put(self, caller: Caller, file_id: str, record: FileRecord) -> None:
        """Create or replace the record of a file, which no other code may change meanwhile."""
        known = await self._ledger.get_object(_name(caller, file_id))
        await self._put(caller, file_id, record, known.version if known else 0)

    async def _put(self, caller: Caller, file_id: str, record: FileRecord, version: int) -> None:
        name, data = _name(caller, file_id), record.to_bytes()
        await self._ledger.put_object(name, data, version, self._left_s(record.expires_at))

    async def _put_chunks(
        self, caller: Caller, record: FileRecord, parts: AsyncIterator[bytes]
    ) -> str:
        """Store the content of a new file, and return its digest. After an error, delete it."""
        digest, number = hashlib.sha256(), 0
        try:
            async for part in parts:
                digest.update(part)
                data = await asyncio.to_thread(pack, part)
                name = _chunk_name(caller, record.content_id, number)
                await self._ledger.put_object(name, data, 0, self._left_s(record.expires_at))
                number += 1
        except EverliftError:
            with suppress(EverliftError):
                await self._delete_content(caller, record)
            raise
        return digest.hexdigest()

    async def put_results(
        self,
        caller: Caller,
        batch_id: str,
        number: int,
        data: bytes,
        version: int,
        expires_at: float,
    ) -> int:
        """Store a chunk of a batch's results (``ResultChunk.to_bytes``); return its new version.

        ``version`` is the chunk's present version; 0 if it does not exist. Raises ObjectConflict if
        it has another version, LedgerFull and LedgerUnavailable.
        """
        name = _results_name(caller, batch_id, number)
        return await self._ledger.put_object(name, data, version, self._left_s(expires_at))

    async def results(
        self, caller: Caller, batch_id: str, number: int
    ) -> tuple[ResultChunk, int] | None:
        """Return a chunk of a batch's results and its version; None if it does not exist."""
        stored = await self._ledger.get_object(_results_name(caller, batch_id, number))
        if stored is None:
            return None
        return await asyncio.to_thread(ResultChunk.from_bytes, stored.data), stored.version

    async def get(self, caller: Caller, file_id: str) -> FileRecord:
        """Return a file. Raises UnknownObject and LedgerUnavailable."""
        record = await self._read(_name(caller, file_id))
        if record is None:
            raise _unknown(file_id)
        return record

    async def list_all(self, caller: Caller) -> Sequence[tuple[str, FileRecord]]:
        """Return the ids and records of all files of the caller's tenant, newest first."""
        found: list[tuple[str, FileRecord]] = []
        last = ""
        while True:
            names = await self._ledger.list_objects(_KIND, caller.tenant, last)
            for start in range(0, len(names), _READS_AT_ONCE):
                part = names[start : start + _READS_AT_ONCE]
                records = await asyncio.gather(*map(self._read, part))
                ids = [name.rpartition("/")[2] for name in part]
                found += [(i, it) for i, it in zip(ids, records, strict=True) if it is not None]
            if len(names) < MAX_PAGE_SIZE:
                return found
            last = names[-1]

    async def check_room(self, caller: Caller, num_bytes: int = 0) -> None:
        """Check that the tenant may add a file of ``num_bytes`` bytes.

        Raises OutOfRange if the tenant's files would then have more than ``max_bytes`` bytes in
        total, and LedgerUnavailable. A file counts as at least 64 KiB.
        """
        records = [record for _, record in await self.list_all(caller)]
        used = sum(max(record.num_bytes, _MIN_COUNTED_BYTES) for record in records)
        if used + max(num_bytes, _MIN_COUNTED_BYTES) > self.max_bytes:
            raise OutOfRange(
                f"all files together have at most {self.max_bytes >> 20} MiB (router.files_mib); "
                "delete files that are no longer needed",
                field="file",
            )

    async def delete(self, caller: Caller, file_id: str) -> None:
        """Delete a file. Raises UnknownObject and LedgerUnavailable."""
        record = await self.get(caller, file_id)
        await self._ledger.delete_object(_name(caller, file_id))
        if not record.batch_id or await self._read(_name(caller, record.sibling)) is None:
            await self._delete_content(caller, record)

    async def _delete_content(self, caller: Caller, record: FileRecord) -> None:
        """Delete the content of a file; for a result file, also the content of its sibling."""
        name_of, number = partial(_chunk_name, caller, record.content_id), 0
        if record.batch_id:
            name_of = partial(_results_name, caller, record.batch_id)
        while await self._ledger.delete_object(name_of(number)):
            number += 1

    async def content(
        self, caller: Caller, file_id: str, record: FileRecord
    ) -> AsyncIterator[bytes]:
        """Yield the content of a file in parts.

        Raises UnknownObject if the file was deleted or has expired meanwhile, and
        LedgerUnavailable.
        """
        number = num_bytes = 0
        while (part := await self._part(caller, record, number)) is not None:
            yield part
            number += 1
            num_bytes += len(part)
        if num_bytes < record.num_bytes:
            raise UnknownObject(f"the content of the file {file_id} was deleted or has expired")

    async def _part(self, caller: Caller, record: FileRecord, number: int) -> bytes | None:
        if record.batch_id:
            known = await self.results(caller, record.batch_id, number)
            if known is None:
                return None
            return known[0].output if record.part == "output" else known[0].errors
        stored = await self._ledger.get_object(_chunk_name(caller, record.content_id, number))
        return None if stored is None else await asyncio.to_thread(unpack, stored.data)

    async def lines(
        self, caller: Caller, file_id: str, max_line_bytes: int
    ) -> AsyncIterator[list[bytes]]:
        """Yield the lines of a file in groups, without line terminators.

        Raises UnknownObject, OutOfRange if a line has more than ``max_line_bytes``, and
        LedgerUnavailable.
        """
        splitter = LineSplitter(max_line_bytes)
        record = await self.get(caller, file_id)
        async for part in self.content(caller, file_id, record):
            yield await asyncio.to_thread(splitter.feed, part)
        if splitter.rest:
            yield [splitter.rest]

    async def _read(self, name: str) -> FileRecord | None:
        stored = await self._ledger.get_object(name)
        return None if stored is None else FileRecord.from_bytes(stored.data)

    def _left_s(self, expires_at: float) -> float:
        return max(expires_at - self.ledger_time(), 1.0)


def _name(caller: Caller, file_id: str) -> str:
    if not is_id(FILE_PREFIX, file_id):
        raise _unknown(file_id)
    return object_name(caller.tenant, _KIND, file_id)


def _chunk_name(caller: Caller, content_id: str, number: int) -> str:
    return object_name(caller.tenant, _CHUNKS, f"{content_id}:{number:06}")


def _results_name(caller: Caller, batch_id: str, number: int) -> str:
    return object_name(caller.tenant, _RESULTS, f"{batch_id}:{number:06}")


def _unknown(file_id: str) -> UnknownObject:
    return UnknownObject(f"there is no file {file_id[:64]}")


async def _digest(parts: AsyncIterator[bytes]) -> str:
    digest = hashlib.sha256()
    async for part in parts:
        digest.update(part)
    return digest.hexdigest()
