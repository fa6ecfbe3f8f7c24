"""Stored form of a response's request."""

from __future__ import annotations

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
