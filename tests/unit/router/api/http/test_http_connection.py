"""HTTP connections: bounds on unanswered requests, ignored upgrades, and refused CONNECT."""

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
    """Application that answers no request until ``may`` is set."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.num_asked = 0
        self.bodies: list[tuple[str, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        await self.may.wait()
        body, more_body = b"", True
        while more_body:
            message = await receive()
            body += message.get("body", b"")
            more_body = message.get("more_body", False)
        self.bodies.append((scope["path"], body))
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


class Line:
    """Connection with its transport and its application."""

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
    # The rest was not parsed into requests.
    assert len(line.connection._writers) == 1 + len(line.connection.pipeline) == MOST
    # A closing TLS transport still delivers data that it has received.
    line.connection.data_received(REQUEST)
    assert not line.transport.written
    await line.close()
    assert line.app.num_asked == 1


UPGRADE = b"Connection: Upgrade, x\r\nX:\r\nUpgrade: "
WITH_LENGTH = b"POST /a?b HTTP/1.1\r\n" + UPGRADE + b"h2c\r\nContent-Length: 3\r\n\r\nabc"
IN_CHUNKS = (
    b"POST /c HTTP/1.1\r\n" + UPGRADE + b"h2c\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\nde\r\n1\r\nf\r\n0\r\n\r\n"
)
WEBSOCKET = b"GET /w HTTP/1.1\r\n" + UPGRADE + b"websocket\r\n\r\n"


async def test_connection_ignores_upgrade_in_packets_of_any_size(line: Line) -> None:
    sent = WITH_LENGTH + IN_CHUNKS + WEBSOCKET + REQUEST
    bodies = [("/a", b"abc"), ("/c", b"def"), ("/w", b""), ("/", b"")]
    line.app.may.set()
    for end in range(1, len(sent)):
        line.connection.data_received(sent[:end])
        line.connection.data_received(sent[end:])
        await line.answered()
        assert line.app.bodies == bodies
        line.app.bodies.clear()
    for byte in sent:
        line.connection.data_received(bytes([byte]))
    await line.answered()
    assert line.app.bodies == bodies
    assert line.transport.written.count(b"HTTP/1.1 200 OK") == len(bodies) * len(sent)
    assert not line.transport.is_closing()


async def test_connection_closes_after_ignored_upgrade_if_asked_to(line: Line) -> None:
    line.app.may.set()
    line.connection.data_received(WITH_LENGTH.replace(b"Upgrade,", b"close, Upgrade,"))
    await line.answered()
    assert line.app.bodies == [("/a", b"abc")]
    assert line.transport.is_closing() and b"connection: close" in line.transport.written


@pytest.mark.parametrize("target", [b"a:443", b"/a"])
async def test_connection_refuses_connect(line: Line, target: bytes) -> None:
    line.connection.data_received(b"CONNECT " + target + b" HTTP/1.1\r\nHost: a\r\n\r\nxyz")
    assert line.transport.written.startswith(b"HTTP/1.1 400 ") and line.transport.is_closing()
    assert line.app.num_asked == 0
