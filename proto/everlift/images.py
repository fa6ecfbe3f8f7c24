"""Images of a prompt: recognised by their first bytes, but not decoded. Pure."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from everlift.errors import InvalidRequest, OutOfRange

#: Maximum number of images of a request, whatever the settings.
MAX_IMAGES = 16
#: Maximum number of pixels of an image, which takes 3 bytes per pixel when it is decoded, and of
#: all images of a request.
MAX_PIXELS, MAX_PIXELS_OF_REQUEST = 1 << 25, 1 << 26
#: Maximum width and height of an image. Models' processors take seconds for much longer ones.
MAX_SIDE = 1 << 14

_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_GIFS = (b"GIF87a", b"GIF89a")
#: Markers of the frame header of a JPEG file: SOF0 to SOF15 without DHT, JPG and DAC.
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: Begin of a scan in a JPEG file, and the maximum number of scans. Each scan may take as long as a
#: whole image, and usual files have ten.
_SCAN, _MAX_SCANS = b"\xff\xda", 100
#: Marker of a JPEG file with the fill bytes before it. Possessive, because a match that backtracks
#: through megabytes of fill bytes takes long.
_MARKER = re.compile(rb"\xff++([^\xff])")
#: Maximum number of markers before the frame header. Files with large profiles have hundreds.
_MAX_MARKERS = 4096
#: Markers of a JPEG file without a length: TEM, RST0 to RST7, SOI and EOI.
_BARE_MARKERS = frozenset({0x01, *range(0xD0, 0xDA)})


@dataclass(frozen=True, slots=True)
class Image:
    """Image file of a prompt; ``digest`` is its SHA-256."""

    digest: bytes
    data: bytes = field(compare=False, repr=False)

    @classmethod
    def checked(cls, data: bytes, name: str) -> Self:
        """Return an image whose format and size are valid; ``name`` is its field's name in errors.

        Raises InvalidRequest if ``data`` is no PNG, JPEG, WebP or GIF file, or its header is
        invalid or gives no pixels. Raises OutOfRange for too long a side, or for so many pixels or
        scans that decoding would take too long. The rest of the file may still be invalid.
        """
        width, height = _size(data, name)
        if width < 1 or height < 1:
            raise InvalidRequest(f"{name}: the image has no pixels", field=name)
        if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
            raise OutOfRange(
                f"{name}: the image has {width} x {height} pixels; at most {MAX_PIXELS} pixels "
                f"and a side of {MAX_SIDE} are allowed",
                field=name,
            )
        if data.startswith(_JPEG) and data.count(_SCAN) > _MAX_SCANS:
            raise OutOfRange(
                f"{name}: the image has more than {_MAX_SCANS} scans; save it with fewer",
                field=name,
            )
        return cls(hashlib.sha256(data).digest(), data)

    @property
    def num_pixels(self) -> int:
        width, height = _size(self.data, "image")
        return width * height

    @property
    def media_type(self) -> str:
        return _media_type(self.data)


def _media_type(data: bytes) -> str:
    """Return the media type of an image file; empty if the format is unknown."""
    if data.startswith(_PNG):
        return "image/png"
    if data.startswith(_JPEG):
        return "image/jpeg"
    if data.startswith(_GIFS):
        return "image/gif"
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else ""


def _size(data: bytes, name: str) -> tuple[int, int]:
    """Return width and height in pixels.

    Raises InvalidRequest if the format is unknown or the header is invalid or incomplete.
    """
    media_type = _media_type(data)
    if not media_type:
        raise InvalidRequest(
            f"{name}: the image is in no supported format; use PNG, JPEG, WebP or GIF", field=name
        )
    try:
        match media_type:
            case "image/png":
                return _png_size(data)
            case "image/jpeg":
                return _jpeg_size(data)
            case "image/gif":
                return _numbers("<HH", data, 6)
        return _webp_size(data)
    except (struct.error, ValueError):
        raise InvalidRequest(f"{name}: the header of the image is invalid", field=name) from None


def _numbers(form: str, data: bytes, offset: int) -> tuple[int, int]:
    first, second = struct.unpack_from(form, data, offset)
    return first, second


def _png_size(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise ValueError
    return _numbers(">II", data, 16)


def _jpeg_size(data: bytes) -> tuple[int, int]:
    for marker, offset in _jpeg_segments(data):
        if marker in _FRAME_MARKERS:
            height, width = _numbers(">HH", data, offset + 3)
            return width, height
    raise ValueError


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the marker of each segment and the offset of its length field, just after the marker.

    The caller must stop before the compressed data, which has no segments. Raises ValueError or
    struct.error if the start of a segment is invalid or incomplete, or if there are too many.
    """
    offset = 2
    for _ in range(_MAX_MARKERS):
        if (found := _MARKER.match(data, offset)) is None:
            break
        marker, offset = found[1][0], found.end()
        if marker not in _BARE_MARKERS:
            yield marker, offset
            (length,) = struct.unpack_from(">H", data, offset)
            offset += max(2, length)
    raise ValueError


def _webp_size(data: bytes) -> tuple[int, int]:
    match data[12:16]:
        case b"VP8 ":
            if data[23:26] != b"\x9d\x01\x2a":
                raise ValueError
            width, height = _numbers("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
        case b"VP8L":
            if data[20:21] != b"\x2f":
                raise ValueError
            (bits,) = struct.unpack_from("<I", data, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            if len(data) < 30:
                raise ValueError
            width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
            return width, height
    raise ValueError
