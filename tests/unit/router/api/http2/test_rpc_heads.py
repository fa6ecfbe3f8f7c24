"""Headers and trailers of a gRPC call on HTTP/2."""

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


def test_head_has_path_metadata_and_defaults() -> None:
    head = parsed((b"x-request-id", b"r"), (b"user-agent", b"grpc"))
    assert head.path == "/pkg.Service/Method"
    assert head.metadata == (("x-request-id", "r"), ("user-agent", "grpc"))
    assert (head.timeout_s, head.encoding) == (None, "identity")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(b"1H", 3600), (b"2M", 120), (b"3S", 3), (b"250m", 0.25), (b"5u", 5e-6), (b"99999999n", 0.1)],
)
def test_grpc_timeout_is_read_in_every_unit(text: bytes, seconds: float) -> None:
    assert parsed((b"grpc-timeout", text)).timeout_s == pytest.approx(seconds)


@pytest.mark.parametrize("text", [b"", b"5", b"S", b"-1S", b"1.5S", b"123456789S", b"1D", b"1S "])
def test_grpc_timeout_rejects_malformed_values(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="grpc-timeout"):
        parsed((b"grpc-timeout", text))


def test_binary_metadata_is_read_with_or_without_padding() -> None:
    head = parsed((b"a-bin", b"AAE="), (b"b-bin", b"AAE"))
    assert head.metadata == (("a-bin", b"\0\1"), ("b-bin", b"\0\1"))
    for value in (b"!!", b"AAE\xff"):
        with pytest.raises(InvalidRequest, match="a-bin"):
            parsed((b"a-bin", value))


def test_metadata_size_is_limited() -> None:
    parsed(*[(b"k", b"v" * 10)] * 3)
    with pytest.raises(MetadataTooLarge, match="at most 1000"):
        parsed((b"k", b"v" * 1000))
    with pytest.raises(MetadataTooLarge):
        parsed(*[(b"k", b"")] * 40)


def test_grpc_encoding_that_is_unknown_is_rejected() -> None:
    with pytest.raises(Unimplemented):
        parsed((b"grpc-encoding", b"br"))


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [(b":method", b"GET", 405), (b"content-type", b"text/html", 415), (b"content-type", b"", 415)],
)
def test_head_of_a_non_grpc_call_is_rejected_by_status(
    name: bytes, value: bytes, status: int
) -> None:
    headers = [(key, value if key == name else old) for key, old in CALL]
    with pytest.raises(NotGrpc) as error:
        parse(headers, 1000)
    assert error.value.http_status == status


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=8))
def test_head_parser_raises_only_known_errors(headers: Headers) -> None:
    try:
        parse(CALL + headers, 1000)
    except (EverliftError, NotGrpc):
        pass


def test_closing_has_status_message_and_metadata() -> None:
    assert closing(0, "", ()) == [(b"grpc-status", b"0")]
    assert closing(5, "50 % gone: ü\n", (("k", "v"), ("d-bin", b"\0\1"))) == [
        (b"grpc-status", b"5"),
        (b"grpc-message", b"50 %25 gone: %C3%BC%0A"),
        (b"k", b"v"),
        (b"d-bin", b"AAE"),
    ]


def test_opening_has_status_metadata_and_encoding() -> None:
    headers = dict(opening((("x-request-id", "r"),), "gzip"))
    assert headers[b":status"] == b"200"
    assert headers[b"x-request-id"] == b"r"
    assert headers[b"grpc-encoding"] == b"gzip"
    assert b"grpc-encoding" not in dict(opening((), "identity"))
