"""gRPC's message framing: a compression flag, the length, and the message. Pure.

Decompression stops at the maximum size of a message.
"""

from __future__ import annotations

import struct
import zlib

from everlift.errors import InvalidRequest, MessageTooLarge, Unimplemented

_HEAD = struct.Struct(">BI")
IDENTITY = "identity"
#: zlib's ``wbits`` by encoding: 31 stands for gzip's header, 15 for zlib's.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
ENCODINGS = (IDENTITY, *_WINDOW_BITS)
#: Shorter messages are not compressed, because compression would lengthen them.
_WORTHWHILE_BYTES = 256


def check_encoding(name: str) -> str:
    """Return ``name`` if this encoding is supported. Raises Unimplemented if it is not."""
    if name not in ENCODINGS:
        raise Unimplemented(
            f"grpc-encoding {name[:32]!r} is unknown; supported: {', '.join(ENCODINGS)}"
        )
    return name


def framed(message: bytes, encoding: str = IDENTITY) -> bytes:
    """Return the message with its gRPC prefix, compressed by ``encoding`` unless it is short."""
    if encoding == IDENTITY or len(message) < _WORTHWHILE_BYTES:
        return _HEAD.pack(0, len(message)) + message
    compressor = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS[encoding])
    compressed = compressor.compress(message) + compressor.flush()
    return _HEAD.pack(1, len(compressed)) + compressed


class MessageReader:
    """Incremental parser of framed messages."""

    def __init__(self, max_bytes: int, encoding: str = IDENTITY) -> None:
        self._max_bytes = max_bytes
        self._encoding = encoding
        self._buffer = bytearray()

    @property
    def num_buffered(self) -> int:
        """Number of buffered bytes of an incomplete message."""
        return len(self._buffer)

    def drop(self) -> None:
        """Drop the buffered bytes; ``feed`` must not be called afterwards."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that ``data`` completes, without their framing and decompressed.

        The list is empty if no message is complete. Raises MessageTooLarge if a message exceeds the
        limit, and InvalidRequest for invalid compression. No data can be parsed after an error.
        """
        buffer = self._buffer
        buffer += data
        messages = []
        start = 0
        while len(buffer) - start >= _HEAD.size:
            flag, length = _HEAD.unpack_from(buffer, start)
            if length > self._max_bytes:
                raise self._too_large(length)
            end = start + _HEAD.size + length
            if len(buffer) < end:
                break
            messages.append(self._message(flag, bytes(buffer[start + _HEAD.size : end])))
            start = end
        del buffer[:start]
        return messages

    def _message(self, flag: int, data: bytes) -> bytes:
        if flag == 0:
            return data
        if flag != 1 or self._encoding == IDENTITY:
            raise InvalidRequest(
                f"a message has the compression flag {flag}, but its call has the grpc-encoding "
                f"{self._encoding}"
            )
        inflater = zlib.decompressobj(_WINDOW_BITS[self._encoding])
        try:
            message = inflater.decompress(data, self._max_bytes + 1)
        except zlib.error:
            raise InvalidRequest(f"a message is not valid {self._encoding} data") from None
        if len(message) > self._max_bytes:
            raise self._too_large(len(message))
        if not inflater.eof:
            raise InvalidRequest(f"the {self._encoding} data of a message is truncated")
        return message

    def _too_large(self, length: int) -> MessageTooLarge:
        return MessageTooLarge(
            f"a message has at least {length} bytes; the limit is {self._max_bytes} "
            "(router.max_message_bytes)"
        )
