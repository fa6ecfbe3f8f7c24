"""The gateway's gRPC server, with grpcio's client and with raw HTTP/2."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import h2.connection
import h2.events
import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame, SettingsFrame, WindowUpdateFrame

from everlift import wire
from everlift.errors import MessageTooLarge
from router.api.http2.call import Call
from router.api.http2.connection import Connection
from router.api.http2.framing import framed
from router.api.http2.h2_connection import Http2
from router.api.http2.limits import Limits
from router.api.http2.server import Server
from tests.support.in_process import cluster, until

SERVICE = "test.Service"
Context = Any


class Silence:
    """Source without data, which does not end."""

    is_over = False

    def poll(self) -> None:
        return None


class Plenty:
    """Source whose messages are all available from the start."""

    on_more: Callable[[], None]

    def __init__(self, count: int) -> None:
        self.left = count

    @property
    def is_over(self) -> bool:
        return not self.left

    def poll(self) -> bytes | None:
        if not self.left:
            return None
        self.left -= 1
        return bytes(10_000)


class Service:
    """Service with one method of each kind."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.waiting = asyncio.Event()
        self.free = asyncio.Event()
        self.sent = 0

    async def echo(self, message: bytes, context: Context) -> bytes:
        metadata = dict(context.invocation_metadata())
        if "initial" in metadata:
            await context.send_initial_metadata((("got", metadata["initial"]), ("raw-bin", b"\0")))
        return message

    async def count(self, message: bytes, context: Context) -> AsyncIterator[bytes]:
        for number in range(int(message)):
            yield b"%d" % number

    async def join(self, messages: AsyncIterator[bytes], context: Context) -> bytes:
        return b",".join([message async for message in messages])

    async def talk(self, messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message.upper()

    async def hold(self, messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Read one message, and reply to it once ``free`` is set."""
        async for message in messages:
            self.waiting.set()
            await self.free.wait()
            yield message[:1]
            return

    async def fail(self, message: bytes, context: Context) -> bytes:
        await context.abort(
            grpc.StatusCode.DATA_LOSS, "100 % gone: ü", (("slug", "gone"), ("it-bin", b"\1\2"))
        )

    async def crash(self, message: bytes, context: Context) -> bytes:
        raise RuntimeError("secret")

    async def hang(self, message: bytes, context: Context) -> bytes:
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return b""

    async def linger(self, message: bytes, context: Context) -> None:
        """Ignore one cancellation, then write single messages or from a silent source."""
        self.waiting.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        try:
            if message == b"source":
                await context.write_from(Silence())
            while True:
                await context.write(b"on")
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def flood(self, message: bytes, context: Context) -> AsyncIterator[bytes]:
        while True:
            self.sent += 1
            yield bytes(10_000)

    async def draw(self, message: bytes, context: Context) -> None:
        await context.write_from(Plenty(int(message)))

    async def left(self, message: bytes, context: Context) -> bytes:
        return b"some" if context.time_remaining() is not None else b"none"

    def handlers(self) -> grpc.GenericRpcHandler:
        unary, streaming = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        methods = {
            "Echo": unary(self.echo),
            "Count": streaming(self.count),
            "Join": grpc.stream_unary_rpc_method_handler(self.join),
            "Talk": grpc.stream_stream_rpc_method_handler(self.talk),
            "Hold": grpc.stream_stream_rpc_method_handler(self.hold),
            "Fail": unary(self.fail),
            "Crash": unary(self.crash),
            "Hang": unary(self.hang),
            "Linger": streaming(self.linger),
            "Flood": streaming(self.flood),
            "Draw": streaming(self.draw),
            "Left": unary(self.left),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)


class Bench:
    def __init__(self, limits: Limits) -> None:
        self.service = Service()
        self.server = Server(limits)
        self.server.add_generic_rpc_handlers((self.service.handlers(),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")

    def unary(self, name: str) -> Callable[..., Any]:
        return self.channel.unary_unary(f"/{SERVICE}/{name}")

    def streaming(self, name: str) -> Callable[..., Any]:
        return self.channel.unary_stream(f"/{SERVICE}/{name}")


@asynccontextmanager
async def bench(limits: Limits | None = None) -> AsyncIterator[Bench]:
    it = Bench(limits or Limits())
    await it.server.start()
    try:
        yield it
    finally:
        await it.channel.close()
        await it.server.stop(None)
        assert not it.server._connections


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


async def test_rpc_server_sets_tcp_nodelay() -> None:
    async with bench() as it:
        await it.channel.channel_ready()
        [connection] = it.server._connections
        accepted = connection._transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_rpc_server_serves_all_four_method_kinds() -> None:
    async with bench() as it:
        assert await it.unary("Echo")(b"hello") == b"hello"
        assert await it.unary("Echo")(b"") == b""
        assert [m async for m in it.streaming("Count")(b"3")] == [b"0", b"1", b"2"]
        assert [m async for m in it.streaming("Count")(b"0")] == []
        join = it.channel.stream_unary(f"/{SERVICE}/Join")
        assert await join(iter([b"a", b"b"])) == b"a,b"
        assert await join(iter([])) == b""
        talk = it.channel.stream_stream(f"/{SERVICE}/Talk")()
        for word in (b"one", b"two"):
            await talk.write(word)
            assert await talk.read() == word.upper()
        await talk.done_writing()
        assert await talk.read() is grpc.aio.EOF


async def test_rpc_metadata_is_passed_both_ways() -> None:
    async with bench() as it:
        call = it.unary("Echo")(b"", metadata=(("initial", "i"),))
        await call
        initial = dict(await call.initial_metadata())
        assert (initial["got"], initial["raw-bin"]) == ("i", b"\0")
        failed = it.unary("Fail")(b"")
        assert await code_of(failed) is grpc.StatusCode.DATA_LOSS
        assert await failed.details() == "100 % gone: ü"
        trailing = dict(await failed.trailing_metadata())
        assert (trailing["slug"], trailing["it-bin"]) == ("gone", b"\1\2")


async def test_handler_exception_is_logged_and_hidden_from_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as it:
        call = it.unary("Crash")(b"")
        assert await code_of(call) is grpc.StatusCode.UNKNOWN
        assert "secret" not in await call.details()
        assert "secret" in caplog.text
        assert await it.unary("Echo")(b"on") == b"on"


async def test_unknown_rpc_method_is_unimplemented() -> None:
    async with bench() as it:
        assert await code_of(it.unary("Nothing")(b"")) is grpc.StatusCode.UNIMPLEMENTED


async def test_rpc_message_size_limit_is_enforced() -> None:
    async with bench(Limits(max_message_bytes=3 << 20)) as it:
        large = bytes(range(256)) * (12 << 10)
        options = [("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{it.port}", options=options) as channel:
            echo = channel.unary_unary(f"/{SERVICE}/Echo")
            assert await echo(large) == large
            with pytest.raises(MessageTooLarge):
                call = echo(large + b"x")
                await wire.answer(call, call)
            # Concurrent calls are not blocked by each other's windows.
            assert await asyncio.gather(*(echo(large[:n]) for n in range(0, 3 << 20, 300_000))) == [
                large[:n] for n in range(0, 3 << 20, 300_000)
            ]


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_rpc_server_accepts_compressed_calls(algorithm: grpc.Compression) -> None:
    async with bench() as it:
        text = b"again and again " * 1000
        call = it.unary("Echo")(text, compression=algorithm)
        assert await call == text
        assert await it.unary("Echo")(b"short", compression=algorithm) == b"short"


async def test_rpc_deadline_reaches_and_cancels_handler() -> None:
    async with bench() as it:
        assert await it.unary("Left")(b"") == b"none"
        assert await it.unary("Left")(b"", timeout=30) == b"some"
        code = await code_of(it.unary("Hang")(b"", timeout=0.1))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        # grpcio's client may give up before a busy server has read its call; the raw client waits.
        async with raw(it.port) as client:
            stream_id = client.call("Hang", ("grpc-timeout", "100m"))
            client.write(stream_id, framed(b""), end=True)
            assert status_of(await client.until(h2.events.ResponseReceived)) == ("200", "4")
        async with asyncio.timeout(10):
            await it.service.cancelled.wait()


async def test_cancelled_rpc_call_cancels_handler() -> None:
    async with bench() as it:
        call = it.unary("Hang")(b"")
        async with asyncio.timeout(10):
            await it.service.waiting.wait()
            call.cancel()
            await it.service.cancelled.wait()


@pytest.mark.parametrize("way", [b"write", b"source"])
@pytest.mark.parametrize("ending", ["cancelled", "too late"])
async def test_handler_ignoring_cancellation_is_cancelled_on_write(way: bytes, ending: str) -> None:
    # The raw client does not end the call itself at the deadline, before a busy server has read it.
    timeout = [("grpc-timeout", "50m")] if ending == "too late" else []
    async with bench() as it, raw(it.port) as client:
        stream_id = client.call("Linger", *timeout)
        client.write(stream_id, framed(way), end=True)
        async with asyncio.timeout(10):
            await it.service.waiting.wait()
            if ending == "cancelled":
                client.http2.reset_stream(stream_id, ErrorCodes.CANCEL)
                client.send()
            await it.service.cancelled.wait()


async def test_broken_connection_cancels_handlers() -> None:
    async with bench() as it:
        call = asyncio.ensure_future(it.unary("Hang")(b""))
        async with asyncio.timeout(10):
            await it.service.waiting.wait()
            await it.channel.close()
            await it.service.cancelled.wait()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await call


async def test_flow_control_blocks_handler_of_slow_reader() -> None:
    async with bench() as it, raw(it.port) as client:
        stream_id = client.call("Flood")
        client.http2.send_data(stream_id, bytes(5), end_stream=True)
        client.send()
        # The server sends what the windows allow, and buffers up to its limit.
        got = 0
        while got < 65_535:
            got += (await client.until(h2.events.DataReceived)).flow_controlled_length
        assert it.service.sent * 10_000 < got + Limits().max_unsent_bytes + 30_000
        assert await it.unary("Echo")(b"on") == b"on"
        sent = it.service.sent
        client.http2.acknowledge_received_data(got, stream_id)
        client.send()
        await client.until(h2.events.DataReceived)
        assert it.service.sent > sent


async def test_connection_serves_many_concurrent_streams() -> None:
    async with bench() as it:
        streams = [it.streaming("Count")(b"20") for _ in range(500)]

        async def read(stream: Any) -> int:
            return len([m async for m in stream])

        assert await asyncio.gather(*map(read, streams)) == [20] * 500
        [connection] = it.server._connections
        assert connection.num_calls == 0
        # The h2 library keeps no state of ended streams either.
        assert len(connection._http2.streams) == 0


async def test_rpc_server_stop_ends_calls_as_unavailable() -> None:
    async with bench() as it:
        stream = it.streaming("Flood")(b"")
        await stream.read()
        echo = asyncio.ensure_future(it.unary("Hang")(b""))
        await it.service.waiting.wait()
        await it.server.stop(0.1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await echo
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert it.service.cancelled.is_set()


async def test_rpc_server_used_port_raises_error() -> None:
    async with bench() as it:
        with pytest.raises(RuntimeError, match="cannot listen"):
            Server().add_insecure_port(f"127.0.0.1:{it.port}")


async def test_rpc_server_serves_only_tls_on_secure_port(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout {key} -out {cert}"
    )
    process = await asyncio.create_subprocess_exec(
        *command.split(), stderr=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    server = Server()
    server.add_generic_rpc_handlers((Service().handlers(),))
    port = server.add_secure_port("127.0.0.1:0", context)
    await server.start()
    credentials = grpc.ssl_channel_credentials(cert.read_bytes())
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
        assert await channel.unary_unary(f"/{SERVICE}/Echo")(b"safe") == b"safe"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        code = await code_of(channel.unary_unary(f"/{SERVICE}/Echo")(b"", timeout=5))
        assert code is grpc.StatusCode.UNAVAILABLE
    await server.stop(None)


# raw HTTP/2


class Raw:
    """HTTP/2 client that can do what no gRPC library does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.http2 = h2.connection.H2Connection()
        self.http2.initiate_connection()
        self.events: deque[h2.events.Event] = deque()

    def send(self) -> None:
        self.writer.write(self.http2.data_to_send())

    def call(
        self, method: str, *more: tuple[str, str], end: bool = False, send: bool = True
    ) -> int:
        stream_id: int = self.http2.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", "x"),
            (":path", f"/{SERVICE}/{method}"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
        replaced = dict(more)
        headers = [(name, replaced.pop(name, value)) for name, value in headers]
        self.http2.send_headers(stream_id, [*headers, *replaced.items()], end_stream=end)
        if send:
            self.send()
        return stream_id

    def write(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """Send data in frames of the maximum size; it must fit in the windows."""
        size = self.http2.max_outbound_frame_size
        for start in range(0, len(data), size):
            self.http2.send_data(stream_id, data[start : start + size])
        if end:
            self.http2.end_stream(stream_id)
        self.send()

    async def until(self, kind: type[h2.events.Event]) -> Any:
        """Return the next event of this kind, or None if the server closes the connection."""
        async with asyncio.timeout(10):
            while True:
                while self.events:
                    if isinstance(event := self.events.popleft(), kind):
                        return event
                if not (data := await self.reader.read(1 << 16)):
                    return None
                self.events.extend(self.http2.receive_data(data))
                self.send()


@asynccontextmanager
async def raw(port: int) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = Raw(reader, writer)
    client.send()
    try:
        yield client
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def status_of(event: Any) -> tuple[str, str]:
    headers = {name.decode(): value.decode() for name, value in event.headers}
    return headers.get(":status", ""), headers.get("grpc-status", "")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ((":method", "GET"), ("405", "")),
        (("content-type", "text/plain"), ("415", "")),
        (("grpc-timeout", "soon"), ("200", "3")),
        (("grpc-encoding", "zip"), ("200", "12")),
        (("x-bin", "???"), ("200", "3")),
        (("x-long", "x" * 20_000), ("200", "8")),
        ((":path", "/"), ("200", "12")),
        ((":path", ""), ("200", "12")),
    ],
)
async def test_invalid_rpc_headers_are_rejected(
    header: tuple[str, str], status: tuple[str, str]
) -> None:
    async with bench() as it, raw(it.port) as client:
        if header == (":path", ""):
            pytest.skip("h2 does not let it through")
        client.call("Echo", header, end=True)
        assert status_of(await client.until(h2.events.ResponseReceived)) == status
        assert await it.unary("Echo")(b"on") == b"on"


async def test_rpc_error_sends_x_request_id_in_initial_metadata() -> None:
    """The client is raw, because gRPC's own clients may drop metadata just before an error."""
    path = (":path", "/everlift.v1.Inference/Generate")
    async with cluster(workers=0) as parts:
        async with raw(int(parts.address.rpartition(":")[2])) as client:
            client.call("", path, ("x-request-id", "mesh/1"), end=True)
            begun = await client.until(h2.events.ResponseReceived)
            ended = await client.until(h2.events.TrailersReceived)
    assert (b"x-request-id", b"mesh/1") in begun.headers
    assert (b"grpc-status", b"3") in ended.headers


@pytest.mark.long
async def test_oversized_headers_close_only_their_connection() -> None:
    async with bench() as it, raw(it.port) as client:
        client.call("Echo", ("x-long", "x" * 200_000))
        assert await client.until(h2.events.ConnectionTerminated) is not None
        assert await it.unary("Echo")(b"on") == b"on"


async def test_goaway_from_client_lets_open_calls_finish() -> None:
    async with bench() as it, raw(it.port) as client:
        stream_id = client.call("Join")
        client.writer.write(GoAwayFrame(0, last_stream_id=0).serialize())
        client.http2.send_data(stream_id, b"\0\0\0\0\2on", end_stream=True)
        client.send()
        assert status_of(await client.until(h2.events.ResponseReceived)) == ("200", "")
        assert (await client.until(h2.events.DataReceived)).data == b"\0\0\0\0\2on"
        assert status_of(await client.until(h2.events.TrailersReceived)) == ("", "0")
        assert await client.until(h2.events.ConnectionTerminated) is None


async def test_invalid_http2_frame_closes_connection_without_error_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as it, raw(it.port) as client:
        client.call("Echo", end=True)
        client.writer.write(WindowUpdateFrame(0, window_increment=1).serialize()[:-4] + bytes(4))
        assert await client.until(h2.events.ConnectionTerminated) is not None
        assert await client.until(h2.events.ConnectionTerminated) is None
        assert await it.unary("Echo")(b"on") == b"on"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_oversized_frame_is_rejected_by_its_header() -> None:
    async with bench() as it, raw(it.port) as client:
        client.writer.write(b"\xff\xff\xff\0\0\0\0\0\1")
        ended = await client.until(h2.events.ConnectionTerminated)
        assert ended.error_code == ErrorCodes.FRAME_SIZE_ERROR
        assert await it.unary("Echo")(b"on") == b"on"


async def test_rapid_resets_close_connection() -> None:
    async with bench(Limits(resets_per_s=50)) as it, raw(it.port) as client:
        for _ in range(200):
            stream_id = client.call("Hang")
            client.http2.reset_stream(stream_id)
        client.send()
        ended = await client.until(h2.events.ConnectionTerminated)
        assert ended.error_code == ErrorCodes.ENHANCE_YOUR_CALM
        assert await it.unary("Echo")(b"on") == b"on"


async def test_rejected_and_reset_call_affects_no_other_call() -> None:
    async with bench() as it, raw(it.port) as client:
        await client.until(h2.events.RemoteSettingsChanged)
        client.call("Hold")
        await until(lambda: calls_of(it))
        # Headers and reset arrive in one piece.
        [connection] = it.server._connections
        stream_id = client.call("Echo", ("content-type", "text/plain"), send=False)
        client.http2.reset_stream(stream_id)
        connection.data_received(client.http2.data_to_send())
        assert not connection._transport.is_closing()
        assert connection.num_calls == 1


async def test_settings_flood_closes_connection() -> None:
    async with bench() as it, raw(it.port) as client:
        for size in range(1000):
            client.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: size})
        client.send()
        ended = await client.until(h2.events.ConnectionTerminated)
        assert ended.error_code == ErrorCodes.ENHANCE_YOUR_CALM
        assert await it.unary("Echo")(b"on") == b"on"


