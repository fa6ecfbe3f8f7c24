"""Uploads: forms that are valid, odd, malformed, too large, or slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from everlift.errors import (
    BodyTooSlow,
    EverliftError,
    InvalidRequest,
    MalformedBody,
    MessageTooLarge,
    UnsupportedMediaType,
)
from router.api.http.endpoint import Call
from router.api.openai.files import upload as module
from router.api.openai.files.upload import received
from router.auth.caller import ANYONE
from tests.support.router.batch_client import FORM, form

BATCH = {"purpose": "batch"}
TYPE = FORM["content-type"]
BOUNDARY = TYPE.partition("=")[2]


def call(body: bytes, headers: Mapping[str, str] = FORM, size: int = 1 << 16) -> Call:
    parts = [body[start : start + size] for start in range(0, len(body), size)] or [b""]

    async def receive() -> Any:
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": raw}
    return Call(Request(scope, receive), ANYONE, headers, 1 << 20, 0.0)


async def content_of(call: Call, max_bytes: int = 8 << 20) -> tuple[str, int | None, bytes]:
    async with received(call, max_bytes) as upload:
        parts = [part async for part in upload.parts()]
        content = b"".join(parts)
        assert upload.num_bytes == len(content)
        return upload.filename, upload.expires_s, content


async def failure(call: Call, max_bytes: int = 8 << 20) -> EverliftError:
    with pytest.raises(EverliftError) as error:
        await content_of(call, max_bytes)
    assert error.value.http_status < 500
    return error.value


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
async def test_upload_has_the_fields_of_the_form(size: int) -> None:
    content = b"a\r\n--a-boundary\r\n\0\xff\n" * 30
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    assert await content_of(call(form(BATCH | fields, content, "é.jsonl"), FORM, size)) == (
        "é.jsonl",
        3600,
        content,
    )


async def test_upload_of_several_chunks_is_complete() -> None:
    content = bytes(range(256)) * (1 << 13)
    assert (await content_of(call(form(BATCH, content))))[2] == content


@pytest.mark.parametrize(
    ("fields", "content", "field"),
    [
        ({}, b"a", "purpose"),
        ({"purpose": "fine-tune"}, b"a", "purpose"),
        (BATCH, None, "file"),
        (BATCH | {"file": "text"}, None, "file"),
        (BATCH | {"other": "1"}, b"a", "other"),
        (BATCH | {"expires_after[seconds]": "3600"}, b"a", "expires_after"),
        (BATCH | {"expires_after[anchor]": "created_at"}, b"a", "expires_after"),
        *(
            (
                BATCH | {"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds},
                b"a",
                "expires_after",
            )
            for seconds in ("3599", "2592001", "-1", "1e4", "x", "", "٣٦٠٠", "9" * 5000)
        ),
    ],
)
async def test_upload_names_the_invalid_field(
    fields: dict[str, str], content: bytes | None, field: str
) -> None:
    error = await failure(call(form(fields, content)))
    assert isinstance(error, InvalidRequest) and error.field == field


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "application/json"},
        {"content-type": "multipart/mixed; boundary=a"},
        FORM | {"content-encoding": "gzip"},
        # Decoders that fail, or take quadratic time.
        *(
            {"content-type": f"{TYPE}; charset={charset}"}
            for charset in ("undefined", "punycode", "idna", "utf-16", "zlib", "none")
        ),
    ],
)
async def test_upload_rejects_the_media_type(headers: dict[str, str]) -> None:
    assert isinstance(await failure(call(form(BATCH, b"a"), headers)), UnsupportedMediaType)


async def test_upload_accepts_a_charset_of_utf_8() -> None:
    headers = {"content-type": f"Multipart/Form-Data; charset=UTF-8; boundary={BOUNDARY}"}
    assert (await content_of(call(form(BATCH, b"a"), headers)))[2] == b"a"


_FILE = b'--%s\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n' % BOUNDARY.encode()
_END = b"\r\n--%s--\r\n" % BOUNDARY.encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"a" * 1000,
        b"\r\n" * 1000,
        form(BATCH, b"a")[:-20],
        form(BATCH, b"a")[:80],
        form({f"f{number}": "" for number in range(1000)}, b"a"),
        form(BATCH, b"a")[: -len(_END)] + b"\r\n" + form(BATCH, b"b"),
        _FILE + b"".join(b"x-%d: 1\r\n" % number for number in range(1000)) + b"\r\na" + _END,
        _FILE + b"x: " + b"1" * 100_000 + b"\r\n\r\na" + _END,
        _FILE + b"no colon\r\n\r\na" + _END,
        b"--%s\r\ncontent-disposition: form-data\r\n\r\na" % BOUNDARY.encode() + _END,
        b"--%s\r\n\r\na" % BOUNDARY.encode() + _END,
        form({"purpose": "x" * (2 << 20)}, b"a"),
    ],
)
async def test_malformed_upload_is_rejected(body: bytes) -> None:
    for size in (1 << 16, 61) if len(body) < 1 << 17 else (1 << 16,):
        assert isinstance(await failure(call(body, FORM, size)), InvalidRequest)


@pytest.mark.parametrize("boundary", ["", '""', "x" * 257, '"unended'])
async def test_upload_without_a_boundary_is_rejected(boundary: str) -> None:
    headers = {"content-type": f"multipart/form-data; boundary={boundary}".rstrip("= ")}
    assert isinstance(await failure(call(form(BATCH, b"a"), headers)), MalformedBody)


async def test_upload_shortens_a_long_filename() -> None:
    assert (await content_of(call(form(BATCH, b"a", "n" * 3000))))[0] == "n" * 255
    assert (await content_of(call(form(BATCH, b"a", ""))))[0] == "file"
    await failure(call(form(BATCH, b"a", "n" * 100_000)))


async def test_upload_limits_the_size_of_the_body() -> None:
    error = await failure(call(form(BATCH, bytes(3 << 20))), 2 << 20)
    assert isinstance(error, MessageTooLarge) and "2 MiB" in str(error)
    assert len((await content_of(call(form(BATCH, bytes(2 << 20))), 2 << 20))[2]) == 2 << 20


async def test_upload_must_not_be_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BODY_TIMEOUT_S", 0.05)
    slow = call(form(BATCH, b"a" * 100), FORM, 1)
    receive = slow.request._receive

    async def receive_slowly() -> Any:
        await asyncio.sleep(0.005)
        return await receive()

    slow.request._receive = receive_slowly
    begun = time.monotonic()
    assert isinstance(await failure(slow), BodyTooSlow)
    assert time.monotonic() - begun < 1.0


async def test_upload_may_last_longer_if_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BODY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "_MIN_BYTES_PER_S", 1 << 20)
    large = call(form(BATCH, bytes(1 << 20)))
    receive = large.request._receive

    async def receive_slowly() -> Any:
        await asyncio.sleep(0.01)
        return await receive()

    large.request._receive = receive_slowly
    assert len((await content_of(large))[2]) == 1 << 20


async def test_upload_ends_if_the_client_disconnects() -> None:
    messages = [
        {"type": "http.request", "body": form(BATCH, b"a" * 100)[:150], "more_body": True},
        {"type": "http.disconnect"},
    ]
    left = call(b"")

    async def receive() -> Any:
        return messages.pop(0)

    left.request._receive = receive
    with pytest.raises(ClientDisconnect):
        await content_of(left)
