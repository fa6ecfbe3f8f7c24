"""A connection holds as many requests as its bounds say, whatever its client sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.api.http import connection
from router.api.http.connection import Connection
from tests.fuzz.served import Transport

REQUEST = b"GET / HTTP/1.1\r\n\r\n"
MOST = connection._MAX_UNANSWERED


class App:
    """Answers nobody before it ``may``."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.num_asked = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        await self.may.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


class Line:
    """A connection, its transport, and what answers there."""

    def __init__(self) -> None:
        self.app, self.transport, self._state = App(), Transport(), ServerState()
        config = uvicorn.Config(
            self.app, interface="asgi3", http=Connection, ws="none", lifespan="off", log_config=None
        )
        config.load()
        self.connection = Connection(config, self._state, {})
        self.connection.connection_made(self.transport)

    async def answered(self) -> None:
        while self._state.tasks:
            await asyncio.wait(self._state.tasks)

    async def close(self) -> None:
        self.connection.connection_lost(None)
        self.app.may.set()
        await self.answered()
        self.connection._unset_keepalive_if_required()


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    line = Line()
    yield line
    await line.close()


async def test_connection_answers_the_maximum_of_pipelined_requests(line: Line) -> None:
    line.app.may.set()
    for round_ in range(1, 4):
        line.connection.data_received(REQUEST * MOST)
        await line.answered()
        assert line.transport.written.count(b"HTTP/1.1 200 OK") == round_ * MOST
        assert len(line.connection._writers) <= MOST
    assert not line.transport.is_closing()


@pytest.mark.parametrize("at_once", [True, False])
async def test_connection_closes_on_too_many_unanswered_requests(line: Line, at_once: bool) -> None:
    if at_once:
        line.connection.data_received(REQUEST * 10_000)
    else:
        for _ in range(MOST + 1):
            line.connection.data_received(REQUEST)
    assert line.transport.is_closing() and not line.transport.written
    # No request was made of the rest.
    assert len(line.connection._writers) == 1 + len(line.connection.pipeline) == MOST
    # TLS hands out what it has got even then.
    line.connection.data_received(REQUEST)
    assert not line.transport.written
    await line.close()
    assert line.app.num_asked == 1
