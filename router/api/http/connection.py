"""uvicorn's HTTP/1.1 protocol, with limits on request heads and Everlift's error bodies."""

from __future__ import annotations

import asyncio
from collections import deque
from email.utils import formatdate
from http import HTTPStatus

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from everlift.errors import (
    EverliftError,
    MalformedBody,
    MetadataTooLarge,
    TooManyConnections,
)
from router.api.http import errors
from router.api.http.writer import Writer, encode

#: Maximum size of a request line with its headers, in bytes. Session tokens and trace states fit
#: several times.
_MAX_HEAD_BYTES = 64 << 10
#: Maximum number of HTTP connections of one router; gRPC connections are not included.
_MAX_CONNECTIONS = 1 << 14
#: Seconds in which a request line and its headers must arrive.
_HEAD_TIMEOUT_S = 30.0
#: Maximum number of pipelined requests of one connection whose answers are not finished. More would
#: only occupy memory, because the requests are answered one after another.
_MAX_UNANSWERED = 16


class _ConnectionAborted(Exception):
    pass


class Connection(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._refusal: EverliftError | None = None
        #: writers of the unfinished answers and of the latest request, in the requests' order
        self._writers: deque[Writer] = deque()
        #: parsed bytes of the current request line and headers, or of trailers
        self._head_bytes = 0
        #: bytes received since headers or a part of a body were last complete
        self._pending_bytes = 0
        #: whether the connection closes after the next request's answer
        self._closes_after_request = False
        self._set_deadline()
        if len(self.connections) > _MAX_CONNECTIONS:
            self._refuse(
                TooManyConnections(f"this router has at most {_MAX_CONNECTIONS} HTTP connections")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)
        # uvicorn notifies only the latest of several requests that its client is gone, so all of
        # them are notified here.
        for writer in self._writers:
            writer.cycle.disconnected = True
            writer.cycle.message_event.set()

    def close_when_idle(self) -> None:
        """Close the connection after the answers to the requests that it has or is receiving.

        A new connection waits for its first request, which may be on its way: closing the
        connection now would reset it.
        """
        if not self._is_answering and (self.cycle is None or self._pending_bytes):
            self._closes_after_request = True  # the timeout of the request's head still applies
        else:
            self.shutdown()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(_HEAD_TIMEOUT_S, self.transport.close)

    def resume_writing(self) -> None:
        super().resume_writing()
        for writer in self._writers:
            writer.on_writable()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._has_more = False
        try:
            self._parse(data)
        except (HttpParserError, HttpParserUpgrade):  # the latter only for the method CONNECT
            msg = "Invalid HTTP request received."
            self.logger.warning(msg)
            self.send_400_response(msg)
        # The parser buffers an incomplete header without reporting it, so the bytes are counted
        # here.
        self._pending_bytes = 0 if self._has_more else self._pending_bytes + len(data)
        if self._pending_bytes and self._deadline.cancelled() and not self._is_answering:
            self._set_deadline()  # empty lines before a request do not begin a message
        if self._pending_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_head_too_large())

    def _parse(self, data: bytes) -> None:
        """Parse received bytes; requests to switch to another protocol are ignored (RFC 9110, 7.8).

        Java's HttpClient asks for h2c by default, in a request with a body. A parser takes the
        bytes after such a head for the other protocol. Therefore a new parser gets the head without
        its header Upgrade, and the bytes after it.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as upgrade:
                (head_end,) = upgrade.args
            head, self.parser = self._head_without_upgrade(), HttpRequestParser(self)
            # uvicorn's choice: bytes after a request with "Connection: close" are no error
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(head)
            data = data[head_end:]

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        headers = [b"%s: %s" % each for each in self.headers if each[0] != b"upgrade"]
        return b"\r\n".join([b"%s %s HTTP/%s" % (method, self.url, version), *headers, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._deadline.cancel()
        self._set_deadline()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # _parse then parses the head again
        self._has_more = True
        self._deadline.cancel()
        while self._writers and self._writers[0].cycle.response_complete:
            self._writers.popleft()
        if len(self._writers) == _MAX_UNANSWERED:
            # An error that is sent now would be taken for the answer to the oldest of these
            # requests.
            self.transport.abort()
            raise _ConnectionAborted  # the parser then stops
        super().on_headers_complete()
        if self._closes_after_request:
            self.cycle.keep_alive = False
        self._writers.append(Writer(self.cycle))

    def on_body(self, body: bytes) -> None:
        self._has_more = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(self._refusal or MalformedBody("the request is not HTTP/1.1"))

    def _count(self, *parts: bytes) -> None:
        self._head_bytes += sum(map(len, parts))
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refusal = _head_too_large()
            raise self._refusal  # the parser then stops

    def _refuse(self, error: EverliftError) -> None:
        status = HTTPStatus(error.http_status)
        body = encode(errors.described(error, {})).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _head_too_large() -> MetadataTooLarge:
    return MetadataTooLarge(f"the request line and headers are longer than {_MAX_HEAD_BYTES} bytes")
