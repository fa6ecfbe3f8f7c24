"""Stored form of a response's request."""

from __future__ import annotations

import itertools
import json
import zlib

import pytest

from everlift.errors import OutOfRange
from everlift.images import Image
from router.api.openai.responses.record import Record
from tests.support.images import png, png_url

IMAGES = tuple(Image.checked(png(seed), "image") for seed in (1, 2))


def part(url: str) -> dict[str, object]:
    return {"type": "input_image", "detail": "auto", "image_url": url}


def record(*urls: str) -> Record:
    content = [{"type": "input_text", "text": "a"}, *map(part, urls)]
    return Record({"input": [{"role": "user", "content": content}], "store": True}, 7, ["before"])


def test_stored_form_has_digests_instead_of_images() -> None:
    given = record(*(png_url(image.data) for image in IMAGES))
    stored = given.to_bytes(IMAGES)
    named = record(*(f"stored-image:{image.digest.hex()}" for image in IMAGES))
    assert Record.from_bytes(stored) == named
    assert Record.from_bytes(stored, IMAGES) == given
    assert Record.from_bytes(given.to_bytes()) == given


def test_image_of_another_request_keeps_its_url() -> None:
    given = record(png_url(png(3)), png_url(png(1)))
    stored = given.to_bytes(IMAGES)
    assert Record.from_bytes(stored, IMAGES) == given
    assert Record.from_bytes(stored) == record(
        png_url(png(3)), f"stored-image:{IMAGES[0].digest.hex()}"
    )


def stored_form(value: object) -> bytes:
    return b"R" + zlib.compress(json.dumps(value).encode())


@pytest.mark.parametrize(
    "attachment",
    [
        b"",
        b"R",
        b"Report 7",
        stored_form([])[:-1],
        stored_form([]),
        stored_form({}),
        stored_form({"body": 1, "created_at": 1, "ancestors": []}),
        stored_form({"body": {}, "created_at": 1, "ancestors": []}),
        stored_form({"body": {"input": 1}, "created_at": 1, "ancestors": []}),
        stored_form({"body": {"input": "a"}, "created_at": 1, "ancestors": [1]}),
        b"R" + zlib.compress(b"[" * 100_000),
        b"R" + zlib.compress(b"\xff"),
    ],
    ids=itertools.count(),
)
def test_attachment_of_another_api_is_no_record(attachment: bytes) -> None:
    assert Record.from_bytes(attachment) is None


def test_unpacked_size_of_an_attachment_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Record({"input": "a" * 1000}, 7)
    stored = given.to_bytes()
    size = len(zlib.decompress(stored[1:]))
    monkeypatch.setattr("router.api.openai.responses.record._MAX_BYTES", size)
    assert Record.from_bytes(given.to_bytes()) == Record({"input": "a" * 1000}, 7, [])
    monkeypatch.setattr("router.api.openai.responses.record._MAX_BYTES", size - 2)
    assert Record.from_bytes(stored) is None
    with pytest.raises(OutOfRange, match="cannot be stored"):
        given.to_bytes()
