"""A way to a server that can be slow, silent or broken: TCP or unix socket at either end.

async with proxy("127.0.0.1:6379") as way:   # or a socket's path; a second one: where to listen
    connect(way.address)
    way.delay_s = 0.2          # every answer comes so much later
    way.reset_after = 5        # the next answer breaks off after so many bytes
    way.cut()                  # every connection breaks off, now
    with way.silent(): ...     # nothing passes; connections live through it
    with way.closed(): ...     # every connection breaks off, at once
    with way.deaf(): ...       # the server hears everything, its answers are lost
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

_PIECE = 1 << 16
#: Pieces on their way back; a server that is faster waits.
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
    """``listen`` is a socket's path; without one it is a free port of 127.0.0.1."""

    def __init__(self, target: str, listen: Path | None = None) -> None:
        self._target = target
        self._listen = listen
        self._server: asyncio.Server | None = None
        self._lines: set[_Line] = set()
        self.passes = asyncio.Event()
        self.passes.set()
        self.is_closed = False
        self.is_deaf = False
        self.delay_s = 0.0
        #: None: no answer breaks off
        self.reset_after: int | None = None
        #: answers that broke off
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
    def deaf(self) -> Iterator[None]:
        """Drop answers; connections that lost one are broken at the end, because the next answer
        would be taken for it.
        """
        self.is_deaf = True
        try:
            yield
        finally:
            self.is_deaf = False
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
            # Whoever of the two ends breaks first: the other one sees it.
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
        """Until one end closes."""
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
        if way.is_deaf:
            self.has_lost = True
            return
        cut_at, way.reset_after = way.reset_after, None
        self._back.write(data[:cut_at])
        await self._back.drain()
        if cut_at is not None:
            way.resets += 1
            self.break_off()

    def break_off(self) -> None:
        """Not an orderly end: over TCP a reset."""
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
        # What was written has to arrive: a socket of this kind drops it when it is aborted.
        writer.close()
