"""Malformed messages over gRPC and HTTP, and checks of the router's answers to them.

Each message is sent on its own connection. The router answers a complete message or closes the
connection. After a truncated or randomly changed message, the client half-closes the connection.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import hpack
from hyperframe.exceptions import HyperframeError
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame, RstStreamFrame

from everlift.v1 import inference_pb2 as pb
from tests.fuzz.mutation import case, parts_reshaped
from tests.fuzz.native import ADMIN, INFERENCE, PREFACE, Frames, frames_reshaped, http2_seeds
from tests.fuzz.web import ODD_LINES, REQUESTS, request

#: Limit of the time until a message is answered and the connection closed.
_TIMEOUT_S = 30.0
_GENERATE = f"{INFERENCE}Generate"
_ASKED = pb.GenerateRequest(text="a", max_tokens=1)
_HEADERS, _CONTINUATION, _END_STREAM, _END_HEADERS = 1, 9, 1, 4
_SETTINGS = bytes(Frames().frame(4, 0, 0).data)
#: Largest payload of a frame that the server accepts, in bytes.
_MOST = 1 << 14


@dataclass(frozen=True)
class Malformed:
    """Malformed message. After a complete one (``is_whole``) the router needs no further data."""

    kind: str
    data: bytes
    is_whole: bool


# gRPC


def _grpc(frames: Frames) -> bytes:
    """Return a connection's bytes; after the final GOAWAY the server answers and closes."""
    return PREFACE + _SETTINGS + bytes(frames.data) + GoAwayFrame(0).serialize()


def _head(**fields: str) -> bytes:
    return _grpc(Frames().call(_GENERATE, _ASKED, **fields))


def _payload(payload: bytes) -> bytes:
    return _grpc(Frames().head(_GENERATE).frame(0, _END_STREAM, 1, payload))


def _block(block: bytes) -> bytes:
    """Return a call without a message, whose header block is ``block``."""
    frames = Frames().frame(_HEADERS, _END_STREAM, 1, block[:_MOST])
    for at in range(_MOST, len(block), _MOST):
        frames.frame(_CONTINUATION, 0, 1, block[at : at + _MOST])
    return _grpc(frames.frame(_CONTINUATION, _END_HEADERS, 1))


def _encoded(*fields: tuple[str, str]) -> bytes:
    # The library takes seconds for the Huffman coding of a long header.
    return hpack.Encoder().encode(fields, huffman=False)


_PSEUDO = ((":method", "POST"), (":scheme", "http"), (":path", _GENERATE), (":authority", "a"))
_CALL = (*_PSEUDO, ("content-type", "application/grpc"), ("te", "trailers"))

