"""Malformed messages at a real router while well-behaved clients stream.

The clients are not disturbed. Each malformed message is answered with an error or its connection is
closed, and nothing of it is kept.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.chaos import malformed
from tests.chaos.malformed import Malformed, answer, check_grpc, check_http
from tests.chaos.raw_http2 import forget
from tests.chaos.support import Cluster, Load, config, resident, running, until
from tests.fuzz.native import PREFACE, Frames
from tests.support.router.http_client import streamed

_AT_ONCE = 16
_SEED = 7
#: Limit of memory growth: freed memory that the allocator keeps, and buffers of a flood.
_MOST_BYTES = 64 << 20
#: Limit of new file descriptors: a busy router has more connections to its ledger.
_MOST_FILES = 16
_PROMPT = {"prompt": [5, 6, 7], "max_tokens": 300, "temperature": 0, "stream": True}


async def streamed_text(cluster: Cluster) -> str:
    """Return the text of a completion that is streamed over HTTP to its end."""
    address, text = cluster.routers[0].http_address, ""
    async with streamed(address, "/v1/completions", _PROMPT) as stream:
        assert stream.status == 200
        async for event in stream.events():
            if event.data == "[DONE]":
                return text
            text += event.text
    raise AssertionError("the stream broke off")


class GoodClients:
    """Clients that stream over gRPC and HTTP, one request after the other, until ``stop``."""

    def __init__(self, cluster: Cluster, right: str) -> None:
        self._cluster = cluster
        self._right = right
        self._is_over = False
        self.num_streams = 0

    async def stream(self) -> None:
        while not self._is_over:
            await asyncio.gather(self._by_grpc(), self._by_http())
            self.num_streams += 1

    def stop(self) -> None:
        self._is_over = True

    async def _by_grpc(self) -> None:
        """Check that each offset arrives once, with the expected token."""
        seed = 1000 + self.num_streams
        async with Load(self._cluster.addresses, 2, seed=seed, max_tokens=300, plain=True) as load:
            await load.finish()
        load.check()

    async def _by_http(self) -> None:
        assert await streamed_text(self._cluster) == self._right


@asynccontextmanager
async def streaming(cluster: Cluster) -> AsyncIterator[GoodClients]:
    """Run well-behaved clients in the background; raise their errors at the end."""
    clients = GoodClients(cluster, await streamed_text(cluster))
    task = asyncio.create_task(clients.stream())
    try:
        yield clients
    finally:
        clients.stop()
        await task
    assert clients.num_streams


async def send_all(cluster: Cluster, count: int, seed: int = _SEED) -> None:
    router = cluster.routers[0]
    ways: tuple[tuple[str, Iterator[Malformed], Callable[[Malformed, bytes], None]], ...] = (
        (router.address, malformed.messages(seed, count // 2, grpc=True), check_grpc),
        (router.http_address, malformed.messages(seed, count // 2, grpc=False), check_http),
    )

    async def send(
        address: str, messages: Iterator[Malformed], check: Callable[[Malformed, bytes], None]
    ) -> None:
        for message in messages:
            try:
                check(message, await answer(address, message))
            except TimeoutError:
                raise AssertionError(f"neither answered nor hung up on: {message}") from None

    async with asyncio.TaskGroup() as group:
        for way in ways:
            for _ in range(_AT_ONCE // len(ways)):
                group.create_task(send(*way))


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def errors_of(cluster: Cluster) -> list[str]:
    events = cluster.events("router-0")
    return [str(event) for event in events if event["level"] == "error"]


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
async def test_malformed_messages_disturb_no_client_and_leak_nothing(
    tmp_path: Path, count: int
) -> None:
    async with running(config(tmp_path, workers=1)) as cluster:
        pid = cluster.routers[0].pids[0]
        # Warm-up: objects that a process allocates once exist before the measurement.
        await send_all(cluster, 400, seed=_SEED + 1)
        await cluster.idle()
        memory, files = resident(pid), descriptors(pid)
        async with streaming(cluster):
            await send_all(cluster, count)
        await cluster.idle()
        await until(lambda: descriptors(pid) <= files + _MOST_FILES)
        assert resident(pid) - memory < _MOST_BYTES
        assert not errors_of(cluster)


# floods: an endless sequence of frames on one connection


def _rapid_reset() -> Iterator[bytes]:
    """Yield calls that are reset at once (CVE-2023-44487)."""
    frames = Frames()
    while True:
        frames.head("/everlift.v1.Inference/Generate")
        frames.frame(3, 0, frames.last, struct.pack(">I", 8))
        yield bytes(frames.data)
        frames.data.clear()


def _continuation() -> Iterator[bytes]:
    """Yield a header block that never ends (CVE-2024-27316)."""
    yield bytes(Frames().frame(1, 0, 1, b"\x83\x86").data)
    piece = b"\0\1a\x7f\x81\x07" + b"b" * 262
    while True:
        yield bytes(Frames().frame(9, 0, 1, piece).data)


def _again(frames: Frames) -> Callable[[], Iterator[bytes]]:
    def again() -> Iterator[bytes]:
        while True:
            yield bytes(frames.data)

    return again


def _http_trailers() -> Iterator[bytes]:
    yield b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    yield b"2\r\n{}\r\n0\r\n"
    while True:
        yield b"x: " + b"a" * 500 + b"\r\n"


def _http_head() -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\n"
    while True:
        yield b"x: " + b"a" * 500 + b"\r\n"


#: By name: whether the flood is HTTP/2, and its source of bytes.
FLOODS: dict[str, tuple[bool, Callable[[], Iterator[bytes]]]] = {
    "rapid reset": (True, _rapid_reset),
    "continuation": (True, _continuation),
    "settings": (True, _again(Frames().frame(4, 0, 0, struct.pack(">HI", 3, 100) * 10))),
    "pings": (True, _again(Frames().frame(6, 0, 0, b"8 octets"))),
    "priorities": (True, _again(Frames().frame(2, 0, 1, struct.pack(">IB", 3, 15)))),
    "empty data": (True, _again(Frames().frame(0, 0, 1))),
    "windows": (True, _again(Frames().frame(8, 0, 0, struct.pack(">I", 1)))),
    "unknown frames": (True, _again(Frames().frame(200, 0, 0, bytes(64)))),
    "trailers": (False, _http_trailers),
    "headers": (False, _http_head),
}
_FLOOD_FRAMES = 30_000


async def flood(address: str, is_http2: bool, frames: Iterator[bytes]) -> None:
    """Send _FLOOD_FRAMES frames, or until the server closes; read and discard the answers."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    reading = asyncio.create_task(forget(reader))
    try:
        with suppress(ConnectionError):
            if is_http2:
                writer.write(PREFACE + bytes(Frames().frame(4, 0, 0).data))
            for _ in range(_FLOOD_FRAMES // 100):
                writer.write(b"".join(next(frames) for _ in range(100)))
                await writer.drain()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        writer.transport.abort()


@pytest.mark.long
async def test_frame_floods_disturb_no_client_and_leak_nothing(tmp_path: Path) -> None:
    async with running(config(tmp_path, workers=1)) as cluster:
        router = cluster.routers[0]
        pid = router.pids[0]
        await cluster.idle()
        memory, files = resident(pid), descriptors(pid)
        async with streaming(cluster) as clients:
            for is_http2, frames in FLOODS.values():
                address = router.address if is_http2 else router.http_address
                await flood(address, is_http2, frames())
            seen = clients.num_streams
            await until(lambda: clients.num_streams > seen)
        await cluster.idle()
        await until(lambda: descriptors(pid) <= files + _MOST_FILES)
        assert resident(pid) - memory < _MOST_BYTES
        assert not errors_of(cluster)


@pytest.mark.long
async def test_incomplete_requests_delay_no_client(tmp_path: Path) -> None:
    """A hundred connections each stop in the preface, a frame, the head and the body."""
    halves = (
        (True, PREFACE),
        (True, PREFACE + bytes(Frames().frame(4, 0, 0).data) + b"\0\0\x20"),
        (False, b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-le"),
        (False, b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{"),
    )
    async with running(config(tmp_path, workers=1)) as cluster:
        router = cluster.routers[0]
        pid = router.pids[0]
        await cluster.idle()
        files = descriptors(pid)
        writers: list[asyncio.StreamWriter] = []
        async with streaming(cluster) as clients:
            for is_http2, data in halves * 100:
                address = router.address if is_http2 else router.http_address
                host, _, port = address.rpartition(":")
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(data)
                writers.append(writer)
            seen = clients.num_streams
            await until(lambda: clients.num_streams > seen)
            for writer in writers:
                writer.transport.abort()
        await until(lambda: descriptors(pid) <= files + _MOST_FILES)
