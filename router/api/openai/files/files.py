"""Handlers of ``/v1/files``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Literal

from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from everlift import logs
from everlift.errors import EverliftError, InvalidRequest, UnknownObject
from router.api.http.endpoint import Call, JsonResponse
from router.api.openai.batches.stored import StoredBatches
from router.api.openai.files.record import FileRecord
from router.api.openai.files.stored import FILE_PREFIX, StoredFiles
from router.api.openai.files.upload import received
from router.api.openai.object_ids import id_of_call
from router.api.openai.object_page import object_page, page_size
from router.auth.caller import Caller
from router.ledger.base import Ledger

log = logs.get_logger(__name__)

#: Maximum number of files on a page, and the default, as in OpenAI's API.
_MAX_PAGE = 10_000
_JSON_LINES = "application/jsonl"


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: bool


class Files:
    def __init__(self, stored: StoredFiles, batches: StoredBatches, ledger: Ledger) -> None:
        self._stored = stored
        self._batches = batches
        self._ledger = ledger

    async def create(self, call: Call) -> Response:
        stored = self._stored
        async with received(call, stored.max_bytes) as upload:
            time_s, kept_s = stored.ledger_time(), stored.retention_s
            file_id = await id_of_call(
                self._ledger, call.caller, call.headers, FILE_PREFIX, time_s, kept_s
            )
            created_at = round(time_s)
            expires_at = created_at + stored.kept_s(upload.expires_s)
            record = FileRecord(upload.filename, "batch", created_at, expires_at, upload.num_bytes)
            record = await stored.create(call.caller, file_id, record, upload.parts())
        return JsonResponse(record.body(file_id))

    async def list_files(self, call: Call) -> Response:
        query = call.request.query_params
        files = [
            (file_id, record)
            for file_id, record in await self._stored.list_all(call.caller)
            if query.get("purpose") in (None, "", record.purpose)
        ]
        if query.get("order", "desc") == "asc":
            files.reverse()
        if after := query.get("after"):
            ids = [file_id for file_id, _ in files]
            if after not in ids:
                raise InvalidRequest(f"after: there is no file {after[:64]}", field="after")
            files = files[ids.index(after) + 1 :]
        limit = page_size(query, _MAX_PAGE, _MAX_PAGE)
        bodies = [(file_id, record.body(file_id)) for file_id, record in files[:limit]]
        return JsonResponse(object_page(bodies, has_more=len(files) > limit))

    async def retrieve(self, call: Call) -> Response:
        file_id = _id(call)
        return JsonResponse((await self._stored.get(call.caller, file_id)).body(file_id))

    async def delete(self, call: Call) -> Response:
        record = await self._stored.get(call.caller, _id(call))
        if record.batch_id:
            await self._check_ended(call.caller, record.batch_id)
        await self._stored.delete(call.caller, _id(call))
        return JsonResponse({"id": _id(call), "object": "file", "deleted": True})

    async def _check_ended(self, caller: Caller, batch_id: str) -> None:
        # Without its results, a batch would run all its lines again.
        with suppress(UnknownObject):
            if not (await self._batches.get(caller, batch_id)).record.is_final:
                raise InvalidRequest(f"the batch {batch_id} has not ended; cancel it first")

    async def content(self, call: Call) -> ASGIApp:
        """Return a file's content; the results so far if its batch has not ended."""
        file_id = _id(call)
        record = await self._stored.get(call.caller, file_id)
        parts = self._stored.content(call.caller, file_id, record)
        # A later error ends the connection, because the answer has begun then.
        first = await anext(parts, b"")
        return StreamingResponse(_content(first, parts, file_id), media_type=_JSON_LINES)


async def _content(first: bytes, rest: AsyncIterator[bytes], file_id: str) -> AsyncIterator[bytes]:
    if first:
        yield first
    try:
        async for part in rest:
            if part:
                yield part
    except EverliftError as error:
        log.warning("download of a file interrupted", file_id=file_id, cause=error)
        raise


def _id(call: Call) -> str:
    file_id: str = call.request.path_params["file_id"]
    return file_id
