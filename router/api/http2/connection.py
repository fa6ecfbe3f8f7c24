"""Client connection of the gRPC server: h2 handles HTTP/2, and ``Call`` handles each call."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol, cast

from h2.config import H2Configuration
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from everlift import logs
from everlift.errors import EverliftError, RateLimited, TooManyConnections
from router.api.http2 import heads
from router.api.http2.call import Call
from router.api.http2.h2_connection import Http2
from router.api.http2.heads import Head, NotGrpc
from router.api.http2.limits import Limits

log = logs.get_logger(__name__)

#: Flow-control windows in bytes: how much a client may send before the server has processed it, on
#: one call and on the whole connection.
_STREAM_WINDOW, _CONNECTION_WINDOW = 1 << 20, 8 << 20
#: Initial connection window of HTTP/2 in bytes, which can only be increased.
_FIRST_WINDOW = 65_535
#: Size of headers above which they are not decoded and the connection is closed, as a multiple of
#: max_metadata_bytes. With fewer bytes, only the call is rejected, with a cause.
_METADATA_FACTOR = 4
#: Number of bytes in the socket's write buffer above which the connection is aborted. Answers wait
#: in their calls long before that, so the buffer then has replies of HTTP/2 itself, for example to
#: PING frames, which the client does not read.
_MAX_UNSENT_BYTES = 4 << 20
#: Number of bytes in the write buffer, or collected in one flush, above which answers wait in
#: their calls.
_WRITE_HIGH = 256 << 10
_UNKNOWN_HEAD = Head("", (), None, "identity")


class Host(Protocol):
    """Interface of the server that its connections use."""

    def connection_opened(self, connection: Connection) -> bool:
        """Register the connection; return False if the server has too many."""
        ...

    def connection_closed(self, connection: Connection) -> None: ...

    def start_call(self, call: Call, head: Head) -> None:
        """Run the handler of the call's method, or end the call with an error if there is none."""
        ...


