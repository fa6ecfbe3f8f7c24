"""Client's end of simulated gRPC: channels and calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import grpc

from tests.simulated_cluster.clock import VirtualLoop
from tests.simulated_cluster.network import Network
from tests.simulated_cluster.pipe import Metadata, Pipe, Received, Sent, Status
from tests.simulated_cluster.server import Serving, SimServer

Q = TypeVar("Q")
A = TypeVar("A")


class SimCall(Generic[Q, A]):
    """Call of any kind.

    As with gRPC, reading a cancelled call raises CancelledError, and reading a failed one
    AioRpcError.
    """

    def __init__(
        self,
        channel: SimChannel,
        method: str,
        serialize: Callable[[Q], bytes],
        parse: Callable[[bytes], A],
        metadata: Metadata,
        timeout: float | None,
    ) -> None:
        network, process = channel.network, channel.process
        self._network, self._process = network, process
        self._channel = channel
        self._method, self._metadata = method, metadata
        self._serialize, self._parse = serialize, parse
        self._deadline = None if timeout is None else process.time() + timeout
        self._timer = None if timeout is None else process.call_later(timeout, self._too_late)
        self._feeder: asyncio.Task[None] | None = None
        self._status: Status | None = None
        self._ended = asyncio.Event()
        self._serving: Serving | None = None
        self._server = cast("SimServer | None", network.find(channel.address))
        there = process if self._server is None else self._server.process
        self.link = frozenset((process, there))
        self._requests: Pipe[Sent] = Pipe(network, self.link, process, there)
        self._answers: Pipe[Received] = Pipe(network, self.link, there, process)
        network.begin(self)
        if self._server is None or process.is_dead:
            process.call_later(network.latency, self.break_off, "failed to connect")
        else:
            network.send(self.link, there, self._open)

    def _open(self) -> None:
        """Start the call in the server's process."""
        if self._status is not None:
            return
        is_there = self._network.find(self._channel.address) is self._server
        if self._server is None or not is_there or not self._server.is_serving:
            self._network.send(self.link, self._process, self.break_off, "connection refused")
            return
        self._serving = self._server.serve(
            self._method, self._requests, self._answers, self._metadata, self._deadline
        )

    # requests

    def send(self, request: Q) -> Self:
        """Send the only request of a unary call."""
        if self._server is not None:
            self._requests.put_last(self._serialize(request))
            self._requests.put_last(None)
        return self

    def feed(self, requests: AsyncIterable[Q]) -> Self:
        """Send the requests of a stream."""
        if self._server is not None:
            self._feeder = self._process.create_task(self._feed(requests))
        return self

    async def _feed(self, requests: AsyncIterable[Q]) -> None:
        async for request in requests:
            await self._requests.put(self._serialize(request))
        self._requests.put_last(None)

    # end of the call

    def cancel(self) -> bool:
        return self._abandon(Status(grpc.StatusCode.CANCELLED, "Locally cancelled"))

    def _too_late(self) -> None:
        self._abandon(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _abandon(self, status: Status) -> bool:
        if self._status is not None:
            return False
        if self._server is not None:
            self._network.send(self.link, self._server.process, self._stop_serving)
        self._settle(status)
        return True

    def _stop_serving(self) -> None:
        if self._serving is not None:
            self._serving.cancel()

    def break_off(self, cause: str) -> None:
        """Break the connection for both ends."""
        if self._serving is not None and not self._serving.process.is_dead:
            self._serving.process.call_soon(self._serving.cancel)
        if not self._process.is_dead:
            status = Status(grpc.StatusCode.UNAVAILABLE, cause)
            self._process.call_soon(self._settle, status)
        self._network.end(self)

    def _settle(self, status: Status) -> None:
        if self._status is not None:
            return
        self._status = status
        self._network.end(self)
        self._channel.calls.pop(self, None)
        if self._feeder is not None:
            self._feeder.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._ended.set()
        self._answers.has_come.set()

    # answers

    async def read(self) -> Any:
        """Return the next answer; grpc.aio.EOF after the last one."""
        try:
            item = await self._next()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, bytes):
            return self._parse(item)
        self._settle(item)
        return self._raise_or_end()

    async def _next(self) -> Received:
        """Return the next message or, if no more will arrive, the status."""
        while True:
            if self._answers and not self._is_abandoned:
                return self._answers.take()
            if self._status is not None:
                return self._status
            self._answers.has_come.clear()
            await self._answers.has_come.wait()

    @property
    def _is_abandoned(self) -> bool:
        """Return whether this end has ended the call, so that nothing more can be read.

        Messages that arrived before a connection broke can still be read.
        """
        given_up = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
        return self._status is not None and self._status.code in given_up

    def _raise_or_end(self) -> Any:
        assert self._status is not None
        code = self._status.code
        if code is grpc.StatusCode.CANCELLED:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise _error(self._status)
        return grpc.aio.EOF

    async def _all(self) -> AsyncIterator[A]:
        while (answer := await self.read()) is not grpc.aio.EOF:
            yield answer

    def __aiter__(self) -> AsyncIterator[A]:
        return self._all()

    def __await__(self) -> Any:
        return self._unary().__await__()

    async def _unary(self) -> A:
        answer = await self.read()
        if answer is grpc.aio.EOF:
            raise _error(Status(grpc.StatusCode.INTERNAL, "no answer"))
        self._settle(Status(grpc.StatusCode.OK))
        return cast("A", answer)

    # status

    async def code(self) -> grpc.StatusCode:
        return (await self._end()).code

    async def details(self) -> str:
        return (await self._end()).details

    async def trailing_metadata(self) -> Metadata:
        return (await self._end()).metadata

    async def _end(self) -> Status:
        await self._ended.wait()
        assert self._status is not None
        return self._status


def _error(status: Status) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*status.metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, status.details)


class SimChannel:
    """Channel with the methods that generated stubs use."""

    def __init__(self, network: Network, process: VirtualLoop, address: str) -> None:
        self.network = network
        self.process = process
        self.address = address
        self.calls: dict[SimCall[Any, Any], None] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in tuple(self.calls):
            call.cancel()

    def unary_unary(
        self,
        path: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool = False,
    ) -> Callable[..., SimCall[Any, Any]]:
        def call(
            request: Any, *, timeout: float | None = None, metadata: Metadata | None = None
        ) -> SimCall[Any, Any]:
            kinds = request_serializer or bytes, response_deserializer or bytes
            return self._call(path, *kinds, metadata, timeout).send(request)

        return call

    unary_stream = unary_unary

    def stream_stream(
        self,
        path: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool = False,
    ) -> Callable[..., SimCall[Any, Any]]:
        def call(
            requests: AsyncIterable[Any],
            *,
            timeout: float | None = None,
            metadata: Metadata | None = None,
        ) -> SimCall[Any, Any]:
            kinds = request_serializer or bytes, response_deserializer or bytes
            return self._call(path, *kinds, metadata, timeout).feed(requests)

        return call

    def _call(
        self,
        path: str,
        serialize: Any,
        parse: Any,
        metadata: Metadata | None,
        timeout: float | None,
    ) -> SimCall[Any, Any]:
        call = SimCall[Any, Any](self, path, serialize, parse, tuple(metadata or ()), timeout)
        self.calls[call] = None
        return call
