"""Files and batches over a ledger in memory, with lines that a script answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

from everlift.errors import EverliftError
from router.api.openai.batches.execution import Execution
from router.api.openai.batches.lines import Answer, Line
from router.api.openai.batches.record import BatchRecord
from router.api.openai.batches.run import Parts
from router.api.openai.batches.runners import Runners
from router.api.openai.batches.stored import StoredBatch, StoredBatches
from router.api.openai.batches.window import Window
from router.api.openai.files.record import FileRecord
from router.api.openai.files.stored import StoredFiles
from router.auth.caller import ANYONE, Caller
from router.auth.quotas import unlimited
from router.ledger.memory.memory import MemoryLedger

ENDPOINT = "/v1/completions"
KEPT_S = 3600.0


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}


@dataclass
class Script(Execution):
    """Execution that returns a line's id; ``gate`` holds all lines back while it is clear.

    ``allow`` lets some lines pass.

    ``failures`` are raised by the first calls for a line, by custom id.
    """

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    failures: dict[str, list[Exception]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    cancelled: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0
    padding: int = 0
    _num_allowed: int = 0

    def allow(self, number: int) -> None:
        self._num_allowed = number

    async def answer(self, caller: Caller, endpoint: str, batch_id: str, line: Line) -> Answer:
        self.calls[line.custom_id] += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            while not self.gate.is_set() and not self._num_allowed:
                await asyncio.sleep(0.005)
            self._num_allowed = max(0, self._num_allowed - 1)
            await asyncio.sleep(0.001)
        finally:
            self.num_running -= 1
        if failures := self.failures.get(line.custom_id):
            raise failures.pop(0)
        usage = {"prompt_tokens": 2, "completion_tokens": 3}
        body = {"text": line.custom_id, "usage": usage, "padding": "x" * self.padding}
        return Answer(200, json.dumps(body).encode(), f"{batch_id}-{line.number}")

    async def cancel(self, caller: Caller, batch_id: str, number: int) -> None:
        self.cancelled.append(number)

    async def forget(self, caller: Caller, batch_id: str, number: int) -> None:
        self.forgotten.append(number)


class LivingLedger(MemoryLedger):
    """Ledger that knows which routers are alive, and can fail.

    ``failing`` returns the error of a call of ``put_object``, or None.
    """

    def __init__(self) -> None:
        super().__init__(time.time)
        self.living = {"a": "", "b": ""}
        self.failing: Callable[[str], EverliftError | None] = lambda name: None

    async def gateways(self) -> dict[str, str]:
        return self.living

    async def put_object(
        self, name: str, data: bytes, version: int, retention_s: float | None = None
    ) -> int:
        await asyncio.sleep(0)
        if (error := self.failing(name)) is not None:
            raise error
        return await super().put_object(name, data, version, retention_s)


@dataclass
class Bench:
    """Routers that run batches over one ledger; ``now`` can be moved."""

    ledger: LivingLedger = field(default_factory=LivingLedger)
    script: Script = field(default_factory=lambda: cast("Any", Script)())
    ahead_s: float = 0.0
    window: int = 8
    routers: dict[str, tuple[Runners, asyncio.Task[None]]] = field(default_factory=dict)

    def time(self) -> float:
        return time.time() + self.ahead_s

    @property
    def files(self) -> StoredFiles:
        return StoredFiles(self.ledger, self.time, KEPT_S, 8 << 20)

    @property
    def batches(self) -> StoredBatches:
        return StoredBatches(self.ledger, self.time, KEPT_S)

    def start(self, router_id: str) -> Runners:
        window = Window(lambda: self.window)
        parts = Parts(self.batches, self.files, self.script, window, 1 << 20)
        runners = Runners(parts, self.ledger, router_id, unlimited)
        self.routers[router_id] = runners, asyncio.create_task(runners.run())
        return runners

    async def stop(self, router_id: str) -> None:
        runners, task = self.routers.pop(router_id)
        await runners.stop()
        await task

    async def close(self) -> None:
        for router_id in [*self.routers]:
            await self.stop(router_id)

    async def upload(self, lines: list[dict[str, Any]], caller: Caller = ANYONE) -> str:
        content = "".join(f"{json.dumps(each)}\n" for each in lines).encode()
        file_id = self.files.new_id()
        record = FileRecord("in.jsonl", "batch", 0, self.files.expiry(None))
        await self.files.create(caller, file_id, record, _parts(content))
        return file_id

    async def create(
        self, lines: list[dict[str, Any]], caller: Caller = ANYONE, window: str = "24h"
    ) -> StoredBatch:
        files = self.files
        record = BatchRecord(
            ENDPOINT,
            await self.upload(lines, caller),
            window,
            round(self.time()),
            files.new_id(),
            files.new_id(),
        )
        return await self.batches.create(caller, self.batches.new_id(), record)

    async def get(self, batch: StoredBatch, caller: Caller = ANYONE) -> BatchRecord:
        return (await self.batches.get(caller, batch.batch_id)).record

    async def until(
        self,
        batch: StoredBatch,
        holds: Callable[[BatchRecord], object],
        caller: Caller = ANYONE,
        seconds: float = 20.0,
    ) -> BatchRecord:
        async with asyncio.timeout(seconds):
            while not holds(record := await self.get(batch, caller)):
                await asyncio.sleep(0.01)
        return record

    async def ended(self, batch: StoredBatch, caller: Caller = ANYONE) -> BatchRecord:
        return await self.until(batch, lambda it: it.is_final, caller)

    async def results(self, record: BatchRecord, caller: Caller = ANYONE) -> dict[str, Any]:
        """Return all results by custom id. No id is there twice."""
        lines: list[Any] = []
        for file_id in (record.output_file_id, record.error_file_id):
            try:
                file = await self.files.get(caller, file_id)
            except EverliftError:
                continue
            data = b"".join([part async for part in self.files.content(caller, file_id, file)])
            assert len(data) == file.num_bytes
            lines += map(json.loads, data.splitlines())
        found = {each["custom_id"]: each for each in lines}
        assert len(found) == len(lines)
        return found


async def _parts(content: bytes) -> AsyncIterator[bytes]:
    yield content