class Connection(asyncio.Protocol):
    def __init__(self, server: Host, limits: Limits) -> None:
        self.limits = limits
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Call] = {}
        #: calls with something to send, in the order in which they got it
        self._ready: dict[Call, None] = {}
        #: former ready calls, which send before those of _ready: in this flush or in later ones
        self._turns: deque[Call] = deque()
        #: calls with data that flow control holds back; those that have sent nothing for longest
        #: come first
        self._blocked: dict[Call, None] = {}
        self._is_window_updated = False
        self._unfinished_bytes = 0
        self._is_flushing = self._is_paused = self._is_closed = self._is_going_away = False
        self._received_at = self._idle_since = self._loop.time()
        self._awaits_pong = False
        self._resets, self._resets_at = 0.0, self._received_at
        self._keepalive_timer: asyncio.TimerHandle | None = None
        self._http2 = Http2(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(_WRITE_HIGH)
        if not self._server.connection_opened(self):
            self._reject_connection()
            return
        head_bytes = _METADATA_FACTOR * self.limits.max_metadata_bytes
        self._http2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: self.limits.max_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: head_bytes,
                SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
            },
        )
        self._http2.decoder = heads.KnownBlocks(head_bytes)
        self._http2.initiate_connection()
        self._http2.increment_flow_control_window(_CONNECTION_WINDOW - _FIRST_WINDOW)
        self._flush()
        self._keepalive_timer = self._loop.call_later(self.limits.keepalive, self._check_idle)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closed = True
        if self._keepalive_timer is not None:
            self._keepalive_timer.cancel()
        for call in tuple(self._calls.values()):
            call.cancel()
        self._calls.clear()
        self._server.connection_closed(self)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._schedule_flush()

    def data_received(self, data: bytes) -> None:
        self._received_at, self._awaits_pong = self._loop.time(), False
        try:
            for event in self._http2.receive_data(data):
                self._on_event(event)
        except ProtocolError as error:
            log.info("client violated the HTTP/2 protocol", cause=type(error).__name__)
            self._close()
        except Exception:
            log.exception("connection failed")
            self._close()
        else:
            self._schedule_flush()

    # received events

    def _on_event(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            self._on_data(event)
        elif isinstance(event, RequestReceived):
            self._on_request(event)
        elif isinstance(event, StreamEnded):
            if (call := self._calls.get(event.stream_id)) is not None:
                call.half_close()
        elif isinstance(event, WindowUpdated | RemoteSettingsChanged):
            self._on_window_update(event)
        elif isinstance(event, StreamReset):
            self._on_reset(event.stream_id)
        elif isinstance(event, ConnectionTerminated):
            self._is_going_away = True
            self._close_if_idle()

    def _on_data(self, event: DataReceived) -> None:
        call = self._calls.get(event.stream_id)
        size = event.flow_controlled_length
        if call is None:
            # The call has ended, but its bytes still count in the connection's window.
            self.acknowledge(event.stream_id, size)
        else:
            call.feed(event.data, size)
        if not self._http2.inbound_flow_control_window:
            # h2 collects acknowledged bytes, and sends a due window update only at the next
            # acknowledgement. No such acknowledgement may follow: the window is exhausted, and
            # calls that do not read acknowledge nothing. An empty one triggers the update.
            self.acknowledge(event.stream_id, 0)

    def acknowledge(self, stream_id: int, size: int) -> None:
        """Increase the client's flow-control windows by ``size`` bytes that were read or dropped.

        If the stream has ended, only the connection's window is increased.
        """
        self._http2.acknowledge_received_data(size, stream_id)
        self._schedule_flush()

    def add_buffered(self, size: int) -> None:
        """Add ``size`` bytes to the buffered bytes of incomplete messages on this connection.

        ``size`` is negative if bytes are released. Raises RateLimited if the sum is too large.
        """
        self._unfinished_bytes += size
        max_bytes = self.limits.max_unfinished_bytes + self.limits.max_message_bytes
        if size > 0 and self._unfinished_bytes > max_bytes:
            raise RateLimited(
                f"incomplete messages of this connection have more than {max_bytes} bytes: "
                "send fewer large messages at the same time"
            )

    def _on_request(self, event: RequestReceived) -> None:
        stream_id = event.stream_id
        if self._is_going_away:
            self._http2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            self._http2.drop_stream(stream_id)
            return
        try:
            head = heads.parse(cast("Any", event.headers), self.limits.max_metadata_bytes)
        except NotGrpc as error:
            # The client may have reset the stream in the same data.
            if not self._http2.streams[stream_id].closed:
                status = str(error.http_status).encode()
                self._http2.send_headers(stream_id, [(b":status", status)], end_stream=True)
            self._finish_stream(stream_id)
        except EverliftError as error:
            self._add_call(stream_id, _UNKNOWN_HEAD).refuse(error)
        else:
            call = self._add_call(stream_id, head)
            self._server.start_call(call, head)

    def _add_call(self, stream_id: int, head: Head) -> Call:
        call = self._calls[stream_id] = Call(self, stream_id, head, self.limits.max_message_bytes)
        return call

    def _on_window_update(self, event: WindowUpdated | RemoteSettingsChanged) -> None:
        stream_id = event.stream_id if isinstance(event, WindowUpdated) else 0
        if stream_id:
            call = self._calls.get(stream_id)
            if call is not None and call.has_queued:
                self._ready[call] = None
        else:
            # A client may send many such frames, so its calls are checked once for all of them, in
            # the next flush.
            self._is_window_updated = True

    def _on_reset(self, stream_id: int) -> None:
        self._http2.drop_stream(stream_id)
        if (call := self._calls.pop(stream_id, None)) is not None:
            self._ready.pop(call, None)
            self._blocked.pop(call, None)
            call.cancel()
            self._note_idle()
        now = self._loop.time()
        rate = self.limits.resets_per_s
        self._resets = max(0.0, self._resets - rate * (now - self._resets_at)) + 1
        self._resets_at = now
        if self._resets > 2 * rate:
            log.warning("client resets too many calls; its connection is closed")
            self._close(ErrorCodes.ENHANCE_YOUR_CALM)

    # sending

    def mark(self, call: Call) -> None:
        """Schedule a flush, because the call has something to send."""
        self._ready[call] = None
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if self._is_closed or self._transport.is_closing():
            return
        if not self._is_paused:
            if self._is_window_updated:
                self._is_window_updated = False
                self._ready.update(self._blocked)
            self._pump_ready()
        if data := self._http2.data_to_send():
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
                log.warning("client does not read its answers; its connection is aborted")
                self._transport.abort()
        if (self._turns or self._ready) and not self._is_paused:
            self._schedule_flush()
        self._close_if_idle()

    def _pump_ready(self) -> None:
        """Pump the ready calls in turn, until the flush has enough data."""
        if not self._turns:
            self._turns.extend(self._ready)
            self._ready.clear()
        while self._turns and self._http2.num_unsent < _WRITE_HIGH:
            call = self._turns.popleft()
            if self._calls.get(call.stream_id) is call:
                self._pump(call)

    def _pump(self, call: Call) -> None:
        window = self._http2.outbound_flow_control_window
        try:
            is_over = call.pump(self._http2)
        except ProtocolError:
            call.cancel()
            is_over = True
        if is_over or not call.has_queued:
            self._blocked.pop(call, None)
        else:
            self._wait(call, has_sent=self._http2.outbound_flow_control_window < window)
        if is_over:
            del self._calls[call.stream_id]
            self._finish_stream(call.stream_id)
            call.close()

    def _wait(self, call: Call, *, has_sent: bool) -> None:
        """Let a call with unsent data wait for the client's window, or for its next turn."""
        if has_sent:
            # The call moves behind those that wait for the same window.
            self._blocked.pop(call, None)
        if self._http2.window(call.stream_id) > 0:
            self._ready[call] = None
        else:
            self._blocked[call] = None

    def _finish_stream(self, stream_id: int) -> None:
        stream = self._http2.streams.get(stream_id)
        if stream is not None and not stream.closed:
            self._http2.reset_stream(stream_id, ErrorCodes.NO_ERROR)
        self._http2.drop_stream(stream_id)
        self._note_idle()

    # closing

    def _note_idle(self) -> None:
        if not self._calls:
            self._idle_since = self._loop.time()

    def close_when_idle(self) -> None:
        """Accept no new calls, and close the connection when its calls have ended."""
        if not self._is_going_away and not self._is_closed:
            self._is_going_away = True
            last = self._http2.highest_inbound_stream_id
            self._transport.write(GoAwayFrame(0, last_stream_id=last).serialize())
        self._schedule_flush()

    def shut_down(self) -> None:
        """End all calls, and close the connection when their statuses are sent."""
        for call in tuple(self._calls.values()):
            call.shut_down()
        self._is_going_away = True
        self._schedule_flush()

    def abort(self) -> None:
        self._transport.abort()

    def _reject_connection(self) -> None:
        self._http2.initiate_connection()
        cause = TooManyConnections.slug.encode()
        self._http2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM, additional_data=cause)
        self._transport.write(self._http2.data_to_send())
        self._transport.close()

    def _close_if_idle(self) -> None:
        if self._is_going_away and not self._calls and not self._is_closed:
            self._transport.close()

    def _close(self, code: ErrorCodes | None = None) -> None:
        """Close the connection after sending pending data.

        With ``code`` the client first receives a GOAWAY frame with this error.
        """
        if self._is_closed:
            return
        if code is not None:
            self._http2.close_connection(code)
        self._transport.write(self._http2.data_to_send())
        self._transport.close()

    def _check_idle(self) -> None:
        self._keepalive_timer = self._loop.call_later(self.limits.keepalive, self._check_idle)
        self._http2.num_settings = 0
        now = self._loop.time()
        if not self._calls and now - self._idle_since > self.limits.idle:
            self.close_when_idle()
        elif now - self._received_at < self.limits.keepalive:
            return
        elif self._awaits_pong:
            log.info("connection timed out")
            self._transport.abort()
        else:
            self._awaits_pong = True
            self._http2.ping(b"everlift")
            self._schedule_flush()