GRPC: dict[str, Callable[[Random], bytes]] = {
    "no preface": lambda rng: rng.randbytes(rng.randrange(24, 200)),
    "a message of noise": lambda rng: _payload(b"\0\0\0\0\x20" + b"\xff" + rng.randbytes(31)),
    "a length beyond all": lambda rng: _payload(struct.pack(">BI", 0, 2**32 - 1)),
    "an unknown flag": lambda rng: _payload(struct.pack(">BI", rng.randrange(1, 256), 0)),
    "no message": lambda rng: _payload(b""),
    "half a message": lambda rng: _payload(struct.pack(">BI", 0, 100) + bytes(50)),
    "no UTF-8": lambda rng: _payload(b"\0\0\0\0\4\x12\2\xff\xfe"),
    "an empty prompt": lambda rng: _payload(b"\0\0\0\0\0"),
    "no such method": lambda rng: _grpc(Frames().call(f"/a.B/{rng.random()}", _ASKED)),
    "a GET": lambda rng: _head(**{":method": "GET"}),
    "another content": lambda rng: _head(content_type="application/json"),
    "a deadline that is none": lambda rng: _head(grpc_timeout=f"{rng.random()}S"),
    "an encoding that is none": lambda rng: _head(grpc_encoding="br"),
    "metadata that is no base64": lambda rng: _head(x_bin="\xff"),
    "metadata of 20 KiB": lambda rng: _block(_encoded(*_CALL, ("x", "x" * 20_000))),
    "a head of 200 KiB": lambda rng: _block(_encoded(*_CALL, ("x", "x" * 200_000))),
    "HPACK of noise": lambda rng: _block(b"\xff" + rng.randbytes(40)),
    "HPACK beyond its table": lambda rng: _block(bytes((0x80 | rng.randrange(70, 126),))),
    "no path": lambda rng: _block(_encoded(*_PSEUDO[:2])),
    "a pseudo-header twice": lambda rng: _block(_encoded(*_PSEUDO, (":path", "/"), *_CALL[4:])),
    "a pseudo-header behind others": lambda rng: _block(_encoded(*_CALL[4:], *_PSEUDO)),
    "an unknown pseudo-header": lambda rng: _block(_encoded((":odd", "a"), *_CALL)),
    "capital letters": lambda rng: _block(_encoded(*_CALL, ("X-Odd", "a"))),
    "a header of HTTP/1": lambda rng: _block(_encoded(*_CALL, ("connection", "close"))),
    "a stream of the server's": lambda rng: _grpc(
        Frames().frame(_HEADERS, 5, 2 * rng.randrange(1, 99), _encoded(*_CALL))
    ),
    "data without a stream": lambda rng: _grpc(Frames().frame(0, 0, rng.choice((0, 1, 7)))),
    "settings of a wrong size": lambda rng: _grpc(Frames().frame(4, 0, 0, rng.randbytes(5))),
    "a window of nothing": lambda rng: _grpc(Frames().frame(8, 0, 0, bytes(4))),
    "a window beyond all": lambda rng: _grpc(Frames().frame(8, 0, 0, b"\x7f\xff\xff\xff")),
    "a frame beyond all": lambda rng: PREFACE + b"\xff\xff\xff\0\0\0\0\0\1" + bytes(100),
    "continuation of nothing": lambda rng: _grpc(Frames().frame(_CONTINUATION, 4, 1, b"a")),
    "a reset of nothing": lambda rng: _grpc(Frames().frame(3, 0, 7, bytes(4))),
    "padding beyond the frame": lambda rng: _grpc(Frames().frame(0, 8, 1, b"\xff")),
    "a push": lambda rng: _grpc(Frames().frame(5, 4, 1, bytes(4) + b"\x82")),
}
_GRPC_SEEDS = tuple(http2_seeds(without=ADMIN))


# HTTP

_CLOSE = "connection: close\r\n"
_BODY = b'{"prompt": "a", "max_tokens": 1}'
_COMPLETIONS = "/v1/completions"


def _posted(content: bytes, more: str = "", path: str = _COMPLETIONS) -> bytes:
    return request(path, content, _CLOSE + more)


def _lines(*lines: bytes) -> bytes:
    head = (b"POST /v1/completions HTTP/1.1", b"host: a", b"connection: close")
    return b"\r\n".join((*head, *lines, b"", b""))


_CHUNKED = b"transfer-encoding: chunked"

HTTP: dict[str, Callable[[Random], bytes]] = {
    "noise": lambda rng: b"\xff" + rng.randbytes(rng.randrange(20, 200)) + b"\r\n\r\n",
    "TLS": lambda rng: b"\x16\x03\x01" + rng.randbytes(100) + b"\r\n\r\n",
    "HTTP/2": lambda rng: PREFACE,
    "HTTP/9": lambda rng: b"GET /health HTTP/9.9\r\n\r\n",
    "no such method": lambda rng: b"BREW /health HTTP/1.1\r\nhost: a\r\n\r\n",
    "another method": lambda rng: request(_COMPLETIONS, b"", _CLOSE, "DELETE"),
    "no such path": lambda rng: _posted(_BODY, path=f"/{rng.random()}"),
    "a path that is none": lambda rng: b"GET \xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n",
    "an address that is none": lambda rng: b"GET http://[ HTTP/1.1\r\nhost: a\r\n\r\n",
    "a header without a name": lambda rng: _lines(b": a"),
    "NUL in a header": lambda rng: _lines(b"a: \0b"),
    "a head of 100 KiB": lambda rng: _lines(b"a: " + b"b" * 100_000)[:-2],
    "two lengths": lambda rng: _lines(b"content-length: 2", b"content-length: 3") + b"{}{}",
    "a length and chunks": lambda rng: _lines(b"content-length: 2", _CHUNKED) + b"0\r\n\r\n{}",
    "chunks behind another coding": lambda rng: (
        _lines(_CHUNKED, b"transfer-encoding: gzip") + _BODY
    ),
    "a length below 0": lambda rng: _lines(b"content-length: -1"),
    "a length beyond all": lambda rng: _lines(b"content-length: " + b"9" * 30),
    "a body beyond all": lambda rng: _lines(b"content-length: 9999999999"),
    "a chunk that is none": lambda rng: _lines(_CHUNKED) + b"xyz\r\n" + _BODY,
    "a chunk beyond all": lambda rng: _lines(_CHUNKED) + b"f" * 30 + b"\r\n" + _BODY,
    "another content": lambda rng: _posted(_BODY, "content-encoding: gzip\r\n"),
    "no JSON": lambda rng: _posted(b'{"prompt": ' + rng.randbytes(20).hex().encode()),
    "no UTF-8": lambda rng: _posted(b'{"prompt": "\xff\xfe"}'),
    "half a character": lambda rng: _posted(b'{"prompt": "\\ud800"}'),
    "nested without end": lambda rng: _posted(b"[" * rng.randrange(200, 20_000)),
    "a number beyond all": lambda rng: _posted(b'{"prompt": "a", "seed": %s}' % (b"9" * 400)),
    "NaN": lambda rng: _posted(b'{"prompt": "a", "temperature": NaN}'),
    "a list": lambda rng: _posted(b"[]"),
    "nothing": lambda rng: _posted(b""),
    "an unknown field": lambda rng: _posted(b'{"prompt": "a", "%d": 1}' % rng.randrange(99)),
    "another type": lambda rng: _posted(b'{"prompt": {"a": [1]}}'),
    "a token beyond all": lambda rng: _posted(b'{"prompt": [4294967296]}'),
    "an event that is none": lambda rng: _posted(_BODY, "last-event-id: a/b\r\n"),
}


