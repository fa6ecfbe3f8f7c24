"""HTTP/2 connections of the gRPC server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, StreamEnded, TrailersReceived
from h2.settings import SettingCodes

from router.api.http2.connection import Connection
from router.api.http2.framing import framed
from router.api.http2.h2_connection import Http2
from router.api.http2.limits import Limits
from router.api.http2.server import Server

HEAD = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", "/s/m")]
GRPC = [*HEAD, ("te", "trailers"), ("content-type", "application/grpc")]
LARGE_WINDOW = 1 << 30


class Buffer(asyncio.Transport):
    """Transport of a socket that takes bytes only when the test drains it."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent = bytearray()
        self.largest = 0
        self.is_aborted = False
        self._is_closing = self._is_paused = False
        self._high = 0

    def connect(self, connection: Connection) -> None:
        self._connection = connection
        connection.connection_made(self)

    def write(self, data: Any) -> None:
        self.unsent += data
        self.largest = max(self.largest, len(self.unsent))
        if len(self.unsent) > self._high and not self._is_paused:
            self._is_paused = True
            self._connection.pause_writing()

    def drain(self) -> bytes:
        data = bytes(self.unsent)
        self.unsent.clear()
        if self._is_paused:
            self._is_paused = False
            self._connection.resume_writing()
        return data

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self.is_aborted = self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or 0

    def get_write_buffer_size(self) -> int:
        return len(self.unsent)


class Client:
    """Client in the same process, whose calls are answered when ``go`` is set."""

    def __init__(self, size: int, *, answers: int = 1, connection_window: int = 0) -> None:
        self.go = asyncio.Event()
        self.received = Counter[int]()
        self.ended = set[int]()
        self._size, self._answers = size, answers
        server = Server()
        method: grpc.RpcMethodHandler[Any, Any]
        method = grpc.unary_stream_rpc_method_handler(self._answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": method}),))
        self.connection = Connection(server, Limits())
        self.transport = Buffer()
        self.transport.connect(self.connection)
        self.http2 = H2Connection(H2Configuration(client_side=True))
        self.http2.initiate_connection()
        self.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: LARGE_WINDOW})
        if connection_window:
            self.http2.increment_flow_control_window(connection_window)

    async def _answer(self, message: bytes, context: object) -> AsyncIterator[bytes]:
        await self.go.wait()
        for _ in range(self._answers):
            yield bytes(self._size)

    async def call(self, num_calls: int) -> None:
        """Start the calls, and wait until the handlers of all of them run."""
        for stream_id in range(1, 2 * num_calls, 2):
            self.http2.send_headers(stream_id, GRPC)
            self.http2.send_data(stream_id, framed(b""), end_stream=True)
        self.connection.data_received(self.http2.data_to_send())
        await settle()

    async def read(self) -> None:
        """Read the bytes that the server has written, and let it write more."""
        for event in self.http2.receive_data(self.transport.drain()):
            if isinstance(event, DataReceived):
                self.received[event.stream_id] += event.flow_controlled_length
            elif isinstance(event, TrailersReceived | StreamEnded):
                self.ended.add(event.stream_id)
        if data := self.http2.data_to_send():
            self.connection.data_received(data)
        await settle()

    def close(self) -> None:
        self.connection.connection_lost(None)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_http2_keeps_a_bounded_number_of_closed_streams() -> None:
    server = Http2(H2Configuration(client_side=False))
    client = H2Connection(H2Configuration(client_side=True))
    server.initiate_connection()
    client.initiate_connection()
    for _ in range(Http2.MAX_CLOSED_STREAMS + 100):
        stream_id = client.get_next_available_stream_id()
        client.send_headers(stream_id, HEAD, end_stream=True)
        server.receive_data(client.data_to_send())
        server.send_headers(stream_id, [(":status", "200")], end_stream=True)
        server.drop_stream(stream_id)
        client.receive_data(server.data_to_send())
    assert not server.streams
    assert len(server._closed_streams) == Http2.MAX_CLOSED_STREAMS <= 4096


@pytest.mark.parametrize(("num_calls", "size"), [(200, 60_000), (1, 12 << 20)])
async def test_answers_wait_in_calls_until_client_reads(num_calls: int, size: int) -> None:
    client = Client(size, connection_window=LARGE_WINDOW)
    await client.call(num_calls)
    client.go.set()
    await settle()
    rounds = 0
    while len(client.ended) < num_calls and not client.transport.is_aborted and rounds < 200:
        await client.read()
        rounds += 1
    assert not client.transport.is_aborted
    assert client.transport.largest < 1 << 20
    assert list(client.received.values()) == [size + 5] * num_calls
    assert len(client.ended) == num_calls
    client.close()


async def test_large_answers_share_write_buffer() -> None:
    """Every call sends a part before any call sends its second part."""
    client = Client(2 << 20, connection_window=LARGE_WINDOW)
    await client.call(8)
    client.go.set()
    await settle()
    rounds = 0
    while len(client.received) < 8 and rounds < 100:
        await client.read()
        rounds += 1
    assert len(client.received) == 8
    assert max(client.received.values()) <= 128 << 10
    client.close()


async def test_calls_share_connection_window() -> None:
    client = Client(10_000, answers=1000)
    await client.call(4)
    client.go.set()
    await client.read()
    for _ in range(40):
        client.http2.increment_flow_control_window(32 << 10)
        await client.read()
    assert len(client.received) == 4
    assert min(client.received.values()) > max(client.received.values()) / 3
    client.close()


async def test_unread_control_frames_abort_connection() -> None:
    client = Client(1)
    await client.call(1)
    client.transport.write(bytes(4 << 20))
    client.http2.ping(b"8 octets")
    client.connection.data_received(client.http2.data_to_send())
    await settle()
    assert client.transport.is_aborted
    client.close()


async def test_shut_down_sends_answers_and_statuses_of_all_calls() -> None:
    client = Client(60_000, connection_window=LARGE_WINDOW)
    await client.call(20)
    client.go.set()
    await settle()
    client.connection.shut_down()
    for _ in range(20):
        await client.read()
    assert len(client.ended) == 20
    assert client.transport.is_closing() and not client.transport.is_aborted
    client.close()
