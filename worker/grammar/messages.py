"""Messages between rank 0 and a grammar process.

    request    length, JSON
    reply      length, status, matcher, CPU time, body: masks, JSON, or a refusal's cause in UTF-8

A new grammar process first sends one reply without a request, to report that it is running. After
that, each request except ``drop`` has one reply.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<?Id")
#: Maximum number of bytes of one read from a socket.
CHUNK = 1 << 18

Request = dict[str, Any]


class Reply(NamedTuple):
    """Reply to a request about ``matcher``, which took the CPU time ``cpu_s`` in seconds.

    ``body`` is the result, or with ``is_refusal`` the cause in UTF-8.
    """

    is_refusal: bool
    matcher: int
    body: bytes
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CompileResult:
    """Result of ``compile``, which ``encode`` converts to a Reply's body and ``decode`` parses.

    The compiled grammar itself stays in its process; ``num_bytes`` is the memory that it takes
    there. ``eos_token_ids`` are the model's own end tokens.
    """

    num_bytes: int
    eos_token_ids: tuple[int, ...]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> CompileResult:
        fields = json.loads(body)
        return cls(fields["num_bytes"], tuple(fields["eos_token_ids"]))


def encode_request(request: Request) -> bytes:
    return _framed(json.dumps(request, separators=(",", ":")).encode())


def decode_request(frame: bytes) -> Request:
    request: Request = json.loads(frame)
    return request


def encode_reply(reply: Reply) -> bytes:
    return _framed(_HEAD.pack(reply.is_refusal, reply.matcher, reply.cpu_s) + reply.body)


def decode_reply(frame: bytes) -> Reply:
    is_refusal, matcher, cpu_s = _HEAD.unpack_from(frame)
    return Reply(is_refusal, matcher, frame[_HEAD.size :], cpu_s)


def _framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Splitter of the byte stream of a socket into frames, one per request or reply."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the frames that are complete once ``received`` has been appended to earlier bytes.

        Raises EOFError if ``received`` is empty, which means the end of the stream.
        """
        if not received:
            raise EOFError
        self._unread += received
        while (frame := self._cut()) is not None:
            yield frame

    def _cut(self) -> bytes | None:
        if len(self._unread) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
        if len(self._unread) < end:
            return None
        frame = bytes(self._unread[_LENGTH.size : end])
        del self._unread[:end]
        return frame
