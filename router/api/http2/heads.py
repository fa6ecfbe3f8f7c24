"""HTTP/2 headers and trailers of gRPC calls. Pure."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from hpack import Decoder, HeaderTuple

from everlift.errors import InvalidRequest, MetadataTooLarge
from router.api.http2.framing import ENCODINGS, IDENTITY, check_encoding

Metadata = Sequence[tuple[str, str | bytes]]
Headers = list[tuple[bytes, bytes]]

_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
#: Headers of HTTP and gRPC, which are not part of the caller's metadata.
_OWN = frozenset({"te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"})
#: Maximum number of header blocks that a connection caches. A block refers to at most 126 different
#: entries, and a call has about ten headers.
_MOST_KNOWN = 64
#: Number of bytes that HTTP/2 counts for each header in addition to its name and value.
_OVERHEAD = 32
_CONTENT_TYPE = b"application/grpc"
_OPENING: Headers = [
    (b":status", b"200"),
    (b"content-type", _CONTENT_TYPE),
    (b"grpc-accept-encoding", ",".join(ENCODINGS).encode()),
]


class NotGrpc(Exception):
    """Raised if a request is not gRPC; ``http_status`` is the status of the HTTP response."""

    def __init__(self, http_status: int) -> None:
        super().__init__(str(http_status))
        self.http_status = http_status


@dataclass(frozen=True, slots=True)
class Head:
    """Parsed headers of a call; ``timeout_s`` is None without a deadline."""

    path: str
    metadata: Metadata
    timeout_s: float | None
    encoding: str


class KnownBlocks(Decoder):
    """HPACK decoder with a cache of header blocks that only refer to entries of HPACK's tables.

    Such a block stands for the same headers until the dynamic table changes. Nearly all blocks that
    grpcio sends are of this kind, and decoding one costs more than parsing the call's message.
    """

    def __init__(self, max_header_list_size: int) -> None:
        super().__init__(max_header_list_size)
        self._known: dict[bytes, list[HeaderTuple]] = {}

    def decode(self, data: bytes, raw: bool = False) -> Iterable[HeaderTuple]:
        """Decode a header block. Raises HPACKError if it is invalid."""
        if (known := self._known.get(data)) is not None:
            return known
        headers = list(super().decode(data, raw))
        if not _changes_nothing(data):
            self._known.clear()
        elif len(self._known) < _MOST_KNOWN:
            self._known[bytes(data)] = headers
        return headers


def _changes_nothing(block: bytes) -> bool:
    """Return whether decoding the header block leaves HPACK's dynamic table unchanged.

    True if the block has only one-byte indexed fields (RFC 7541, section 6.1).
    """
    return all(0x80 < byte < 0xFF for byte in block)


def parse(headers: Iterable[tuple[bytes, bytes]], max_metadata_bytes: int) -> Head:
    """Parse the headers of a call.

    Raises NotGrpc for another HTTP method or content type, InvalidRequest for a malformed header,
    MetadataTooLarge if the headers have more than ``max_metadata_bytes``, and Unimplemented for an
    unknown compression.
    """
    pseudo: dict[str, str] = {}
    own = {"grpc-encoding": IDENTITY}
    metadata: list[tuple[str, str | bytes]] = []
    num_bytes = 0
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name.startswith(":"):
            pseudo[name] = value
            continue
        num_bytes += len(name) + len(value) + _OVERHEAD
        if name in _OWN:
            own[name] = value
        elif num_bytes <= max_metadata_bytes:
            metadata.append((name, _binary(name, value) if name.endswith("-bin") else value))
    if pseudo.get(":method") != "POST":
        raise NotGrpc(405)
    if not own.get("content-type", "").startswith(_CONTENT_TYPE.decode()):
        raise NotGrpc(415)
    if num_bytes > max_metadata_bytes:
        raise MetadataTooLarge(
            f"the metadata has {num_bytes} bytes; at most {max_metadata_bytes} are allowed"
        )
    return Head(
        pseudo.get(":path", ""),
        tuple(metadata),
        _timeout(own.get("grpc-timeout")),
        check_encoding(own["grpc-encoding"]),
    )


def _binary(name: str, value: str) -> bytes:
    try:
        return b64decode(value + "=" * (-len(value) % 4), validate=True)
    except ValueError:  # includes binascii.Error, and the error for non-ASCII text
        raise InvalidRequest(f"metadata {name[:64]!r} is not base64") from None


def _timeout(value: str | None) -> float | None:
    if value is None:
        return None
    if (found := _TIMEOUT.fullmatch(value)) is None:
        raise InvalidRequest("grpc-timeout must be 1 to 8 digits and a unit (H, M, S, m, u or n)")
    return int(found[1]) * _UNITS[found[2]]


def opening(metadata: Metadata, encoding: str) -> Headers:
    """Return the response headers, which precede the first answer, with the initial metadata."""
    headers = [*_OPENING, *_written(metadata)]
    if encoding != IDENTITY:
        headers.append((b"grpc-encoding", encoding.encode()))
    return headers


def closing(code: int, details: str, metadata: Metadata) -> Headers:
    """Return the trailers after the last answer: gRPC status code, details and metadata."""
    headers = [(b"grpc-status", b"%d" % code)]
    if details:
        headers.append((b"grpc-message", quote(details, safe=_READABLE).encode()))
    return [*headers, *_written(metadata)]


#: Characters that grpc-message does not percent-encode: printable ASCII except the percent sign.
_READABLE = "".join(chr(c) for c in range(0x20, 0x7F) if c != 0x25)


def _written(metadata: Metadata) -> Headers:
    return [
        (
            name.encode(),
            b64encode(value).rstrip(b"=") if isinstance(value, bytes) else value.encode("latin-1"),
        )
        for name, value in metadata
    ]
