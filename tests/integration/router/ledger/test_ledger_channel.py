"""Channel: a connection that many calls share, against servers with scripted answers."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio.connection import UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, NoScriptError, RedisError, TimeoutError

from router.ledger.redis.channel import Channel

#: handler of a connection to the server
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PING = b"*1\r\n$4\r\nPING\r\n"


class Server:
    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._talk(reader, writer)
        finally:
            writer.close()


@asynccontextmanager
async def talking(
    talk: Talk, directory: Path, timeout_s: float = 5.0
) -> AsyncIterator[tuple[Channel, Server]]:
    server, path = Server(talk), str(directory / "server")

    def make() -> UnixDomainSocketConnection:
        retry = Retry(NoBackoff(), 0)
        return UnixDomainSocketConnection(path=path, protocol=2, driver_info=None, retry=retry)

    async with await asyncio.start_unix_server(server.serve, path):
        channel = Channel(make, timeout_s)
        try:
            yield channel, server
        finally:
            await channel.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reply to each command with its last argument, as a server replies to ECHO."""
    while line := await reader.readline():
        words = []
        for _ in range(int(line[1:])):
            size = int((await reader.readline())[1:])
            words.append((await reader.readexactly(size + 2))[:-2])
        writer.write(b"$%d\r\n%s\r\n" % (len(words[-1]), words[-1]))


async def test_channel_unencodable_call_leaves_other_replies_intact(tmp_path: Path) -> None:
    async with talking(echo, tmp_path) as (channel, _):
        with pytest.raises(UnicodeEncodeError):
            await channel.send([("ECHO", "well"), ("ECHO", "a lone \ud800")])
        asked = [b"one", b"two", b"three"]
        answers = await asyncio.gather(*(channel.send([("ECHO", it)]) for it in asked))
        assert answers == [[it] for it in asked]


async def test_channel_batches_concurrent_calls_into_one_write(
    tmp_path: Path,
) -> None:
    reads = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reads.append(await reader.read(1 << 16))
        writer.write(b"".join(b":%d\r\n" % n for n in range(1, 6)))
        await reader.read()

    async with talking(talk, tmp_path) as (channel, server):
        one, two, three = await asyncio.gather(
            channel.send([("PING",)]),
            channel.send([("PING",), ("PING",)]),
            channel.send([("PING",), ("PING",)]),
        )
        assert (one, two, three) == ([1], [2, 3], [4, 5])
        assert reads == [5 * PING]
        assert server.connections == 1


async def test_channel_cancelled_call_leaves_no_stray_reply(tmp_path: Path) -> None:
    async with talking(echo, tmp_path) as (channel, server):
        await channel.send([("ECHO", "first")])
        for n in range(50):
            given_up = asyncio.create_task(channel.send([("ECHO", "given up"), ("ECHO", n)]))
            for _ in range(n % 5):
                await asyncio.sleep(0)
            given_up.cancel()
            assert await channel.send([("ECHO", f"{n}")]) == [f"{n}".encode()]
            await asyncio.gather(given_up, return_exceptions=True)
        assert server.connections == 1


async def test_channel_error_reply_affects_only_its_command(tmp_path: Path) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"-NOSCRIPT No matching script.\r\n:7\r\n")
        await reader.read()

    async with talking(talk, tmp_path) as (channel, _):
        refused, answered = await channel.send([("EVALSHA", "sha", 0), ("PING",)])
        assert isinstance(refused, NoScriptError)
        assert answered == 7


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b":1\r\n", id="too-little"),
        pytest.param(b":1\r\n$100\r\nhalf", id="half-an-answer"),
        pytest.param(b"?what\r\n", id="no-protocol"),
        pytest.param(b":1\r\n:2\r\n:3\r\n", id="more-than-was-asked"),
    ],
)
async def test_channel_reconnects_after_broken_connection(tmp_path: Path, said: bytes) -> None:
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if connections > 1:
            return await echo(reader, writer)
        await reader.read(1 << 16)
        writer.write(said)
        if said.count(b"\r\n") == 3:
            # Keep the connection open until the client closes it.
            await reader.read()

    async with talking(talk, tmp_path) as (channel, server):
        answers = await asyncio.gather(
            channel.send([("PING",)]), channel.send([("PING",)]), return_exceptions=True
        )
        assert answers[0] == [1] or isinstance(answers[0], ConnectionError)
        assert answers[1] == [2] or isinstance(answers[1], ConnectionError)
        while server.connections < 2:
            try:
                assert await channel.send([("ECHO", "again")]) == [b"again"]
            except RedisError:
                await asyncio.sleep(0)


async def test_channel_times_out_on_silent_server(tmp_path: Path) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with talking(talk, tmp_path, timeout_s=0.1) as (channel, _):
        with pytest.raises(TimeoutError):
            await channel.send([("PING",)])


async def test_channel_timeout_restarts_with_each_reply(tmp_path: Path) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        for n in range(6):
            await asyncio.sleep(0.1)
            writer.write(b":%d\r\n" % n)
        await reader.read()

    async with talking(talk, tmp_path, timeout_s=0.4) as (channel, _):
        assert await channel.send([("PING",)] * 6) == [*range(6)]


async def test_channel_retire_completes_pending_calls(tmp_path: Path) -> None:
    may_answer = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        await may_answer.wait()
        writer.write(b":1\r\n")
        await reader.read()

    async with talking(talk, tmp_path) as (channel, server):
        first = asyncio.create_task(channel.send([("PING",)]))
        while not server.connections:
            await asyncio.sleep(0)
        channel.retire()
        second = asyncio.create_task(channel.send([("PING",)]))
        while server.connections < 2:
            await asyncio.sleep(0)
        may_answer.set()
        assert await asyncio.gather(first, second) == [[1], [1]]


async def test_channel_drop_fails_pending_calls(tmp_path: Path) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with talking(talk, tmp_path) as (channel, server):
        asking = asyncio.create_task(channel.send([("PING",)]))
        while not server.connections:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        channel.drop()
        with pytest.raises(ConnectionError):
            await asking


async def test_channel_connect_failure_fails_all_callers(tmp_path: Path) -> None:
    async with talking(echo, tmp_path) as (channel, _):
        (tmp_path / "server").unlink()
        answers = await asyncio.gather(
            *(channel.send([("PING",)]) for _ in range(3)), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [ConnectionError] * 3


def answer_late(server: socket.socket, after_s: float, answered: threading.Event) -> None:
    """Answer the first command of one connection; runs in a thread beside the event loop's."""
    connection, _ = server.accept()
    with connection:
        connection.recv(1 << 16)
        time.sleep(after_s)
        connection.sendall(b"+PONG\r\n")
        answered.set()
        connection.recv(1)


async def test_channel_reads_buffered_reply_after_loop_stall(tmp_path: Path) -> None:
    path = str(tmp_path / "server")

    def make() -> UnixDomainSocketConnection:
        retry = Retry(NoBackoff(), 0)
        return UnixDomainSocketConnection(path=path, protocol=2, driver_info=None, retry=retry)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        answered = threading.Event()
        thread = threading.Thread(target=answer_late, args=(server, 0.1, answered))
        thread.start()
        channel = Channel(make, 0.2)
        try:
            asked = asyncio.create_task(channel.send([("PING",)]))
            await asyncio.sleep(0.05)
            time.sleep(0.5)
            answered.wait(30)
            assert await asked == [b"PONG"]
        finally:
            await channel.close()
            thread.join()
