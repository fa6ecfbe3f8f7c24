"""File as it is stored in the ledger. Pure."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict, dataclass
from typing import Literal, Self

from typing_extensions import TypedDict

from everlift.errors import OutOfRange

#: Maximum size of the part of a file that one object of the ledger holds, before its compression.
CHUNK_BYTES = 1 << 19
#: Head of a chunk of results: the number of bytes of the output file, and whether it is full.
_RESULTS_HEAD = struct.Struct("<Q?")


class FileBody(TypedDict):
    """File in the form of OpenAI's API."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Description of a file; times are in seconds since 1970.

    ``digest`` is the SHA-256 of the content in hexadecimal form, and ``content_id`` the id under
    which the content is stored. Result files have neither: their content is stored with the batch
    ``batch_id``, which is empty for other files. ``sibling`` is the id of the batch's other result
    file.
    """

    filename: str
    purpose: Literal["batch", "batch_output"]
    created_at: int
    expires_at: int
    num_bytes: int = 0
    digest: str = ""
    content_id: str = ""
    batch_id: str = ""
    part: Literal["", "output", "errors"] = ""
    sibling: str = ""

    def body(self, file_id: str) -> FileBody:
        return {
            "id": file_id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        return cls(**json.loads(data))


def pack(data: bytes) -> bytes:
    """Compress a part of a file."""
    return zlib.compress(data, 1)


def unpack(data: bytes) -> bytes:
    """Return the part of a file that ``pack`` compressed."""
    return zlib.decompress(data)


@dataclass(frozen=True, slots=True)
class ResultChunk:
    """Lines of a batch's output file and of its error file that are stored together.

    ``is_full``: no more lines are added, and the next chunk may exist.
    """

    output: bytes = b""
    errors: bytes = b""
    is_full: bool = False

    def __add__(self, other: ResultChunk) -> ResultChunk:
        return ResultChunk(self.output + other.output, self.errors + other.errors)

    @property
    def num_bytes(self) -> int:
        return len(self.output) + len(self.errors)

    def to_bytes(self) -> bytes:
        head = _RESULTS_HEAD.pack(len(self.output), self.is_full)
        return head + pack(self.output + self.errors)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        num_output_bytes, is_full = _RESULTS_HEAD.unpack_from(data)
        both = unpack(data[_RESULTS_HEAD.size :])
        return cls(both[:num_output_bytes], both[num_output_bytes:], is_full)


class LineSplitter:
    """Splitter of content into lines; the content arrives in parts.

    ``max_bytes`` is the maximum length of a line, without its terminator.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def feed(self, part: bytes) -> list[bytes]:
        """Return the lines that end in ``part``, without line terminators. Raises OutOfRange."""
        *lines, last = part.split(b"\n")
        if lines:
            lines[0] = self.rest + lines[0]
            self._pieces, self._num_bytes = [], 0
        self._pieces.append(last)
        self._num_bytes += len(last)
        longest = max(self._num_bytes, *map(len, lines), 0)
        if longest > self._max_bytes:
            raise OutOfRange(f"a line has more than {self._max_bytes} bytes", field="input_file_id")
        return lines

    @property
    def rest(self) -> bytes:
        """Content after the last line terminator."""
        return b"".join(self._pieces)
