"""The streams to the workers: starts and aborts go out, one frame an engine step comes in.

A worker is up from its hello until its stream breaks or it is silent for too long. A silent
worker's stream stays open: if it speaks again it is up again, and what it still runs of the past
is aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

import grpc

from everlift import logs
from everlift.blockhash import BLOCK_SIZE
from everlift.channels import CLIENT_OPTIONS
from everlift.v1 import inference_pb2, session_pb2, session_pb2_grpc
from router.config import RouterConfig
from router.outbox import Outbox

log = logs.get(__name__)

_RECONNECT_S = 0.2


class Listener(Protocol):
    """Who hears of the workers. Called from the event loop; must not block."""

    def worker_up(self, info: session_pb2.WorkerInfo) -> None: ...

    def worker_frame(self, worker_id: str, frame: session_pb2.WorkerFrame) -> None: ...

    def worker_lost(self, worker_id: str) -> None: ...


class _Replaced(Exception):
    """Another incarnation listens at the worker's address by now."""


class WorkerLink:
    """One worker's stream, dialled again and again until closed. Times are monotonic seconds."""

    def __init__(
        self,
        info: session_pb2.WorkerInfo,
        hello: session_pb2.RouterHello,
        listener: Listener,
        silence_s: float,
    ) -> None:
        self.info = info
        self.state = session_pb2.WorkerState()
        self.running: list[inference_pb2.RunningSequence] = []
        self.is_up = False
        self.last_heard = time.monotonic()
        self._hello = hello
        self._listener = listener
        self._silence_s = silence_s
        self._outbox = Outbox(session_pb2.RouterFrame())
        self._tasks = [asyncio.create_task(self._dial()), asyncio.create_task(self._watch())]

    def start(self, starts: Sequence[session_pb2.Start]) -> None:
        self._outbox.add(session_pb2.RouterFrame(starts=starts))

    def abort(self, epoch: int, choices: Sequence[int]) -> None:
        abort = session_pb2.Abort(epoch=epoch, choices=choices)
        self._outbox.add(session_pb2.RouterFrame(aborts=[abort]))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _dial(self) -> None:
        async with grpc.aio.insecure_channel(self.info.address, options=CLIENT_OPTIONS) as channel:
            stub = session_pb2_grpc.WorkerSessionStub(channel)
            while True:
                try:
                    await self._talk(stub)
                except _Replaced:
                    log.info("address has another worker", worker_id=self.info.worker_id)
                    return
                except grpc.aio.AioRpcError as error:
                    log.debug("stream ended", worker_id=self.info.worker_id, code=error.code().name)
                finally:
                    self._outbox.close()
                    self._down()
                await asyncio.sleep(_RECONNECT_S)

    async def _talk(self, stub: session_pb2_grpc.WorkerSessionAsyncStub) -> None:
        self._outbox = Outbox(session_pb2.RouterFrame(hello=self._hello))
        async for frame in stub.Connect(self._outbox.messages()):
            if frame.HasField("hello") and frame.hello.worker_id != self.info.worker_id:
                raise _Replaced
            self.last_heard = time.monotonic()
            if not self.is_up:
                self._up()
            self._heard(frame)

    def _heard(self, frame: session_pb2.WorkerFrame) -> None:
        if frame.HasField("state"):
            self.state = frame.state
            if frame.state.running or not frame.state.num_running:
                self.running = list(frame.state.running)
        self._listener.worker_frame(self.info.worker_id, frame)

    async def _watch(self) -> None:
        while True:
            quiet = time.monotonic() - self.last_heard
            if self.is_up and quiet > self._silence_s:
                log.warning("worker silent", worker_id=self.info.worker_id, seconds=round(quiet, 2))
                self._down()
            await asyncio.sleep(self._silence_s / 10)

    def _up(self) -> None:
        self.is_up = True
        self._listener.worker_up(self.info)

    def _down(self) -> None:
        if self.is_up:
            self.is_up = False
            self._listener.worker_lost(self.info.worker_id)


class Sessions:
    """One link for each worker that the ledger's table names."""

    def __init__(
        self, config: RouterConfig, hello: session_pb2.RouterHello, listener: Listener
    ) -> None:
        self._config = config
        self._hello = hello
        self._listener = listener
        self._links: dict[str, WorkerLink] = {}

    @property
    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    def start(self, worker_id: str, starts: Sequence[session_pb2.Start]) -> bool:
        link = self._links.get(worker_id)
        if link is None or not link.is_up:
            return False
        link.start(starts)
        return True

    def abort(self, worker_id: str, epoch: int, choices: Sequence[int] = ()) -> None:
        link = self._links.get(worker_id)
        if link is not None and link.is_up:
            link.abort(epoch, choices)

    async def reconcile(self, workers: list[session_pb2.WorkerInfo]) -> None:
        """Dials who is new in the table, hangs up on who is gone."""
        named = {info.worker_id: info for info in workers if _speaks_our_blocks(info)}
        for worker_id in self._links.keys() - named.keys():
            await self._hang_up(worker_id)
        for worker_id in named.keys() - self._links.keys():
            self._links[worker_id] = WorkerLink(
                named[worker_id], self._hello, self._listener, self._config.worker_silence
            )

    def unreachable(self) -> list[str]:
        """Workers that nobody has heard for so long that they may be forgotten."""
        oldest = time.monotonic() - self._config.worker_forget
        return [
            worker_id
            for worker_id, link in self._links.items()
            if not link.is_up and link.last_heard < oldest
        ]

    async def _hang_up(self, worker_id: str) -> None:
        await self._links.pop(worker_id).close()

    async def close(self) -> None:
        await asyncio.gather(*(self._hang_up(worker_id) for worker_id in list(self._links)))


def _speaks_our_blocks(info: session_pb2.WorkerInfo) -> bool:
    return info.block_size == BLOCK_SIZE
