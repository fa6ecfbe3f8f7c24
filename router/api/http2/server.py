"""gRPC server for a router's clients.

The server has the methods of grpc.aio.Server that a router uses, and runs the same handlers. All
data that is sent on a connection in one iteration of the event loop is written at once. A message
of a stream therefore takes 0.4 times as much CPU time as with grpc.aio, where each message is a
separate operation whose end another thread reports (README.md has the figures).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from typing import Any

import grpc

from everlift.errors import Unimplemented
from router.api.http2.call import Call
from router.api.http2.connection import Connection
from router.api.http2.heads import Head, Metadata
from router.api.http2.limits import Limits

_BACKLOG = 1024
#: Time limit of the TLS handshake, in seconds.
_HANDSHAKE_S = 10.0


class Server:
    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._bound: list[tuple[socket.socket, ssl.SSLContext | None]] = []
        self._listening: list[asyncio.Server] = []
        self._connections: set[Connection] = set()

    # before the start

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers.extend(handlers)

    def add_insecure_port(self, address: str) -> int:
        """Bind an address without TLS and return the port. Raises RuntimeError if that fails."""
        return self._bind(address, None)

    def add_secure_port(self, address: str, context: ssl.SSLContext) -> int:
        """Bind an address with TLS and return the port.

        ``context`` is changed to offer HTTP/2 (ALPN). Raises RuntimeError if the address cannot be
        bound.
        """
        context.set_alpn_protocols(["h2"])
        return self._bind(address, context)

    def _bind(self, address: str, context: ssl.SSLContext | None) -> int:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sets TCP_NODELAY only on sockets that were created with IPPROTO_TCP. Without
        # TCP_NODELAY a token waits until the client's kernel has acknowledged the previous one,
        # which takes 40 ms.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            # SO_REUSEADDR allows binding a port right after its previous process has ended. Binding
            # a port on which another process listens still fails.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, int(port)))
            bound.listen(_BACKLOG)
        except OSError as error:
            bound.close()
            raise RuntimeError(f"cannot listen on {address}: {error.strerror}") from error
        bound.setblocking(False)
        self._bound.append((bound, context))
        return int(bound.getsockname()[1])

    # start and stop

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for bound, context in self._bound:
            self._listening.append(
                await loop.create_server(
                    lambda: Connection(self, self._limits),
                    sock=bound,
                    ssl=context,
                    ssl_handshake_timeout=_HANDSHAKE_S if context else None,
                    backlog=_BACKLOG,
                )
            )

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls, give open calls ``grace`` seconds to end, and close all connections.

        Calls that are still open after that time end with UNAVAILABLE. A ``grace`` of None or 0
        ends all calls with this status at once.
        """
        for listening in self._listening:
            listening.close()
        for bound, _ in self._bound:
            bound.close()
        self.close_when_idle()
        if grace:
            await self._wait_for_calls(grace)
        for connection in tuple(self._connections):
            connection.shut_down()
        await self._wait_for_calls(_CLOSE_TIMEOUT_S)
        for connection in tuple(self._connections):
            connection.abort()

    def close_when_idle(self) -> None:
        """Close each connection when its calls have ended, so that its client opens a new one."""
        for connection in tuple(self._connections):
            connection.close_when_idle()

    async def _wait_for_calls(self, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL_INTERVAL_S)

    # interface of the connections

    def connection_opened(self, connection: Connection) -> bool:
        """Register a connection; return False if there are too many."""
        if len(self._connections) >= self._limits.max_connections:
            return False
        self._connections.add(connection)
        return True

    def connection_closed(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def start_call(self, call: Call, head: Head) -> None:
        handler = self._methods.get(head.path) or self._find(head.path, head.metadata)
        if handler is None:
            call.refuse(Unimplemented(f"this server has no method {head.path[:128]!r}"))
        else:
            call.run(handler)

    def _find(self, path: str, metadata: Metadata) -> grpc.RpcMethodHandler[Any, Any] | None:
        details = _Details(path, metadata)
        for generic in self._handlers:
            if (handler := generic.service(details)) is not None:
                self._methods[path] = handler
                return handler
        return None


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = tuple(metadata)


#: Seconds between two checks of whether all connections are closed.
_POLL_INTERVAL_S = 0.01
#: Seconds in which the statuses of the last calls are sent before connections are aborted.
_CLOSE_TIMEOUT_S = 0.2