async def test_keepalive_closes_unresponsive_connection() -> None:
    async with bench(Limits(keepalive=0.1)) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        http2 = h2.connection.H2Connection()
        http2.initiate_connection()
        writer.write(http2.data_to_send())
        async with asyncio.timeout(10):
            while await reader.read(1 << 16):
                pass
        writer.close()


async def test_idle_rpc_connection_is_closed() -> None:
    # The connection is checked every 0.2 s, and idle at the second check. A third one could find
    # that a busy client has not answered the ping of the second one.
    async with bench(Limits(keepalive=0.2, idle=0.3)) as it, raw(it.port) as client:
        client.http2.ping(b"8 octets")
        client.send()
        ended = await client.until(h2.events.ConnectionTerminated)
        assert ended.error_code == ErrorCodes.NO_ERROR
        assert await client.until(h2.events.ConnectionTerminated) is None


async def test_rpc_connections_beyond_limit_are_rejected() -> None:
    async with bench(Limits(max_connections=2)) as it, raw(it.port) as first, raw(it.port):
        await first.until(h2.events.RemoteSettingsChanged)
        async with raw(it.port) as third:
            ended = await third.until(h2.events.ConnectionTerminated)
            assert ended.error_code == ErrorCodes.ENHANCE_YOUR_CALM
            assert ended.additional_data == b"too_many_connections"
        assert len(it.server._connections) == 2


