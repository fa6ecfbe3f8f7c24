"""Messages between rank 0 and a grammar process.

    request    length, JSON
    reply      length, status, matcher, CPU time, body: masks, JSON, or a refusal's cause in UTF-8

A grammar process says first that it is there, by a reply of its own; then each request but ``drop``
has one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<?Id")
#: Read at once.
CHUNK = 1 << 18

Request = dict[str, Any]


class Reply(NamedTuple):
    """Reply with a ``body``, which is a cause if ``is_refusal``; ``cpu_s`` is the CPU time."""

    is_refusal: bool
    matcher: int
    body: bytes
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Compiled:
    """The body of the reply to ``compile``: what the grammar takes, and the model's end tokens."""

    num_bytes: int
    eos_token_ids: tuple[int, ...]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> Compiled:
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
    """Cuts what a socket brings into frames."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the frames that are whole now.

        Raises EOFError where nothing was received: the end.
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
