"""Run of one batch in its router."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from everlift import logs
from everlift.client.retries import Retries
from everlift.errors import (
    DataLoss,
    DeadlineUnmeetable,
    EverliftError,
    ForgottenRequest,
    NoWorker,
    OutOfRange,
    QueueFull,
    QueueTimeout,
    RequestConflict,
    UnknownObject,
)
from router.api.openai.batches.execution import Execution, in_thread_if_long
from router.api.openai.batches.lines import (
    Answer,
    Line,
    Survey,
    answered,
    parse_lines,
    unanswered,
)
from router.api.openai.batches.record import BatchError, BatchRecord, Ending
from router.api.openai.batches.results import Results
from router.api.openai.batches.stored import StoredBatch, StoredBatches
from router.api.openai.batches.window import Window
from router.api.openai.files.record import FileRecord
from router.api.openai.files.stored import StoredFiles
from router.auth.caller import Caller, Scope
from router.auth.limits import Limits
from router.event_loop import now
from router.ledger.objects import ObjectConflict

log = logs.get_logger(__name__)

#: Seconds between two times at which results and progress are stored, and the batch is read.
_SAVE_S = 1.0
#: Errors with which a request has ended, or which a request of the same id causes, although
#: another submission may succeed. The request is erased, because it would fail again the same way.
_ERASED = (
    NoWorker,
    QueueFull,
    QueueTimeout,
    DeadlineUnmeetable,
    ForgottenRequest,
    DataLoss,
    # It was submitted with another prompt, for example because the chat template has the date.
    RequestConflict,
)
#: Seconds after which a line is submitted again whose request was erased.
_AGAIN_S = 1.0
_MESSAGES: dict[Ending, str] = {
    "expired": "the request was not completed within the batch's completion_window",
    "cancelled": "the batch was cancelled before the request was completed",
}


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that the runs of all batches in a router share.

    ``limits_of`` returns the present limits of a tenant.
    """

    batches: StoredBatches
    files: StoredFiles
    execution: Execution
    window: Window
    max_line_bytes: int
    limits_of: Callable[[str], Limits]

    def caller(self, tenant: str) -> Caller:
        """Return the caller of the requests of a tenant's batches."""
        return Caller(tenant, frozenset({Scope.INFER}), self.limits_of(tenant))


class NotRunner(Exception):
    """Raised if another router runs the batch."""


