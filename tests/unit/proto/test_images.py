"""Images: formats and sizes, read from the first bytes of files."""

from __future__ import annotations

import hashlib
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.errors import InvalidRequest, OutOfRange
from everlift.images import MAX_PIXELS, MAX_SIDE, Image, _size
from tests.support.images import png, png_header

#: APP0 segment of a JPEG file, and a frame header of 30 rows and 40 columns.
_APP0 = b"\xff\xe0\x00\x10JFIF\0" + bytes(9)


def jpeg(marker: int = 0xC0) -> bytes:
    frame = bytes([0xFF, marker]) + struct.pack(">HBHH", 17, 8, 30, 40) + bytes(10)
    return b"\xff\xd8" + _APP0 + b"\xff" + frame


def webp(kind: bytes, data: bytes) -> bytes:
    return b"RIFF" + bytes(4) + b"WEBP" + kind + struct.pack("<I", len(data)) + data


FILES = {
    "image/png": [png_header(40, 30), png(1)],
    "image/jpeg": [jpeg(), jpeg(0xC2)],
    "image/gif": [b"GIF89a" + struct.pack("<HH", 40, 30), b"GIF87a" + struct.pack("<HH", 40, 30)],
    "image/webp": [
        webp(b"VP8 ", bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", 40, 30)),
        webp(b"VP8L", b"\x2f" + struct.pack("<I", 39 | 29 << 14)),
        webp(b"VP8X", bytes(4) + (39).to_bytes(3, "little") + (29).to_bytes(3, "little")),
    ],
}
ALL = [(media_type, data) for media_type, files in FILES.items() for data in files]


@pytest.mark.parametrize(("media_type", "data"), ALL)
def test_image_has_type_size_and_digest(media_type: str, data: bytes) -> None:
    assert _size(data, "image") == (40, 30)
    image = Image.checked(data, "image")
    assert image.media_type == media_type
    assert image.digest == hashlib.sha256(data).digest()


@pytest.mark.parametrize(("media_type", "data"), ALL)
def test_image_cut_anywhere_is_refused_or_read(media_type: str, data: bytes) -> None:
    for length in range(len(data)):
        try:
            assert _size(data[:length], "image") == (40, 30)
        except InvalidRequest as error:
            assert error.field == "image"


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "no supported format"),
        (b"<svg/>", "no supported format"),
        (b"BM" + bytes(60), "no supported format"),
        (png(1)[:20], "header of the image is invalid"),
        (jpeg()[:24], "header of the image is invalid"),
        (b"\xff\xd8\xff" + bytes(40), "header of the image is invalid"),
        (webp(b"VP8 ", bytes(20)), "header of the image is invalid"),
        (webp(b"VP9 ", bytes(20)), "header of the image is invalid"),
        (png_header(0, 30), "no pixels"),
    ],
)
def test_invalid_image_is_refused(data: bytes, cause: str) -> None:
    with pytest.raises(InvalidRequest, match=cause) as caught:
        Image.checked(data, "messages[0]")
    assert caught.value.field == "messages[0]"


@pytest.mark.parametrize(
    ("width", "height"), [(50_000, 50_000), (5793, 5793), (MAX_SIDE + 1, 1), (1, 2**31)]
)
def test_image_of_too_many_pixels_is_refused(width: int, height: int) -> None:
    with pytest.raises(OutOfRange, match=f"{width} x {height} pixels"):
        Image.checked(png_header(width, height), "image")


def test_image_of_the_maximum_size_is_accepted() -> None:
    for width, height in ((MAX_SIDE, 1), (MAX_SIDE, MAX_PIXELS // MAX_SIDE)):
        image = Image.checked(png_header(width, height), "image")
        assert image.num_pixels == width * height


def test_jpeg_of_many_scans_is_refused() -> None:
    scan = b"\xff\xda" + bytes(10)
    assert Image.checked(jpeg() + 100 * scan, "image")
    with pytest.raises(OutOfRange, match="more than 100 scans"):
        Image.checked(jpeg() + 101 * scan, "image")


def test_jpeg_fill_bytes_take_no_time() -> None:
    data = b"\xff\xd8" + b"\xff" * (4 << 20)
    began = time.thread_time()
    assert Image.checked(data + jpeg()[2:], "image").num_pixels == 1200
    with pytest.raises(InvalidRequest, match="header of the image is invalid"):
        Image.checked(data, "image")
    # One step per fill byte would take seconds; the hash of the file takes 10 ms.
    assert time.thread_time() - began < 0.5


def test_jpeg_of_many_markers_is_refused() -> None:
    for marker in (b"\xff\x01", b"\xff\xe0\0\2"):
        assert Image.checked(b"\xff\xd8" + 4000 * marker + jpeg()[2:], "image")
        with pytest.raises(InvalidRequest, match="header of the image is invalid"):
            Image.checked(b"\xff\xd8" + 5000 * marker + jpeg()[2:], "image")


@given(st.sampled_from([data for _, data in ALL]), st.integers(0, 40), st.binary(max_size=40))
def test_damaged_image_is_refused_or_read(data: bytes, at: int, damage: bytes) -> None:
    try:
        image = Image.checked(data[:at] + damage + data[at + len(damage) :], "image")
    except InvalidRequest as error:
        assert error.field == "image"
    else:
        assert 0 < image.num_pixels <= MAX_PIXELS and image.media_type in FILES


def test_images_are_equal_by_digest() -> None:
    first, second = Image.checked(png(1), "a"), Image.checked(png(1), "b")
    assert first == second != Image.checked(png(2), "a")
    assert "data" not in repr(first)
