"""uvicorn's HTTP/1.1, with bounds on what comes before a body, and its refusals in our form."""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from everlift.errors import EverliftError, MalformedBody, MetadataTooLarge
from router.gateway.http import errors
from router.gateway.http.endpoint import encode

#: Of a request line and its headers; a session's token or a trace's state fits several times.
_MAX_HEAD_BYTES = 64 << 10
#: In which they have to come.
_HEAD_TIMEOUT_S = 30.0


class Connection(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._is_in_head = True
        self._deadline = self.loop.call_later(_HEAD_TIMEOUT_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse(
                    MetadataTooLarge(f"the headers are longer than {_MAX_HEAD_BYTES} bytes")
                )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._deadline.cancel()
        self._deadline = self.loop.call_later(_HEAD_TIMEOUT_S, self.transport.close)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._deadline.cancel()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        # Behind the last chunk, which has no body, fields may follow, as before a body.
        self._is_in_head, self._head_bytes = True, 0

    def on_body(self, body: bytes) -> None:
        self._is_in_head = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(MalformedBody("this is not HTTP/1.1"))

    def _refuse(self, error: EverliftError) -> None:
        status = HTTPStatus(error.http_status)
        body = encode(errors.described(error, {})).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
