"""Stored form of a response's request."""

from __future__ import annotations

import zlib

import pytest

from everlift.images import Image
from router.api.http.fields import parse
from router.api.openai.responses.fields import ResponseFields
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


def test_fields_are_stored_as_the_client_sent_them() -> None:
    body = {
        "input": [{"role": "user", "content": "a", "more": None}],
        "conversation": {"id": "c"},
        "text": {"format": {"type": "json_schema", "schema": {"a": None}, "name": None}},
        "include": ["message.output_text.logprobs"],
        "max_tool_calls": 12345678901234567890,
        "user": None,
    }
    stored = Record.of(parse(ResponseFields, body), 7, ["before"]).to_bytes()
    del body["user"], body["text"]["format"]["name"]  # type: ignore[index]
    assert Record.from_bytes(stored) == Record(body, 7, ["before"])


def test_stored_form_is_written_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = parse(ResponseFields, {"input": [{"role": "user", "content": "д"}]})
    given = Record.of(fields, 7, ["before"])
    assert given.body["input"] is fields.input
    with monkeypatch.context() as patch:
        patch.setattr("copy.deepcopy", pytest.fail)
        stored = given.to_bytes()
    assert "д".encode() in zlib.decompress(stored), "an escape has three times its size"
    assert Record.from_bytes(stored) == Record(given.body, 7, ["before"])
