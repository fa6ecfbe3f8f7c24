"""HTTP/1.1 client that exposes every status, header and event as received."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

JSON = {"content-type": "application/json"}
#: Accept header of a client that reads server-sent events.
EVENTS = "text/event-stream"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """Return the error's code and the parameter that it concerns."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        return error["code"], error["param"]


@dataclass(frozen=True)
class Event:
    id: str
    data: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def text(self) -> str:
        """Text of a completion's chunk."""
        return "".join(choice["text"] for choice in self.json["choices"])


class Stream:
    """Answer that is read incrementally."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}
        #: comment lines among the events that were read
        self.num_comments = 0

    async def begin(self) -> None:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *fields = head.strip().split("\r\n")
        self.status = int(line.split()[1])
        self.headers = {
            name.lower(): value.strip() for name, _, value in (it.partition(":") for it in fields)
        }

    async def rest(self) -> bytes:
        if "content-length" in self.headers:
            return await self._reader.readexactly(int(self.headers["content-length"]))
        return b"".join([chunk async for chunk in self._chunks()])

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readline(), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)

    async def events(self) -> AsyncIterator[Event]:
        rest = ""
        async for chunk in self._chunks():
            rest += chunk.decode()
            while "\n\n" in rest:
                event, _, rest = rest.partition("\n\n")
                if event.startswith(":"):
                    self.num_comments += 1
                    continue
                fields = dict(line.split(": ", 1) for line in event.split("\n"))
                yield Event(fields.get("id", ""), fields["data"])
        assert not rest

    def hang_up(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def streamed(
    address: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] = JSON,
    method: str = "POST",
) -> AsyncIterator[Stream]:
    """Send a request and yield its answer; ``body`` is JSON, or bytes that are sent unchanged."""
    host, port = address.rsplit(":", 1)
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    fields = {"host": address, "content-length": str(len(data)), "accept": EVENTS, **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        stream = Stream(reader, writer)
        await stream.begin()
        yield stream
    finally:
        writer.close()


async def ask(
    address: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] = JSON,
    method: str = "POST",
) -> Answer:
    async with streamed(address, path, body, headers, method) as stream:
        data = b"" if method == "HEAD" else await stream.rest()
        return Answer(stream.status, stream.headers, data)


async def get(address: str, path: str, headers: Mapping[str, str] = JSON) -> Answer:
    return await ask(address, path, None, headers, "GET")
