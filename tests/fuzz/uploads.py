"""Fuzzing of file uploads, and of the lines of uploaded batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from starlette.requests import Request

from router.api.http.endpoint import Call
from router.api.openai.batches.lines import Survey, parse_lines
from router.api.openai.files.record import LineSplitter
from router.api.openai.files.upload import received
from router.auth.caller import ANYONE
from tests.fuzz.mutation import parts_reshaped
from tests.fuzz.target import Finding, Run, Target, event_loop
from tests.support.router.batch_client import FORM, form, jsonl, line

_MAX_BYTES = 1 << 16
_ENDPOINT = "/v1/completions"


# uploads: the value of content-type, a line feed, the body


async def _received(data: bytes) -> None:
    media_type, _, body = data.partition(b"\n")
    headers = [(b"content-type", media_type)]
    half = len(body) // 2
    messages = [
        {"type": "http.request", "body": body[:half], "more_body": True},
        {"type": "http.request", "body": body[half:], "more_body": False},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}
    named = {"content-type": media_type.decode("latin-1")}
    call = Call(Request(scope, receive), ANYONE, named, _MAX_BYTES, 0.0)
    async with received(call, _MAX_BYTES) as upload:
        parts = [part async for part in upload.parts()]
        upload.filename.encode()
        if sum(map(len, parts)) != upload.num_bytes:
            raise Finding("an upload has another size than its content")


@contextmanager
def _uploads() -> Iterator[Run]:
    with event_loop() as runs:
        yield _within(runs)


def _within(runs: Callable[[Awaitable[object]], Any]) -> Run:
    async def limited(data: bytes) -> None:
        async with asyncio.timeout(30):
            await _received(data)

    return lambda data: runs(limited(data))


_EXPIRY = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
_TYPE = FORM["content-type"].encode()
UPLOADS = (
    form({"purpose": "batch"}, b'{"custom_id": "a"}\n'),
    form({"purpose": "batch", **_EXPIRY}, b"", "é.jsonl"),
    form({"purpose": "user_data"}, None),
)
_ODD_LINES = (
    *(b"content-disposition: form-data", b'content-disposition: form-data; name="file"'),
    *(b"content-disposition: form-data; name=file; filename*=utf-16''%ff%fe", b"--", b"--x"),
    *(b"content-transfer-encoding: base64", b"x: " + b"y" * 5000, b"", b"x", b"\0", b"\xff: a"),
)


# lines of a batch


def _lines(data: bytes) -> None:
    survey, splitter = Survey(_ENDPOINT), LineSplitter(_MAX_BYTES)
    half = len(data) // 2
    lines = [*splitter.feed(data[:half]), *splitter.feed(data[half:]), splitter.rest]
    survey.add(lines)
    survey.finish()
    if not survey.errors:
        found = parse_lines(1, lines, _ENDPOINT, ())
        if len(found) != survey.num_lines or len({it.custom_id for it in found}) != len(found):
            raise Finding("lines that were checked differ from those that run")


LINES = (
    jsonl([line("a", prompt=[1, 2], max_tokens=5), line("b", prompt="é", stream=False)]),
    b"\r\n" + jsonl([line("c")]) + b"\n \n{}",
)


TARGETS = (
    Target(
        "upload",
        _uploads,
        tuple(
            b"\n".join((media_type, body))
            for media_type in (
                _TYPE,
                b"Multipart/Form-Data;charset=UTF8;" + _TYPE.partition(b" ")[2],
            )
            for body in UPLOADS
        ),
        parts_reshaped(b"\r\n", _ODD_LINES),
    ),
    Target("batch_lines", lambda: nullcontext(_lines), LINES, parts_reshaped(b'"', (b"\n", b"\\"))),
)
