"""Transport between clients and a fake router in one process, without a socket.

The transport has the parts of gRPC's interface that clients and the fake router use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar, cast

import grpc

from everlift.testing.faults import Fault
from everlift.testing.request import Answer, words
from everlift.testing.router import FakeRouter
from everlift.transport import Options

A = TypeVar("A")
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

#: Maximum number of unread answers of a call; a handler that has sent this many waits.
_WINDOW = 16


class FakeTransport:
    """Transport that connects every address to one FakeRouter, ``router``, in this process.

    ``answer``, ``faults`` and ``api_key`` are passed to the FakeRouter, which describes them.

    >>> transport = FakeTransport(faults=[Break(1)])
    >>> async with AsyncClient("fake", transport=transport) as client:
    ...     await client.generate("one two").text()
    'one two'
    """

    credentials = None

    def __init__(
        self,
        answer: Answer = words,
        faults: Iterable[Fault | None] = (),
        *,
        api_key: str | None = None,
    ) -> None:
        self._servers: dict[str, _Server] = {}
        self.router = FakeRouter(answer, faults, api_key=api_key, transport=self)
        self.router.listen()

    def channel(self, address: str) -> grpc.aio.Channel:
        return cast("grpc.aio.Channel", _Channel(self._servers, self.router.address))

    def server(self, options: Options) -> grpc.aio.Server:
        return cast("grpc.aio.Server", _Server(self._servers))

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        return cast("_Server", server).listen(address)


@dataclass(slots=True)
class _Status:
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    metadata: Metadata = ()


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata


class _Server:
    _ports = count(1)

    def __init__(self, servers: dict[str, _Server]) -> None:
        self.calls: dict[_Call[Any], None] = {}
        self._servers = servers
        self._handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Ignore the registered handlers, because the generic ones are the same."""

    def listen(self, address: str) -> int:
        host, _, port = address.rpartition(":")
        bound = int(port) or next(self._ports)
        self._servers[f"{host}:{bound}"] = self
        return bound

    async def start(self) -> None:
        """Do nothing, because ``listen`` has already started the server."""

    async def stop(self, grace: float | None) -> None:
        for address in [a for a, server in self._servers.items() if server is self]:
            del self._servers[address]
        for call in tuple(self.calls):
            await call.break_off("Cancelling all calls")

    def handler(self, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of the called method, or None if there is none."""
        found = (handler.service(details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)


class _Channel:
    def __init__(self, servers: dict[str, _Server], address: str) -> None:
        self._servers = servers
        self._address = address
        self._calls: list[_Call[Any]] = []

    def unary_unary(
        self,
        path: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool = False,
    ) -> Callable[..., _Call[Any]]:
        def call(
            request: Any, *, timeout: float | None = None, metadata: Metadata | None = None
        ) -> _Call[Any]:
            data = request_serializer(request)
            started = _Call(response_deserializer, timeout)
            self._calls = [*(other for other in self._calls if not other.is_done), started]
            started.start_call(
                self._servers.get(self._address), _Details(path, metadata or ()), data
            )
            return started

        return call

    unary_stream = unary_unary

    async def close(self, grace: float | None = None) -> None:
        """Cancel the calls of this channel, and wait until their handlers have ended."""
        for call in self._calls:
            call.cancel()
            await call.wait_handler()


class _Call(Generic[A]):
    """Call as its client sees it, which is also the context that the server's handler receives.

    As with gRPC, reading a cancelled call raises CancelledError, and reading a call that ended with
    an error raises AioRpcError. Client and server exchange only bytes.
    """

    def __init__(self, parse: Callable[[bytes], A], timeout: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._parse = parse
        self._deadline = None if timeout is None else loop.time() + timeout
        self._timer = None if timeout is None else loop.call_later(timeout, self._on_deadline)
        self._answers: asyncio.Queue[bytes | _Status] = asyncio.Queue()
        self._window = asyncio.Semaphore(_WINDOW)
        self._ended = asyncio.Event()
        self._status: _Status | None = None
        self._abort_status: _Status | None = None
        self._metadata: Metadata = ()
        self._handler_task: asyncio.Task[None] | None = None

    def start_call(self, server: _Server | None, details: _Details, data: bytes) -> None:
        if server is None:
            self._answers.put_nowait(_Status(grpc.StatusCode.UNAVAILABLE, "connection refused"))
            return
        self._metadata = details.invocation_metadata
        self._handler_task = asyncio.create_task(self._serve(server.handler(details), data))
        server.calls[self] = None
        self._handler_task.add_done_callback(lambda _: server.calls.pop(self))

    # the client's side

    @property
    def is_done(self) -> bool:
        """Return whether the call and its handler have ended."""
        return self._status is not None and (
            self._handler_task is None or self._handler_task.done()
        )

    async def read(self) -> Any:
        """Return the next answer, or grpc.aio.EOF after the last one."""
        try:
            item = self._status or await self._answers.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, bytes):
            self._window.release()
            return self._parse(item)
        self._set_status(item)
        if item.code is grpc.StatusCode.CANCELLED:
            raise asyncio.CancelledError
        if item.code is not grpc.StatusCode.OK:
            raise _error(item)
        return grpc.aio.EOF

    async def _all(self) -> AsyncIterator[A]:
        while (answer := await self.read()) is not grpc.aio.EOF:
            yield answer

    def __aiter__(self) -> AsyncIterator[A]:
        return self._all()

    def __await__(self) -> Any:
        return self.read().__await__()

    def cancel(self) -> bool:
        return self._abandon(_Status(grpc.StatusCode.CANCELLED, "Locally cancelled"))

    def _on_deadline(self) -> None:
        self._abandon(_Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _abandon(self, status: _Status) -> bool:
        if self._status is not None:
            return False
        if self._handler_task is not None:
            self._handler_task.cancel()
        self._set_status(status)
        # The next read returns the status, before any unread answer.
        while not self._answers.empty():
            self._answers.get_nowait()
        self._answers.put_nowait(status)
        return True

    def _set_status(self, status: _Status) -> None:
        self._status = self._status or status
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    async def wait_handler(self) -> None:
        """Wait until the handler has ended."""
        if self._handler_task is not None:
            await asyncio.wait({self._handler_task})

    async def code(self) -> grpc.StatusCode:
        return (await self._wait_status()).code

    async def details(self) -> str:
        return (await self._wait_status()).details

    async def trailing_metadata(self) -> Metadata:
        return (await self._wait_status()).metadata

    async def _wait_status(self) -> _Status:
        await self._ended.wait()
        assert self._status is not None
        return self._status

    # the server's side

    async def _serve(self, handler: Any, data: bytes) -> None:
        status = _Status()
        try:
            await self._handle(handler, data)
        except grpc.aio.AbortError:
            assert self._abort_status is not None
            status = self._abort_status
        except asyncio.CancelledError:
            status = self._abort_status or _Status(grpc.StatusCode.CANCELLED)
            raise
        except Exception as error:
            # An error in a test's answer function is reported as a gRPC server reports it.
            status = _Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        finally:
            self._answers.put_nowait(status)

    async def _handle(self, handler: Any, data: bytes) -> None:
        if handler is None:
            await self.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        request = handler.request_deserializer(data)
        if not handler.response_streaming:
            await self._send(handler.response_serializer(await handler.unary_unary(request, self)))
            return
        async with aclosing(handler.unary_stream(request, self)) as answers:
            async for answer in answers:
                await self._send(handler.response_serializer(answer))

    async def _send(self, data: bytes) -> None:
        await self._window.acquire()
        self._answers.put_nowait(data)

    async def break_off(self, cause: str) -> None:
        """Break the call as if the connection were lost, and wait until its handler has ended."""
        self._abort_status = _Status(grpc.StatusCode.UNAVAILABLE, cause)
        if self._handler_task is not None:
            self._handler_task.cancel()
        await self.wait_handler()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        self._abort_status = _Status(code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def time_remaining(self) -> float | None:
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time())


def _error(status: _Status) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*status.metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, status.details)
