"""Server's end of simulated gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NoReturn, TypeVar

import grpc

from router.api.http2 import behaviour
from tests.simulated_cluster.clock import VirtualLoop
from tests.simulated_cluster.network import Network
from tests.simulated_cluster.pipe import Metadata, Pipe, Received, Sent, Status

Q = TypeVar("Q")


class SimServer:
    """Server with the methods that its owner and generated code use."""

    def __init__(self, network: Network, process: VirtualLoop) -> None:
        self.process = process
        self._network = network
        self._handlers: list[grpc.GenericRpcHandler] = []
        self.is_serving = False
        self._serving: dict[Serving, None] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Do nothing, because the generic handlers are the same."""

    def listen(self, address: str) -> int:
        """Bind the address and return the port; raise OSError if it is taken."""
        if not (port := self._network.bind(address, self)):
            raise OSError(f"{address} is taken")
        return port

    async def start(self) -> None:
        self.is_serving = True

    async def stop(self, grace: float | None) -> None:
        self.is_serving = False
        self._network.unbind(self)
        tasks = {serving.task for serving in self._serving}
        if grace and tasks:
            await asyncio.wait(tasks, timeout=grace)
        for serving in tuple(self._serving):
            serving.shut_down()

    def serve(
        self,
        method: str,
        requests: Pipe[Sent],
        answers: Pipe[Received],
        metadata: Metadata,
        deadline: float | None,
    ) -> Serving:
        details = _Details(method, metadata)
        found = (handler.service(details) for handler in self._handlers)
        handler = next((it for it in found if it is not None), None)
        serving = Serving(self.process, handler, requests, answers, metadata, deadline)
        self._serving[serving] = None
        serving.task.add_done_callback(lambda _: self._serving.pop(serving))
        return serving


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata


class Serving:
    """Call at the server: runs the handler, and is the context that the handler receives."""

    def __init__(
        self,
        process: VirtualLoop,
        handler: grpc.RpcMethodHandler[Any, Any] | None,
        requests: Pipe[Sent],
        answers: Pipe[Received],
        metadata: Metadata,
        deadline: float | None,
    ) -> None:
        self.process = process
        self._handler = handler
        self._requests = requests
        self._answers = answers
        self._metadata = metadata
        self._deadline = deadline
        self._status = Status(grpc.StatusCode.OK)
        self.task = process.create_task(self._run())

    def cancel(self) -> None:
        """Cancel the call, because its client is gone."""
        self.task.cancel()

    def shut_down(self) -> None:
        """End the call, because its server stops."""
        self._status = Status(grpc.StatusCode.UNAVAILABLE, "Cancelling all calls")
        self.task.cancel()

    async def _run(self) -> None:
        try:
            await self._handle()
        except grpc.aio.AbortError:
            # The status has the cause.
            pass
        except asyncio.CancelledError:
            if self._status.code is grpc.StatusCode.OK:
                self._status = Status(grpc.StatusCode.CANCELLED)
            raise
        except Exception as error:
            self._status = Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
            raise
        finally:
            self._answers.put_last(self._status)

    async def _handle(self) -> None:
        if (handler := self._handler) is None:
            await self.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        requests = self._read(handler.request_deserializer or bytes)
        first = requests if handler.request_streaming else await anext(requests)
        result = behaviour(handler)(first, self)
        if hasattr(result, "__aiter__"):
            async for answer in result:
                await self.write(answer)
        elif (answer := await result) is not None:
            await self.write(answer)

    async def _read(self, parse: Callable[[bytes], Q]) -> AsyncIterator[Q]:
        while (item := await self._requests.get()) is not None:
            yield parse(item)

    # the handler's context

    async def write(self, answer: Any) -> None:
        assert self._handler is not None
        serialize = self._handler.response_serializer or bytes
        await self._answers.put(serialize(answer))

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        self._status = Status(code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError

    def set_code(self, code: grpc.StatusCode) -> None:
        self._status.code = code

    def set_details(self, details: str) -> None:
        self._status.details = details

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Do nothing, because no simulated client reads it."""

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self.process.time())
