"""Upload of a file: a body of the media type multipart/form-data."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import Message

from everlift.errors import (
    BodyTooSlow,
    InvalidRequest,
    MalformedBody,
    MessageTooLarge,
    UnsupportedMediaType,
)
from router.api.http.endpoint import Call
from router.api.openai.batches.fields import MAX_EXPIRY_S, MIN_EXPIRY_S
from router.api.openai.files.record import CHUNK_BYTES
from router.event_loop import now

# It warns of each malformed form.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

_MEDIA_TYPE = "multipart/form-data"
_EXPIRY = re.compile(r"[0-9]{1,9}")
_NAMES = ("expires_after[anchor]", "expires_after[seconds]", "file", "purpose")
_MAX_NAME = 255
#: Bytes of a body beside the content of its file.
_OVERHEAD_BYTES = 1 << 16
#: A body must arrive within this many seconds, and a second more for each _MIN_BYTES_PER_S.
_BODY_TIMEOUT_S = 60.0
_MIN_BYTES_PER_S = 1 << 16


@dataclass(frozen=True, slots=True)
class Upload:
    """Fields of an upload; ``expires_s`` is None if the client sets no expiry."""

    filename: str
    expires_s: int | None
    file: UploadFile

    @property
    def num_bytes(self) -> int:
        return self.file.size or 0

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the content in parts of at most CHUNK_BYTES."""
        while part := await self.file.read(CHUNK_BYTES):
            yield part


@asynccontextmanager
async def received(call: Call, max_bytes: int) -> AsyncIterator[Upload]:
    """Context manager: read the body of a call, and yield its fields.

    A file of more than 1 MiB is kept in a temporary file. Raises InvalidRequest if the body is not
    a valid form, has invalid fields, arrives too slowly, or exceeds ``max_bytes`` + 64 KiB.
    """
    call.check_encoding()
    media_type, options = parse_options_header(call.headers.get("content-type", ""))
    if media_type.lower() != _MEDIA_TYPE.encode():
        raise UnsupportedMediaType(f"the body must be {_MEDIA_TYPE}")
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
        # Some of Python's character sets take quadratic time.
        raise UnsupportedMediaType(f"the charset of {_MEDIA_TYPE} must be utf-8")
    request = Request(call.request.scope, _LimitedReceive(call.request, max_bytes))
    try:
        parser = _Parser(request.headers, request.stream(), max_files=1, max_fields=len(_NAMES))
        form = await parser.parse()
    except (MultiPartException, FormParserError) as error:
        raise MalformedBody(f"the body is not a valid form: {error}") from None
    try:
        yield _upload(form)
    finally:
        await form.close()


def _upload(form: FormData) -> Upload:
    for name in form:
        if name not in _NAMES:
            raise InvalidRequest(f"unknown field {name[:64]!r}", field=name[:64])
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidRequest("file is missing", field="file")
    if form.get("purpose") != "batch":
        raise InvalidRequest("purpose must be batch", field="purpose")
    return Upload((file.filename or "file")[:_MAX_NAME], _expiry(form), file)


def _expiry(form: FormData) -> int | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest("expires_after.anchor must be created_at", field="expires_after")
    if not isinstance(seconds, str) or not _EXPIRY.fullmatch(seconds):
        raise InvalidRequest("expires_after.seconds must be a number", field="expires_after")
    if not MIN_EXPIRY_S <= int(seconds) <= MAX_EXPIRY_S:
        raise InvalidRequest(
            f"expires_after.seconds must be {MIN_EXPIRY_S} to {MAX_EXPIRY_S}", field="expires_after"
        )
    return int(seconds)


class _Parser(MultiPartParser):
    """Parser of forms that rejects an incomplete one."""

    _is_complete = False

    def on_end(self) -> None:
        self._is_complete = True

    async def parse(self) -> FormData:
        form = await super().parse()
        if not self._is_complete:
            for file in self._files_to_close_on_error:
                file.close()
            raise MultiPartException("the last boundary is missing")
        return form


class _LimitedReceive:
    """Receiver of a body, which must not be too large or arrive too slowly."""

    def __init__(self, request: Request, max_bytes: int) -> None:
        self._receive = request.receive
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._started_at = now()

    async def __call__(self) -> Message:
        due_s = _BODY_TIMEOUT_S + self._num_bytes / _MIN_BYTES_PER_S
        try:
            async with asyncio.timeout(due_s - (now() - self._started_at)):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow(f"the body did not arrive within {due_s:.0f} s") from None
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes + _OVERHEAD_BYTES:
            raise MessageTooLarge(
                f"the file has more than {self._max_bytes >> 20} MiB (router.files_mib)",
                field="file",
            )
        return message
