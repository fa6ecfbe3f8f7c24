"""Router's end of a worker session, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from everlift.v1 import session_pb2, session_pb2_grpc

OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    # Keep the flow control window at 64 KiB, so that a router that does not read soon blocks the
    # stream.
    ("grpc.http2.bdp_probe", 0),
]


class Router:
    """Router's end of one stream, which records all that it receives."""

    def __init__(self, address: str, name: str = "router", cluster: str = "here") -> None:
        self.frames: list[session_pb2.WorkerFrame] = []
        self.tokens: dict[int, list[int]] = {}
        self.stops: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.accepted: list[int] = []
        self._offsets: dict[int, int] = {}
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self.call = session_pb2_grpc.WorkerSessionStub(self._channel).Connect()
        self._hello = session_pb2.RouterHello(router_id=name, cluster_id=cluster)

    async def hello(self, *starts: session_pb2.Start) -> None:
        await self.call.write(session_pb2.RouterFrame(hello=self._hello, starts=starts))

    async def start(self, *starts: session_pb2.Start) -> None:
        await self.call.write(session_pb2.RouterFrame(starts=starts))

    async def abort(self, epoch: int) -> None:
        await self.call.write(session_pb2.RouterFrame(aborts=[session_pb2.Abort(epoch=epoch)]))

    async def set_policy(self, version: int, name: str) -> None:
        policy = session_pb2.EnginePolicy(version=version, name=name)
        await self.call.write(session_pb2.RouterFrame(engine_policy=policy))

    async def read(self) -> session_pb2.WorkerFrame:
        frame: Any = await self.call.read()
        assert frame is not grpc.aio.EOF, "the stream is over"
        self._take_frame(frame)
        return self.frames[-1]

    def _take_frame(self, frame: session_pb2.WorkerFrame) -> None:
        self.frames.append(frame)
        self.accepted.extend(frame.accepted_epochs)
        for progress in frame.progress:
            self._take(progress)

    def _take(self, progress: session_pb2.Progress) -> None:
        epoch = progress.epoch
        assert epoch not in self.stops, "progress after the end"
        assert progress.offset == self._offsets.get(epoch, progress.offset), "gap or repetition"
        self._offsets[epoch] = progress.offset + len(progress.token_ids)
        self.tokens.setdefault(epoch, []).extend(progress.token_ids)
        if progress.stop:
            self.stops[epoch] = session_pb2.StopCause.Name(progress.stop).split("_")[-1]
            self.errors[epoch] = progress.error

    async def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self.read()

    async def ended(self, *epochs: int) -> None:
        await self.until(lambda: self.stops.keys() >= {*epochs})

    @property
    def state(self) -> session_pb2.WorkerState:
        return self.frames[-1].state

    async def rest(self) -> None:
        """Read to the end of the stream."""
        with pytest.raises(AssertionError, match="the stream is over"):
            await self.until(lambda: False)

    async def refusal(self) -> grpc.StatusCode:
        """Return the error status of a stream that has no frame."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.read()
        return raised.value.code()

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


class AnyRouter(session_pb2_grpc.RouterInternalServicer):
    """Router service that accepts every worker that announces itself."""

    async def Announce(self, request: Any, context: Any) -> session_pb2.AnnounceResponse:
        return session_pb2.AnnounceResponse()


@asynccontextmanager
async def announced() -> AsyncIterator[str]:
    server = grpc.aio.server()
    session_pb2_grpc.add_RouterInternalServicer_to_server(AnyRouter(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)
