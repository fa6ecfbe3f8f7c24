"""HTTP/2 client that opens any number of streams on one connection."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RST_STREAM, _SETTINGS = 1, 3, 4
_END_HEADERS = 4
_CANCEL = struct.pack(">I", 8)


class Connection:
    """HTTP/2 connection whose incoming data is discarded."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._next = 1

    async def open(self, path: str, count: int, *, reset: bool) -> None:
        """Open ``count`` calls without a message; with ``reset``, cancel each at once.

        Raises ConnectionError if the server closes the connection.
        """
        headers = _header_block(path)
        for _ in range(count):
            self._writer.write(_frame(_HEADERS, _END_HEADERS, self._next, headers))
            if reset:
                self._writer.write(_frame(_RST_STREAM, 0, self._next, _CANCEL))
            self._next += 2
            await self._writer.drain()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


@asynccontextmanager
async def connection(address: str) -> AsyncIterator[Connection]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    reading = asyncio.create_task(forget(reader))
    try:
        writer.write(_PREFACE + _frame(_SETTINGS, 0, 0))
        yield Connection(writer)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        writer.transport.abort()


async def forget(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header_block(path: str) -> bytes:
    """Return a call's headers, each as a literal without indexing (RFC 7541, section 6.2.2)."""
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "everlift"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


def _text(text: str) -> bytes:
    assert len(text) < 127
    return bytes((len(text),)) + text.encode()