def messages(seed: int, count: int, *, grpc: bool) -> Iterator[Malformed]:
    """Yield ``count`` messages: in turn one of the kinds, and a valid one with random changes."""
    kinds = list((GRPC if grpc else HTTP).items())
    reshape = frames_reshaped if grpc else parts_reshaped(b"\r\n", ODD_LINES)
    for number in range(count):
        rng = Random(f"{seed}/{grpc}/{number}")
        if number % 2:
            data = case(rng, _GRPC_SEEDS if grpc else REQUESTS, reshape)
            yield Malformed("changed", PREFACE * grpc + data, is_whole=False)
        else:
            kind, make = kinds[number // 2 % len(kinds)]
            data = make(rng)
            if rng.randrange(8) == 0:
                cut = rng.randrange(len(data))
                yield Malformed(f"{kind}, broken off", data[:cut], is_whole=False)
            else:
                yield Malformed(kind, data, is_whole=True)


async def answer(address: str, message: Malformed) -> bytes:
    """Send a message, and return the answer up to the end of the connection.

    Raises TimeoutError if the server does not close the connection.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    said = bytearray()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            # The server may close the connection before it has read the whole message.
            with suppress(ConnectionError):
                writer.write(message.data)
                await writer.drain()
                if not message.is_whole:
                    writer.write_eof()
                while data := await reader.read(1 << 16):
                    said += data
    finally:
        writer.transport.abort()
    return bytes(said)


def check_http(message: Malformed, said: bytes) -> None:
    """Check that a complete message got an error, if any answer, and no message got a 500."""
    statuses = [int(part[:3]) for part in said.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()]
    assert 500 not in statuses, (message, said)
    if message.is_whole:
        assert not statuses or statuses[0] >= 400, (message, said)


def check_grpc(message: Malformed, said: bytes) -> None:
    statuses = list(_grpc_statuses(said))
    assert "13" not in statuses and "2" not in statuses, (message, said)
    if message.is_whole:
        assert "0" not in statuses, (message, said)


def _grpc_statuses(said: bytes) -> Iterator[str]:
    """Yield the gRPC status of each answer, or ``http`` and its HTTP status, or ``reset``."""
    decoder, view = hpack.Decoder(), memoryview(said)
    while len(view) >= 9:
        try:
            frame, length = Frame.parse_frame_header(view[:9])
            frame.parse_body(view[9 : 9 + length])
        except HyperframeError:
            return
        view = view[9 + length :]
        if isinstance(frame, HeadersFrame):
            fields = dict(decoder.decode(frame.data))
            yield str(fields.get("grpc-status", f"http {fields.get(':status')}"))
        elif isinstance(frame, RstStreamFrame):
            yield "reset"
