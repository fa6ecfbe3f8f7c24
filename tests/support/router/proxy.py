"""Proxy to a server that can be slow, silent or broken; either end is TCP or a unix socket.

async with proxy("127.0.0.1:6379") as way:  # or a unix socket's path
    connect(way.address)
    way.delay_s = 0.2          # delays every answer by 0.2 s
    way.reset_after = 5        # breaks the connection after 5 bytes of the next answer
    way.cut()                  # breaks every connection
    with way.silent(): ...     # forwards nothing; connections survive
    with way.closed(): ...     # breaks every connection, and new ones at once
    with way.drop_answers(): ...       # forwards requests, but drops answers
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

_PIECE = 1 << 16
#: Most pieces of answers that are buffered; a faster server waits.
_UNDER_WAY = 64


@asynccontextmanager
async def proxy(target: str, listen: Path | None = None) -> AsyncIterator[Proxy]:
    way = Proxy(target, listen)
    await way.start()
    try:
        yield way
    finally:
        await way.stop()


class Proxy:
    """Proxy to ``target`` that listens on the socket ``listen``, or on a free port of 127.0.0.1."""

    def __init__(self, target: str, listen: Path | None = None) -> None:
        self._target = target
        self._listen = listen
        self._server: asyncio.Server | None = None
        self._lines: set[_Line] = set()
        self.passes = asyncio.Event()
        self.passes.set()
        self.is_closed = False
        self.drops_answers = False
        self.delay_s = 0.0
        #: bytes of the next answer after which its connection breaks; None: no break
        self.reset_after: int | None = None
        #: number of answers that were cut
        self.resets = 0

    @property
    def address(self) -> str:
        if self._listen is not None:
            return str(self._listen)
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def start(self) -> None:
        if self._listen is not None:
            self._server = await asyncio.start_unix_server(self._serve, self._listen)
        else:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        tasks = [line.task for line in self._lines]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        for line in list(self._lines):
            line.break_off()

    @contextmanager
    def silent(self) -> Iterator[None]:
        self.passes.clear()
        try:
            yield
        finally:
            self.passes.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        self.is_closed = True
        self.cut()
        try:
            yield
        finally:
            self.is_closed = False

    @contextmanager
    def drop_answers(self) -> Iterator[None]:
        """Drop all answers.

        A connection that lost an answer is broken at the end, because the next answer would be
        taken for it.
        """
        self.drops_answers = True
        try:
            yield
        finally:
            self.drops_answers = False
            for line in list(self._lines):
                if line.has_lost:
                    line.break_off()

    async def _serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        line = _Line(self, task, back)
        self._lines.add(line)
        try:
            if self.is_closed:
                line.break_off()
            await self.passes.wait()
            await line.carry(client, *await _connect(self._target))
        except (OSError, asyncio.CancelledError):
            # One end broke; the other one sees its connection close.
            pass
        finally:
            self._lines.discard(line)
            line.close()


class _Line:
    """Connection through the proxy."""

    def __init__(self, way: Proxy, task: asyncio.Task[None], back: asyncio.StreamWriter) -> None:
        self._way = way
        self.task = task
        self._back = back
        self._ends = [back]
        self.has_lost = False

    async def carry(
        self,
        client: asyncio.StreamReader,
        answers: asyncio.StreamReader,
        server: asyncio.StreamWriter,
    ) -> None:
        """Forward data in both directions until one end closes."""
        self._ends.append(server)
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_UNDER_WAY)
        parts = [
            asyncio.create_task(self._there(client, server)),
            asyncio.create_task(self._fetch(answers, under_way)),
            asyncio.create_task(self._deliver(under_way)),
        ]
        waiting = {parts[0], parts[2]}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _there(self, client: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while data := await client.read(_PIECE):
            await self._way.passes.wait()
            server.write(data)
            await server.drain()

    async def _fetch(
        self, answers: asyncio.StreamReader, under_way: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while data := await answers.read(_PIECE):
                await under_way.put((clock() + self._way.delay_s, data))
        finally:
            await under_way.put((clock(), b""))

    async def _deliver(self, under_way: asyncio.Queue[tuple[float, bytes]]) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, data = await under_way.get()
            if (early := due - clock()) > 0:
                await asyncio.sleep(early)
            await self._way.passes.wait()
            if not data:
                return
            await self._answer(data)

    async def _answer(self, data: bytes) -> None:
        way = self._way
        if way.drops_answers:
            self.has_lost = True
            return
        cut_at, way.reset_after = way.reset_after, None
        self._back.write(data[:cut_at])
        await self._back.drain()
        if cut_at is not None:
            way.resets += 1
            self.break_off()

    def break_off(self) -> None:
        """Break the connection abruptly; over TCP, by a reset."""
        for end in self._ends:
            _reset(end)
        self.task.cancel()

    def close(self) -> None:
        for end in self._ends:
            end.close()


async def _connect(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if "/" in target:
        return await asyncio.open_unix_connection(target)
    host, _, port = target.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def _reset(writer: asyncio.StreamWriter) -> None:
    end: socket.socket = writer.get_extra_info("socket")
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        # An abort of a unix socket would drop written data, which has to arrive.
        writer.close()
