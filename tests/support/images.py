"""Image files for tests, written without Pillow, which routers lack."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header)


def png(seed: int, width: int = 40, height: int = 30) -> bytes:
    """Return a PNG file; its pixels follow from ``seed``."""
    rows = b"".join(
        b"\0" + bytes((seed * 37 + x * (seed + 3) + y * 5) % 256 for x in range(3 * width))
        for y in range(height)
    )
    return png_header(width, height) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def blank_png(width: int, height: int) -> bytes:
    """Return a small PNG file of many black pixels."""
    rows = zlib.compress(bytes((3 * width + 1) * height), 1)
    return png_header(width, height) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


def png_url(data: bytes) -> str:
    return f"data:image/png;base64,{b64encode(data).decode()}"
