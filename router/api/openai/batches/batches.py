"""Handlers of ``/v1/batches``."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response

from everlift.errors import InvalidRequest, RateLimited
from router.api.http.endpoint import Call, JsonResponse
from router.api.openai.batches.fields import BatchFields
from router.api.openai.batches.record import BatchRecord, window_s
from router.api.openai.batches.stored import BATCH_PREFIX, StoredBatch, StoredBatches
from router.api.openai.files.stored import StoredFiles
from router.api.openai.object_ids import id_of_call
from router.api.openai.object_page import object_page, page_size
from router.auth.caller import Caller
from router.ledger.base import Ledger

#: Maximum number of batches of a tenant that have not ended.
MAX_UNFINISHED = 100
_RETRY_AFTER_S = 60.0


class Batches:
    """Handlers; ``notify`` is called when a batch has been created."""

    def __init__(
        self,
        stored: StoredBatches,
        files: StoredFiles,
        ledger: Ledger,
        notify: Callable[[], None],
    ) -> None:
        self._stored = stored
        self._files = files
        self._ledger = ledger
        self._notify = notify

    async def create(self, call: Call) -> Response:
        fields = await call.fields(BatchFields)
        window_s(fields.completion_window)
        batch_id = await id_of_call(
            self._ledger,
            call.caller,
            call.headers,
            BATCH_PREFIX,
            self._stored.ledger_time(),
            self._files.retention_s,
        )
        # An earlier call with the same idempotency key may have failed.
        if not await self._stored.exists(call.caller, batch_id):
            await self._check(call.caller, fields)
        expiry = fields.output_expires_after
        record = BatchRecord(
            fields.endpoint,
            fields.input_file_id,
            fields.completion_window,
            round(self._stored.ledger_time()),
            self._files.new_id(),
            self._files.new_id(),
            fields.metadata or {},
            expiry.seconds if expiry else None,
        )
        batch = await self._stored.create(call.caller, batch_id, record)
        self._notify()
        return _answer(batch)

    async def _check(self, caller: Caller, fields: BatchFields) -> None:
        """Check the input file of a new batch, and that the caller's tenant may create the batch.

        Raises UnknownObject if the file does not exist, and InvalidRequest if its purpose is not
        ``batch``. Raises OutOfRange if the tenant has no room for another file, RateLimited if the
        tenant has too many unfinished batches, and LedgerUnavailable.
        """
        file = await self._files.get(caller, fields.input_file_id)
        if file.purpose != "batch":
            raise InvalidRequest(
                f"the purpose of the file must be batch, not {file.purpose}", field="input_file_id"
            )
        await self._files.check_room(caller)
        unfinished = await self._stored.unfinished()
        if sum(tenant == caller.tenant for tenant in unfinished.values()) >= MAX_UNFINISHED:
            raise RateLimited(
                f"at most {MAX_UNFINISHED} batches can be unfinished at a time",
                retry_after_s=_RETRY_AFTER_S,
            )

    async def list_batches(self, call: Call) -> Response:
        query = call.request.query_params
        batches, has_more = await self._stored.list_page(
            call.caller, query.get("after", ""), page_size(query)
        )
        bodies = [(batch.batch_id, batch.record.body(batch.batch_id)) for batch in batches]
        return JsonResponse(object_page(bodies, has_more=has_more))

    async def retrieve(self, call: Call) -> Response:
        return _answer(await self._stored.get(call.caller, _id(call)))

    async def cancel(self, call: Call) -> Response:
        """Cancel a batch; its requests in progress are cancelled within a few seconds."""
        now = self._stored.ledger_time()
        return _answer(
            await self._stored.change(call.caller, _id(call), lambda it: it.cancelling(now))
        )


def _answer(batch: StoredBatch) -> Response:
    return JsonResponse(batch.record.body(batch.batch_id))


def _id(call: Call) -> str:
    batch_id: str = call.request.path_params["batch_id"]
    return batch_id
