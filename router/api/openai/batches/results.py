"""Results of a batch, which its router appends in the ledger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

from router.api.openai.batches.lines import Result, counts_of, unanswered
from router.api.openai.batches.record import Counts
from router.api.openai.files.record import CHUNK_BYTES, ResultChunk
from router.api.openai.files.stored import StoredFiles
from router.auth.caller import Caller
from router.ledger.objects import MAX_OBJECT_BYTES


class Results:
    """Results of a batch, to which only one router at a time can append.

    ``flush`` raises ObjectConflict if another router has appended since ``load``. A line therefore
    has at most one result, even if two routers run the batch. Each change is a compare-and-swap of
    one chunk. The change adds lines to the last chunk, which may become full, or creates the chunk
    after a full one. Results are kept until ``expires_at``, in seconds since 1970.
    """

    def __init__(
        self, files: StoredFiles, caller: Caller, batch_id: str, expires_at: float
    ) -> None:
        self._files = files
        self._caller = caller
        self._batch_id = batch_id
        self._expires_at = expires_at
        #: first chunk that is not full, with its number and version; version 0: does not exist
        self._last = ResultChunk()
        self._number = 0
        self._version = 0
        self._pending: list[Result] = []
        #: custom ids of all lines with a result, including pending ones
        self.custom_ids: set[str] = set()
        #: counts and sizes of the stored results
        self.counts = Counts()
        self.num_output_bytes = 0
        self.num_error_bytes = 0

    def append(self, result: Result) -> None:
        """Add a result, which ``flush`` will store."""
        self.custom_ids.add(result.line.custom_id)
        self._pending.append(result)

    async def load(self) -> None:
        """Read the results that are stored. Raises LedgerUnavailable."""
        while True:
            known = await self._files.results(self._caller, self._batch_id, self._number)
            if known is None:
                return
            self._last, self._version = known
            await asyncio.to_thread(self._count, self._last)
            if not self._last.is_full:
                return
            self._begin_chunk()

    def _count(self, chunk: ResultChunk) -> None:
        self.num_output_bytes += len(chunk.output)
        self.num_error_bytes += len(chunk.errors)
        for line in (chunk.output + chunk.errors).splitlines():
            result = json.loads(line)
            self.custom_ids.add(result["custom_id"])
            self.counts += counts_of(result)

    def _begin_chunk(self) -> None:
        self._last, self._number, self._version = ResultChunk(), self._number + 1, 0

    async def flush(self) -> bool:
        """Store the pending results, and return whether there were any.

        Raises ObjectConflict if another router has appended, LedgerFull and LedgerUnavailable.
        """
        if not self._pending:
            return False
        pending, self._pending = self._pending, []
        group: list[Result] = []
        num_bytes = self._last.num_bytes
        for result in pending:
            if num_bytes and num_bytes + len(result.data) > CHUNK_BYTES:
                await self._store(group, is_full=True)
                self._begin_chunk()
                group, num_bytes = [], 0
            group.append(result)
            num_bytes += len(result.data)
        await self._store(group, is_full=False)
        return True

    async def _store(self, group: Sequence[Result], *, is_full: bool) -> None:
        """Append ``group`` to the last chunk, and store the chunk, marked as full if ``is_full``.

        A result that is too large for an object of the ledger is replaced by an error. Raises
        ObjectConflict if another router has appended, LedgerFull and LedgerUnavailable.
        """
        chunk = replace(self._last + _chunk_of(group), is_full=is_full)
        data = await asyncio.to_thread(chunk.to_bytes)
        if len(data) > MAX_OBJECT_BYTES:
            # Only a chunk with a single result is longer than CHUNK_BYTES.
            group = [_too_large(result) for result in group]
            chunk = replace(_chunk_of(group), is_full=is_full)
            data = chunk.to_bytes()
        self._version = await self._files.put_results(
            self._caller, self._batch_id, self._number, data, self._version, self._expires_at
        )
        self.num_output_bytes += len(chunk.output) - len(self._last.output)
        self.num_error_bytes += len(chunk.errors) - len(self._last.errors)
        for result in group:
            self.counts += result.counts
        self._last = chunk


def _chunk_of(results: Sequence[Result]) -> ResultChunk:
    return ResultChunk(
        b"".join(result.data for result in results if result.counts.completed),
        b"".join(result.data for result in results if not result.counts.completed),
    )


def _too_large(result: Result) -> Result:
    message = f"the answer has {len(result.data)} bytes, which is too large for a batch"
    return unanswered(result.batch_id, result.line, "message_too_large", message)