class BatchRun:
    """Run of a batch that this router has claimed; ``router_id`` is this router."""

    def __init__(self, parts: Parts, tenant: str, batch: StoredBatch, router_id: str) -> None:
        self._parts = parts
        self._tenant = tenant
        self._batch = batch
        self._router_id = router_id
        #: seconds for which the results are kept after the end of the batch
        self._kept_s = parts.files.kept_s(batch.record.output_expires_s)
        #: time until which they are kept at least, because the end is not known before
        self._expires_at = max(batch.record.expires_at, round(self._now())) + self._kept_s
        self._results = Results(parts.files, self._caller, batch.batch_id, self._expires_at)
        #: numbers of the lines that this run has begun and that have no result yet
        self._in_progress: set[int] = set()

    @property
    def _caller(self) -> Caller:
        return self._parts.caller(self._tenant)

    @property
    def _record(self) -> BatchRecord:
        return self._batch.record

    async def run(self) -> None:
        """Run the batch to its end.

        After a cancellation of this task, its requests continue in the cluster. Raises NotRunner or
        ObjectConflict if another router has taken the batch over, LedgerFull and LedgerUnavailable.
        """
        if not self._record.total:
            await self._check_input()
        if self._record.is_final:
            return
        await self._results.load()
        try:
            ending = await self._run_lines()
            if ending is not None:
                await self._refuse_remaining(ending)
        except (UnknownObject, OutOfRange) as error:
            # The input file was deleted or has expired, or the limit of its lines was lowered.
            await self._cancel_in_progress()
            await self._save()
            await self._reject([_input_error(error)])
            return
        # A router that takes over a finalizing batch after its window must find every result.
        await self._results.flush()
        await self._change(lambda it: it.finalizing(self._now()))
        await self._end(ending)

    async def _check_input(self) -> None:
        survey = Survey(self._record.endpoint)
        try:
            async for lines in self._input():
                await asyncio.to_thread(survey.add, lines)
        except (UnknownObject, OutOfRange) as error:
            await self._reject([_input_error(error)])
            return
        survey.finish()
        if survey.errors:
            await self._reject(survey.errors)
        else:
            total, model = survey.num_lines, survey.model
            await self._change(lambda it: it.started(total, model, self._now()))

    async def _reject(self, errors: Sequence[BatchError]) -> None:
        await self._change(lambda it: it.rejected(errors, self._now()))

    def _input(self) -> AsyncIterator[list[bytes]]:
        parts = self._parts
        return parts.files.lines(self._caller, self._record.input_file_id, parts.max_line_bytes)

    @property
    def _ending(self) -> Ending | None:
        """Reason why no more lines are to run, if there is one."""
        if self._record.status == "cancelling":
            return "cancelled"
        is_complete = len(self._results.custom_ids) == self._record.total
        return "expired" if self._now() >= self._record.expires_at and not is_complete else None

    async def _run_lines(self) -> Ending | None:
        """Run the lines without a result. Return why they were stopped, or None if all ended."""
        if self._ending is not None:
            return self._ending
        feeding = asyncio.create_task(self._feed())
        try:
            while not feeding.done() and self._ending is None:
                await asyncio.wait([feeding], timeout=_SAVE_S)
                await self._save()
            if not feeding.done():
                return self._ending
            feeding.result()
            return None
        # Not except*, because Python before 3.11.4 wraps an exception raised there in a group.
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _feed(self) -> None:
        window, tenant = self._parts.window, self._tenant
        with window.batch(tenant):
            async with asyncio.TaskGroup() as group:
                async for line in self._remaining():
                    await window.acquire(tenant)
                    task = group.create_task(self._run_line(line))
                    task.add_done_callback(lambda _: window.release(tenant))

    async def _remaining(self) -> AsyncIterator[Line]:
        """Yield the lines without a result, in the order of the file."""
        first, endpoint, ended = 1, self._record.endpoint, self._results.custom_ids
        async for group in self._input():
            for line in await asyncio.to_thread(parse_lines, first, group, endpoint, ended):
                yield line
            first += len(group)

    async def _run_line(self, line: Line) -> None:
        self._in_progress.add(line.number)
        answer, batch_id = await self._answer(line), self._batch.batch_id
        self._results.append(
            await in_thread_if_long(len(answer.body), lambda: answered(batch_id, line, answer))
        )
        self._in_progress.remove(line.number)

    async def _answer(self, line: Line) -> Answer:
        """Return the answer to a line; retry it while the cluster has no room for it."""
        execution, batch_id = self._parts.execution, self._batch.batch_id
        retries = Retries(math.inf, math.inf, random.random)
        while True:
            try:
                return await execution.answer(self._caller, self._record.endpoint, batch_id, line)
            except EverliftError as error:
                delay = retries.delay(error, now())
                if isinstance(error, _ERASED):
                    await self._forget(line.number)
                    delay = delay or error.retry_after_s or _AGAIN_S
                if delay is None:
                    return execution.refused(batch_id, line, error)
                await asyncio.sleep(delay)
            except Exception:
                log.exception("unexpected error in a line of a batch", batch_id=batch_id)
                unknown = EverliftError("internal error; see the router's log")
                return execution.refused(batch_id, line, unknown)

    async def _forget(self, number: int) -> None:
        with suppress(EverliftError):
            await self._parts.execution.forget(self._caller, self._batch.batch_id, number)

    async def _refuse_remaining(self, ending: Ending) -> None:
        """Cancel the requests in progress, and give all remaining lines an error as result."""
        batch_id = self._batch.batch_id
        # Lines begin in the order of the file, so those that another router has begun are among
        # the first ones.
        num_begun = 2 * self._parts.window.size
        async for line in self._remaining():
            if num_begun > 0:
                self._in_progress.add(line.number)
            num_begun -= 1
            code, message = f"batch_{ending}", _MESSAGES[ending]
            self._results.append(unanswered(batch_id, line, code, message))
            # There may be many lines.
            await asyncio.sleep(0)
        await self._cancel_in_progress()

    async def _cancel_in_progress(self) -> None:
        for number in sorted(self._in_progress):
            await self._parts.execution.cancel(self._caller, self._batch.batch_id, number)
        self._in_progress.clear()

    async def _save(self) -> None:
        """Store results and progress, and read whether the batch was cancelled.

        Raises NotRunner, ObjectConflict, LedgerFull and LedgerUnavailable.
        """
        if not await self._results.flush():
            known = await self._parts.batches.get(self._caller, self._batch.batch_id)
            self._batch = self._check_runner(known)
            if self._record.counts == self._results.counts:
                return
        await self._save_files(self._record.created_at, self._expires_at)
        await self._change(lambda it: it.counted(self._results.counts))

    async def _save_files(self, created_at: int, expires_at: int) -> None:
        record, results = self._record, self._results
        output, errors = record.output_file_id, record.error_file_id
        files: tuple[tuple[Literal["output", "errors"], str, str, int], ...] = (
            ("output", output, errors, results.num_output_bytes),
            ("errors", errors, output, results.num_error_bytes),
        )
        for part, file_id, sibling, num_bytes in files:
            if num_bytes:
                file = FileRecord(
                    f"{self._batch.batch_id}_{part}.jsonl",
                    "batch_output",
                    created_at,
                    expires_at,
                    num_bytes,
                    batch_id=self._batch.batch_id,
                    part=part,
                    sibling=sibling,
                )
                await self._parts.files.put(self._caller, file_id, file)

    async def _change(self, changed: Callable[[BatchRecord], BatchRecord]) -> None:
        while (record := changed(self._record)) != self._record:
            with suppress(ObjectConflict):
                self._batch = await self._parts.batches.put(self._caller, self._batch, record)
                return
            # A client has cancelled the batch, or another router has taken it over.
            known = await self._parts.batches.get(self._caller, self._batch.batch_id)
            self._batch = self._check_runner(known)

    def _check_runner(self, known: StoredBatch) -> StoredBatch:
        if known.record.runner != self._router_id:
            raise NotRunner(f"the router {known.record.runner} runs {known.batch_id}")
        return known

    async def _end(self, ending: Ending | None) -> None:
        # The client counts the time for which the files are kept from the end of the batch.
        created_at = round(self._now())
        await self._save_files(created_at, min(created_at + self._kept_s, self._expires_at))
        counts = self._results.counts
        await self._change(lambda it: it.counted(counts).ended(ending, self._now()))
        log.info(
            "batch ended",
            batch_id=self._batch.batch_id,
            status=self._record.status,
            completed=counts.completed,
            failed=counts.failed,
        )

    def _now(self) -> float:
        return self._parts.batches.ledger_time()


def _input_error(error: EverliftError) -> BatchError:
    return {
        "code": error.slug,
        "line": None,
        "message": str(error),
        "param": "input_file_id",
    }
