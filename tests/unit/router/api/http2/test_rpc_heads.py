"""How a gRPC call begins and ends on HTTP/2."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.errors import EverliftError, InvalidRequest, MetadataTooLarge, Unimplemented
from router.api.http2.heads import Head, Headers, NotGrpc, closing, opening, parse

CALL: Headers = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/pkg.Service/Method"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc+proto"),
]


def parsed(*more: tuple[bytes, bytes], most: int = 1000) -> Head:
    return parse([*CALL, *more], most)


def test_a_plain_call() -> None:
    head = parsed((b"x-request-id", b"r"), (b"user-agent", b"grpc"))
    assert head.path == "/pkg.Service/Method"
    assert head.metadata == (("x-request-id", "r"), ("user-agent", "grpc"))
    assert (head.timeout_s, head.encoding) == (None, "identity")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(b"1H", 3600), (b"2M", 120), (b"3S", 3), (b"250m", 0.25), (b"5u", 5e-6), (b"99999999n", 0.1)],
)
def test_deadlines(text: bytes, seconds: float) -> None:
    assert parsed((b"grpc-timeout", text)).timeout_s == pytest.approx(seconds)


@pytest.mark.parametrize("text", [b"", b"5", b"S", b"-1S", b"1.5S", b"123456789S", b"1D", b"1S "])
def test_what_is_no_deadline(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="grpc-timeout"):
        parsed((b"grpc-timeout", text))


def test_binary_metadata_with_and_without_padding() -> None:
    head = parsed((b"a-bin", b"AAE="), (b"b-bin", b"AAE"))
    assert head.metadata == (("a-bin", b"\0\1"), ("b-bin", b"\0\1"))
    for value in (b"!!", b"AAE\xff"):
        with pytest.raises(InvalidRequest, match="a-bin"):
            parsed((b"a-bin", value))


def test_metadata_of_too_many_bytes() -> None:
    parsed(*[(b"k", b"v" * 10)] * 3)
    with pytest.raises(MetadataTooLarge, match="at most 1000"):
        parsed((b"k", b"v" * 1000))
    with pytest.raises(MetadataTooLarge):
        parsed(*[(b"k", b"")] * 40)


def test_an_encoding_that_is_not_known() -> None:
    with pytest.raises(Unimplemented):
        parsed((b"grpc-encoding", b"br"))


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [(b":method", b"GET", 405), (b"content-type", b"text/html", 415), (b"content-type", b"", 415)],
)
def test_what_is_no_grpc(name: bytes, value: bytes, status: int) -> None:
    headers = [(key, value if key == name else old) for key, old in CALL]
    with pytest.raises(NotGrpc) as error:
        parse(headers, 1000)
    assert error.value.http_status == status


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=8))
def test_no_headers_make_it_fail_in_another_way(headers: Headers) -> None:
    try:
        parse(CALL + headers, 1000)
    except (EverliftError, NotGrpc):
        pass


def test_what_it_ends_with() -> None:
    assert closing(0, "", ()) == [(b"grpc-status", b"0")]
    assert closing(5, "50 % gone: ü\n", (("k", "v"), ("d-bin", b"\0\1"))) == [
        (b"grpc-status", b"5"),
        (b"grpc-message", b"50 %25 gone: %C3%BC%0A"),
        (b"k", b"v"),
        (b"d-bin", b"AAE"),
    ]


def test_what_it_begins_with() -> None:
    headers = dict(opening((("x-request-id", "r"),), "gzip"))
    assert headers[b":status"] == b"200"
    assert headers[b"x-request-id"] == b"r"
    assert headers[b"grpc-encoding"] == b"gzip"
    assert b"grpc-encoding" not in dict(opening((), "identity"))
