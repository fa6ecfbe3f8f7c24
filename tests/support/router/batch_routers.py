"""Routers that run batches on one ledger, with a scripted model and without a cluster."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, cast

from everlift.errors import EverliftError, LedgerUnavailable
from router.api.openai.batches.execution import Execution
from router.api.openai.batches.lines import Answer, Line
from router.api.openai.batches.record import BatchRecord
from router.api.openai.batches.run import Parts
from router.api.openai.batches.runners import Runners
from router.api.openai.batches.stored import BATCH_PREFIX, StoredBatch, StoredBatches
from router.api.openai.batches.window import Window
from router.api.openai.files.record import CHUNK_BYTES, FileRecord
from router.api.openai.files.stored import StoredFiles
from router.api.openai.object_ids import new_id
from router.auth.caller import ANYONE, Caller
from router.auth.limits import NO_LIMITS, Limits
from router.ledger.memory.memory import MemoryLedger
from router.ledger.objects import StoredObject
from tests.support.router.batch_client import line

ENDPOINT = "/v1/completions"
KEPT_S = 3600.0


class Objects(MemoryLedger):
    """Ledger of a cluster, with the names of the routers that are alive, and a clock to set."""

    def __init__(self) -> None:
        super().__init__(lambda: self.now)
        self.now = time.time()
        self.living: set[str] = set()

    async def gateways(self) -> dict[str, str]:
        return dict.fromkeys(self.living, "")

    def names(self, kind: str, tenant: str = "") -> tuple[str, ...]:
        return self._objects.names(f"{tenant}/{kind}" if tenant else kind, "", 1000)


class Link(MemoryLedger):
    """A router's connection to ``Objects``.

    ``on_write`` is called before and after each write with the number of the write; it may raise.
    """

    def __init__(self, objects: Objects) -> None:
        super().__init__(lambda: objects.now)
        self.objects = objects
        self.num_writes = 0
        self.on_write: Callable[[int, str], None] = lambda number, moment: None
        self.is_down = False

    async def _check(self) -> None:
        await asyncio.sleep(0)
        if self.is_down:
            raise LedgerUnavailable("down")

    async def put_object(
        self, name: str, data: bytes, version: int, retention_s: float | None = None
    ) -> int:
        return await self._write(lambda: self.objects.put_object(name, data, version, retention_s))

    async def delete_object(self, name: str) -> bool:
        return await self._write(lambda: self.objects.delete_object(name))

    async def _write(self, write: Callable[[], Awaitable[Any]]) -> Any:
        await self._check()
        self.num_writes += 1
        number = self.num_writes
        self.on_write(number, "before")
        done = await write()
        self.on_write(number, "after")
        return done

    async def get_object(self, name: str) -> StoredObject | None:
        await self._check()
        return await self.objects.get_object(name)

    async def list_objects(
        self, kind: str, tenant: str, after: str = "", limit: int = 1000
    ) -> tuple[str, ...]:
        await self._check()
        return await self.objects.list_objects(kind, tenant, after, limit)

    async def gateways(self) -> dict[str, str]:
        await self._check()
        return await self.objects.gateways()


class Model(Execution):
    """Model that answers lines at once, unless they are to wait or to fail."""

    def __init__(self) -> None:
        super().__init__(cast("Any", None), {})
        #: number of answers to a line, by its custom id
        self.answered: Counter[str] = Counter()
        #: errors that are raised for a line before it is answered
        self.errors: dict[str, list[EverliftError]] = {}
        #: lines that wait for ``released``, and those that have reached this wait
        self.held: set[str] = set()
        self.waiting: set[str] = set()
        self.released = asyncio.Event()
        self.cancelled: list[int] = []
        self.forgotten: list[int] = []
        self.limits: list[Limits] = []
        self.text = "ok"

    async def answer(self, caller: Caller, endpoint: str, batch_id: str, line: Line) -> Answer:
        self.limits.append(caller.limits)
        await asyncio.sleep(0)
        if errors := self.errors.get(line.custom_id):
            raise errors.pop(0)
        if line.custom_id in self.held:
            self.waiting.add(line.custom_id)
            await self.released.wait()
        self.answered[line.custom_id] += 1
        usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
        body = json.dumps({"text": self.text, "usage": usage}).encode()
        return Answer(200, body, f"{batch_id}-{line.number}")

    async def cancel(self, caller: Caller, batch_id: str, number: int) -> None:
        self.cancelled.append(number)

    async def forget(self, caller: Caller, batch_id: str, number: int) -> None:
        self.forgotten.append(number)


class FakeRouter:
    """Files and batches of one router."""

    def __init__(
        self, objects: Objects, name: str = "a", model: Model | None = None, size: int = 4
    ) -> None:
        self.name = name
        self.link = Link(objects)
        self.objects = objects
        self.model = model or Model()
        self.limits: Limits = NO_LIMITS
        self.files = StoredFiles(self.link, lambda: objects.now, KEPT_S, 8 << 20)
        self.batches = StoredBatches(self.link, lambda: objects.now, KEPT_S)
        self.parts = Parts(
            self.batches,
            self.files,
            self.model,
            Window(lambda: size),
            1 << 20,
            lambda tenant: self.limits,
        )
        self.runners = Runners(self.parts, self.link, name)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.objects.living.add(self.name)
        self._task = asyncio.create_task(self.runners.run())

    async def stop(self) -> None:
        """Stop as after SIGTERM."""
        await self.runners.stop()
        if self._task is not None:
            await self._task
        self.objects.living.discard(self.name)

    def kill(self) -> None:
        """Lose the ledger and the lease; running batches notice at their next call."""
        self.link.is_down = True
        self.objects.living.discard(self.name)

    async def upload(self, content: bytes, caller: Caller = ANYONE, **fields: Any) -> str:
        file_id = self.files.new_id()
        now = round(self.objects.now)
        record = FileRecord("in", "batch", now, now + round(KEPT_S), len(content), **fields)
        await self.files.create(caller, file_id, record, parts_of(content))
        return file_id

    async def create(
        self, content: bytes, window: str = "1h", caller: Caller = ANYONE, **fields: Any
    ) -> str:
        """Upload ``content``, and create a batch of it."""
        record = BatchRecord(
            ENDPOINT,
            await self.upload(content, caller),
            window,
            round(self.objects.now),
            self.files.new_id(),
            self.files.new_id(),
            **fields,
        )
        batch = await self.batches.create(
            caller, new_id(BATCH_PREFIX, self.batches.ledger_time()), record
        )
        self.runners.notify()
        return batch.batch_id

    async def change(self, batch_id: str, change: Callable[[BatchRecord], BatchRecord]) -> None:
        await self.batches.change(ANYONE, batch_id, change)

    async def cancel(self, batch_id: str) -> None:
        await self.change(batch_id, lambda it: it.cancelling(self.objects.now))

    async def when(
        self, batch_id: str, holds: Callable[[BatchRecord], object], caller: Caller = ANYONE
    ) -> StoredBatch:
        async with asyncio.timeout(20):
            while True:
                batch = await self.batches.get(caller, batch_id)
                if holds(batch.record):
                    return batch
                await asyncio.sleep(0.002)

    async def ended(self, batch_id: str, caller: Caller = ANYONE) -> BatchRecord:
        return (await self.when(batch_id, lambda it: it.is_final, caller)).record

    async def content(self, file_id: str, caller: Caller = ANYONE) -> bytes:
        record = await self.files.get(caller, file_id)
        return b"".join([part async for part in self.files.content(caller, file_id, record)])

    async def results(self, record: BatchRecord) -> dict[str, str]:
        """Return "ok" or the error code of each line; check that none has two results."""
        body = record.body("batch_")
        ids = [it for it in (body["output_file_id"], body["error_file_id"]) if it]
        lines = b"".join([await self.content(file_id) for file_id in ids]).splitlines()
        assert len(lines) == record.counts.completed + record.counts.failed
        found: dict[str, str] = {}
        for each in map(json.loads, lines):
            assert each["custom_id"] not in found
            response, error = each["response"], each["error"]
            found[each["custom_id"]] = (
                error["code"]
                if response is None
                else response["body"].get("text") or response["body"]["error"]["code"]
            )
        return found


async def parts_of(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES]


def input_lines(custom_ids: Iterable[str]) -> bytes:
    return "".join(json.dumps(line(each, prompt=[1])) + "\n" for each in custom_ids).encode()
