"""The gateway's HTTP server: uvicorn's connections in the event loop of the router."""

from __future__ import annotations

import asyncio
import ssl

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from everlift.address import joined
from router.api.openai.connection import Connection

#: Between two requests of a connection. Those who balance load keep theirs for a minute.
_IDLE_S = 75
_HANDSHAKE_S = 10.0


class HttpServer:
    """HTTP server; ``address`` is empty while it does not listen."""

    def __init__(self) -> None:
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def bind(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        """Take the port, and serves nobody yet; with a ``context`` it speaks TLS.

        An empty host: nowhere. Raises OSError when the port is taken.
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
        self.address = joined(host, bound)

    async def start(self, app: ASGIApp) -> None:
        # Neither its process's signals nor its logs are uvicorn's here.
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

    def hang_up(self) -> None:
        """Close each connection when its answers are over, for its client to make another one."""
        for connection in list(self._state.connections):
            connection.shutdown()

    async def stop(self, grace_s: float) -> None:
        """Stop listening, let answers end for ``grace_s``, and close the rest."""
        if self._server is None:
            return
        self._server.close()
        self.hang_up()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=grace_s)
        for connection in list(self._state.connections):
            connection.transport.abort()
        # Whoever answers hears that nobody listens any more.
        if self._state.tasks:
            await asyncio.wait(self._state.tasks)
        await self._server.wait_closed()

    def _connection(self) -> Connection:
        return Connection(self._config, self._state, {})