async def test_calls_beyond_max_streams_wait_at_client() -> None:
    async with bench(Limits(max_streams=2)) as it:
        talks = [it.channel.stream_stream(f"/{SERVICE}/Talk")() for _ in range(2)]
        for talk in talks:
            await talk.write(b"a")
            assert await talk.read() == b"A"
        third = asyncio.ensure_future(it.unary("Echo")(b"c"))
        # This message is sent and answered after the third call began.
        await talks[1].write(b"b")
        assert await talks[1].read() == b"B"
        assert not third.done()
        await talks[0].done_writing()
        assert await third == b"c"
        await talks[1].done_writing()


MESSAGE = framed(bytes((16 << 10) - 5))
WINDOW = 8 << 20


def window(connection: Connection) -> int:
    """Return how many bytes the client may send, including those not acknowledged yet."""
    manager = connection._http2._inbound_flow_control_window_manager
    return manager.current_window_size + manager._bytes_processed


def calls_of(it: Bench) -> list[Call]:
    [connection] = it.server._connections
    return list(connection._calls.values())


@pytest.mark.parametrize("by_client", [True, False], ids=["given up", "answered"])
async def test_ended_call_returns_unread_bytes_to_window(by_client: bool) -> None:
    async with bench(Limits(max_unread_bytes=1 << 10)) as it, raw(it.port) as client:
        await client.until(h2.events.RemoteSettingsChanged)
        [connection] = it.server._connections
        # In total more than the connection's window.
        for _ in range(20):
            it.service.free.clear()
            while client.http2.outbound_flow_control_window < 1 << 20:
                await client.until(h2.events.WindowUpdated)
            stream_id = client.call("Hold")
            client.write(stream_id, MESSAGE * 32)
            await until(lambda: [it for it in calls_of(it) if it._unacknowledged > 31 * 16_000])
            assert window(connection) < WINDOW
            if by_client:
                client.http2.reset_stream(stream_id, ErrorCodes.CANCEL)
                client.send()
            else:
                it.service.free.set()
                await client.until(h2.events.StreamReset)
            await until(lambda: not connection.num_calls)
            assert window(connection) == WINDOW
        stream_id = client.call("Echo")
        client.write(stream_id, MESSAGE, end=True)
        assert status_of(await client.until(h2.events.TrailersReceived)) == ("", "0")


