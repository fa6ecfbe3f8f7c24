"""Messages on a gRPC stream, in packets of any size, including malformed ones."""

import gzip
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.errors import EverliftError, InvalidRequest, MessageTooLarge, Unimplemented
from router.api.http2.framing import ENCODINGS, MessageReader, check_encoding, framed

MOST = 4096


def read(data: bytes, encoding: str = "identity", cut: int = 1 << 20) -> list[bytes]:
    reader = MessageReader(MOST, encoding)
    parts = [data[i : i + cut] for i in range(0, len(data), cut)]
    return [message for part in parts for message in reader.feed(part)]


@given(
    st.lists(st.binary(max_size=600), max_size=5),
    st.sampled_from(ENCODINGS),
    st.integers(1, 50),
)
def test_framing_round_trips_messages(messages: list[bytes], encoding: str, cut: int) -> None:
    data = b"".join(framed(message, encoding) for message in messages)
    assert read(data, encoding, cut) == messages


def test_framing_compresses_only_long_messages() -> None:
    assert len(framed(b"x" * 2000, "gzip")) < 100
    assert framed(b"x" * 20, "gzip") == b"\0" + struct.pack(">I", 20) + b"x" * 20


def test_message_reader_accepts_foreign_gzip() -> None:
    body = gzip.compress(b"y" * 3000)
    assert read(b"\1" + struct.pack(">I", len(body)) + body, "gzip") == [b"y" * 3000]


@pytest.mark.parametrize("length", [MOST + 1, (1 << 32) - 1])
def test_message_reader_rejects_an_announced_excess_size(length: int) -> None:
    reader = MessageReader(MOST)
    with pytest.raises(MessageTooLarge):
        reader.feed(b"\0" + struct.pack(">I", length))
    assert reader.num_buffered < 10


def test_message_reader_bounds_a_decompression_bomb() -> None:
    bomb = gzip.compress(bytes(50 << 20))
    reader = MessageReader(len(bomb), "gzip")
    with pytest.raises(MessageTooLarge):
        reader.feed(b"\1" + struct.pack(">I", len(bomb)) + bomb)


@pytest.mark.parametrize(
    ("flag", "encoding", "body"),
    [
        (1, "identity", b"abc"),
        (2, "gzip", b"abc"),
        (255, "gzip", b"abc"),
        (1, "gzip", b"not gzip"),
        (1, "gzip", gzip.compress(b"z" * 500, mtime=0)[:-9]),
        (1, "deflate", zlib.compress(b"z" * 500)[:5]),
        (1, "gzip", b""),
    ],
)
def test_message_reader_rejects_invalid_flags_and_data(
    flag: int, encoding: str, body: bytes
) -> None:
    with pytest.raises(InvalidRequest):
        read(bytes([flag]) + struct.pack(">I", len(body)) + body, encoding)


@given(st.binary(max_size=300), st.sampled_from(ENCODINGS))
def test_message_reader_raises_only_everlift_errors(data: bytes, encoding: str) -> None:
    try:
        read(data, encoding)
    except EverliftError:
        pass


def test_check_encoding_rejects_unknown_encodings() -> None:
    assert check_encoding("gzip") == "gzip"
    with pytest.raises(Unimplemented, match="snappy"):
        check_encoding("snappy")
