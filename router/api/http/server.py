"""HTTP server of the router: uvicorn's connections in the router's event loop."""

from __future__ import annotations

import asyncio
import ssl

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from everlift.address import join_host_port
from router.api.http.connection import Connection

#: Seconds without a request after which a connection is closed. The value exceeds the minute for
#: which load balancers keep idle connections.
_IDLE_S = 75
_HANDSHAKE_S = 10.0


class HttpServer:
    """HTTP server.

    ``address`` is empty until ``bind``, and stays empty if ``bind`` is called with an empty host.
    """

    def __init__(self) -> None:
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def bind(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        """Bind the port without accepting connections yet.

        The server uses TLS if ``context`` is given, and does not listen if ``host`` is empty.
        Raises OSError if the address cannot be bound, for example because the port is taken.
        """
        if not host:
            return
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._connection,
            host,
            port,
            ssl=context,
            ssl_handshake_timeout=_HANDSHAKE_S if context else None,
            start_serving=False,
        )
        bound = self._server.sockets[0].getsockname()[1]
        self.address = join_host_port(host, bound)

    async def start(self, app: ASGIApp) -> None:
        # The router handles signals and logging, not uvicorn.
        self._config = uvicorn.Config(
            app,
            interface="asgi3",
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_S,
        )
        self._config.load()
        if self._server is not None:
            await self._server.start_serving()

    def close_when_idle(self) -> None:
        """Close each connection after its current answers, so that its client opens a new one."""
        for connection in list(self._state.connections):
            assert isinstance(connection, Connection)
            connection.close_when_idle()

    async def stop(self, grace_s: float) -> None:
        """Stop listening, give answers ``grace_s`` seconds to end, and close all connections."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=grace_s)
        for connection in list(self._state.connections):
            connection.transport.abort()
        # The remaining handlers notice that their clients are gone, and end.
        if self._state.tasks:
            await asyncio.wait(self._state.tasks)
        await self._server.wait_closed()

    def _connection(self) -> Connection:
        return Connection(self._config, self._state, {})