@pytest.mark.parametrize(
    "header", [(":path", "/"), ("content-type", "text/plain"), ("grpc-timeout", "soon")]
)
async def test_window_counts_late_data_of_ended_call_once(header: tuple[str, str]) -> None:
    async with bench() as it, raw(it.port) as client:
        await client.until(h2.events.RemoteSettingsChanged)
        [connection] = it.server._connections
        stream_id = client.call("Echo", header)
        client.write(stream_id, MESSAGE * 8)
        # The client does not know yet that the call has ended.
        await until(lambda: connection._http2.highest_inbound_stream_id and not calls_of(it))
        client.write(stream_id, MESSAGE * 8)
        echo = client.call("Echo")
        client.write(echo, MESSAGE, end=True)
        assert status_of(await client.until(h2.events.TrailersReceived)) == ("", "0")
        assert window(connection) == WINDOW


async def test_window_update_is_sent_while_other_calls_hold_window() -> None:
    """Even less than half of the window is announced once the window is exhausted."""
    async with bench(Limits(max_unread_bytes=0)) as it, raw(it.port) as client:
        await client.until(h2.events.RemoteSettingsChanged)
        [connection] = it.server._connections
        reading = client.call("Join")
        for _ in range(6):
            client.write(reading, MESSAGE * 32)
            await until(lambda: window(connection) == WINDOW)
            while client.http2.local_flow_control_window(reading) < 512 << 10:
                await client.until(h2.events.WindowUpdated)
        while left := client.http2.outbound_flow_control_window:
            client.write(client.call("Hold"), MESSAGE * min(64, left // len(MESSAGE)))
        while (await client.until(h2.events.WindowUpdated)).stream_id:
            pass
        assert client.http2.local_flow_control_window(reading) > 0


class Pumps:
    """Records the calls that are asked for data to send."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Call] = []
        pump = Call.pump

        def counted(call: Call, http2: Http2) -> bool:
            self.calls.append(call)
            return pump(call, http2)

        monkeypatch.setattr(Call, "pump", counted)


async def test_window_updates_wake_only_held_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as it, raw(it.port) as client:
        for _ in range(50):
            client.write(client.call("Hang"), framed(b""), end=True)
        client.write(client.call("Flood"), framed(b""), end=True)
        await until(lambda: it.server._connections and len(calls_of(it)) == 51)
        [connection] = it.server._connections
        flooding = calls_of(it)[-1]
        await until(lambda: flooding.has_queued and not connection._is_flushing)
        pumps = Pumps(monkeypatch)
        update, setting = WindowUpdateFrame(0, window_increment=1), SettingsFrame(0)
        setting.settings = {SettingsFrame.MAX_FRAME_SIZE: 1 << 15}
        connection.data_received(update.serialize() * 20 + setting.serialize() + update.serialize())
        connection._flush()
        assert pumps.calls == [flooding]


async def test_window_update_does_not_start_response_before_handler() -> None:
    """The initial metadata that a handler sets would otherwise be too late."""
    async with bench() as it, raw(it.port) as client:
        stream_id = client.call("Echo", ("initial", "first"))
        await until(lambda: it.server._connections and calls_of(it))
        client.http2.increment_flow_control_window(1000)
        client.http2.increment_flow_control_window(1000, stream_id)
        client.http2.ping(b"8 octets")
        client.send()
        await client.until(h2.events.PingAckReceived)
        client.write(stream_id, framed(b"on"), end=True)
        begun = await client.until(h2.events.ResponseReceived)
        assert (b"got", b"first") in begun.headers


async def test_source_data_is_sent_up_to_open_windows() -> None:
    """No further event of the source or the client is needed."""
    async with bench() as it, raw(it.port) as client:
        client.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
        client.http2.increment_flow_control_window(1 << 20)
        client.write(client.call("Draw"), framed(b"40"), end=True)
        assert status_of(await client.until(h2.events.TrailersReceived)) == ("", "0")


@pytest.mark.parametrize(
    "message", [framed(bytes(64 << 10), "gzip"), framed(b"")], ids=["compressed", "empty"]
)
async def test_call_inbox_of_unread_messages_is_bounded(
    message: bytes,
) -> None:
    limits = Limits(max_unread_bytes=32 << 10)
    async with bench(limits) as it, raw(it.port) as client:
        await client.until(h2.events.RemoteSettingsChanged)
        data = message * ((200 << 10) // len(message))
        client.write(client.call("Hold", ("grpc-encoding", "gzip")), data)
        await until(lambda: it.server._connections and calls_of(it))
        [call] = calls_of(it)
        await until(lambda: call._unacknowledged >= 190 << 10)
        most = limits.max_unread_bytes + (4 << 10) / len(message) * (64 << 10)
        assert sum(map(len, call._inbox)) <= most
        assert len(call._inbox) < 2000


@pytest.mark.parametrize("size", [0, 1, 3000])
async def test_buffered_messages_are_read_in_order(size: int) -> None:
    messages = [b"%d" % number + bytes(size) for number in range(1000)]
    data = b"".join(framed(message, "gzip") for message in messages)
    limits = Limits(max_unread_bytes=0)
    async with bench(limits) as it, raw(it.port) as client:
        client.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 8 << 20})
        client.http2.increment_flow_control_window(8 << 20)
        await client.until(h2.events.RemoteSettingsChanged)
        client.write(client.call("Join", ("grpc-encoding", "gzip")), data, end=True)
        got = b""
        while len(got) < 5 or len(got) < 5 + int.from_bytes(got[1:5], "big"):
            got += (await client.until(h2.events.DataReceived)).data
        flag, body = got[0], got[5:]
        assert (gzip.decompress(body) if flag else body) == b",".join(messages)


BROKEN = b"\0\xff\xff\xff\xff"


async def test_malformed_message_ends_call_of_non_reading_handler() -> None:
    async with bench() as it, raw(it.port) as client:
        await client.until(h2.events.RemoteSettingsChanged)
        stream_id = client.call("Hold")
        client.write(stream_id, framed(b"on"))
        await it.service.waiting.wait()
        [call] = calls_of(it)
        client.write(stream_id, BROKEN + MESSAGE)
        ended = await client.until(h2.events.ResponseReceived)
        assert status_of(ended) == ("200", "8")
        assert call._reader.num_buffered == 0
        assert (await client.until(h2.events.StreamReset)).error_code == ErrorCodes.NO_ERROR


async def test_bytes_after_malformed_message_are_dropped() -> None:
    async with bench() as it, raw(it.port) as client:
        await client.until(h2.events.RemoteSettingsChanged)
        [connection] = it.server._connections
        # The response does not fit in the window, so the call cannot end.
        client.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        stream_id = client.call("Talk")
        client.write(stream_id, framed(b"on"))
        await until(lambda: calls_of(it) and calls_of(it)[0].has_queued)
        [call] = calls_of(it)
        client.write(stream_id, BROKEN)
        while client.http2.local_flow_control_window(stream_id) >= len(MESSAGE):
            client.write(stream_id, MESSAGE)
        await until(lambda: window(connection) < WINDOW - (1 << 20) + 2 * len(MESSAGE))
        assert call._reader.num_buffered == 0 and not call._inbox
        client.http2.reset_stream(stream_id)
        client.send()
        await until(lambda: not connection.num_calls)
        assert window(connection) == WINDOW


async def test_messages_before_malformed_one_are_answered() -> None:
    async with bench() as it, raw(it.port) as client:
        stream_id = client.call("Talk")
        client.write(stream_id, framed(b"on"))
        assert (await client.until(h2.events.DataReceived)).data == framed(b"ON")
        client.write(stream_id, framed(b"two"))
        client.write(stream_id, BROKEN)
        assert (await client.until(h2.events.DataReceived)).data == framed(b"TWO")
        assert status_of(await client.until(h2.events.TrailersReceived)) == ("", "8")


async def test_unfinished_messages_of_connection_are_bounded() -> None:
    limits = Limits(max_message_bytes=520 << 10, max_unfinished_bytes=1500 << 10)
    whole = framed(bytes(520 << 10))
    begun = whole[: 500 << 10]
    async with bench(limits) as it, raw(it.port) as client:
        await client.until(h2.events.RemoteSettingsChanged)
        [connection] = it.server._connections
        for _ in range(4):
            client.write(client.call("Echo"), begun)
        await until(lambda: connection._unfinished_bytes == 4 * len(begun))
        fifth = client.call("Echo")
        client.write(fifth, begun)
        refused = await client.until(h2.events.ResponseReceived)
        assert (refused.stream_id, status_of(refused)) == (fifth, ("200", "8"))
        await until(lambda: len(calls_of(it)) == 4)
        assert connection._unfinished_bytes == 4 * len(begun)
        # Calls that are reset or complete release their bytes.
        for call in calls_of(it)[:2]:
            client.http2.reset_stream(call.stream_id)
        client.send()
        await until(lambda: connection._unfinished_bytes == 2 * len(begun))
        client.write(client.call("Join"), begun)
        await until(lambda: connection._unfinished_bytes == 3 * len(begun))
        client.write(calls_of(it)[0].stream_id, whole[len(begun) :], end=True)
        await until(lambda: connection._unfinished_bytes == 2 * len(begun))


async def test_reading_after_reset_raises_cancelled_error() -> None:
    """A handler must not take the messages before a reset for the complete input."""
    async with bench() as it, raw(it.port) as client:
        stream_id = client.call("Join")
        client.write(stream_id, framed(b"a"))
        await until(lambda: it.server._connections and calls_of(it))
        [call] = calls_of(it)
        client.http2.reset_stream(stream_id)
        client.send()
        await until(lambda: not calls_of(it))
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(10):
                await anext(call.messages())


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", bytes(300), b"\x16\x03\x01" + bytes(200), b"PRI * HTTP/2"]
)
async def test_rpc_server_survives_non_http2_input(data: bytes) -> None:
    async with bench() as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(10):
            await reader.read()
        writer.close()
        assert await it.unary("Echo")(b"on") == b"on"


async def test_response_is_split_to_fit_tiny_client_window() -> None:
    """The response arrives in as many parts as the client's window requires."""
    async with bench() as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        client = Raw(reader, writer)
        client.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 7})
        client.send()
        stream_id = client.call("Echo")
        client.http2.send_data(stream_id, b"\0\0\0\0\x14" + b"12345678901234567890", True)
        client.send()
        got = b""
        async with asyncio.timeout(10):
            while len(got) < 25:
                for event in client.http2.receive_data(await reader.read(1 << 16)):
                    if isinstance(event, h2.events.DataReceived):
                        assert len(event.data) <= 7
                        got += event.data
                        size = event.flow_controlled_length
                        if len(got) < 25:
                            client.http2.increment_flow_control_window(size, stream_id)
                client.send()
        assert got[5:] == b"12345678901234567890"
        writer.close()
