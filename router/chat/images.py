"""Images in the messages of chats: files inside the request, in base64. Pure."""

from __future__ import annotations

import binascii
from base64 import b64encode
from typing import Any

from everlift.errors import InvalidRequest, UnsupportedContent
from everlift.images import Image
from router.chat.conversation import num_text_characters

#: Types of the parts of a message that are images, in OpenAI's APIs and in all APIs.
OPENAI_IMAGE_PARTS = ("image_url", "input_image")
IMAGE_PARTS = (*OPENAI_IMAGE_PARTS, "image")
#: Maximum number of characters before the data in a data URL.
_MAX_HEAD = 128


def image_of_url(at: str, url: object) -> Image:
    """Return the image in a data URL; errors name its position ``at`` in the request.

    Raises UnsupportedContent for another URL, and the errors of ``image_of_base64``.
    """
    if not isinstance(url, str):
        raise InvalidRequest(f"{at} must be a string", field=at)
    head, comma, _ = url[:_MAX_HEAD].partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise UnsupportedContent(
            f"{at} must be a data URL, data:image/png;base64,...: the router fetches no files",
            field=at,
        )
    return image_of_base64(at, head.removeprefix("data:").split(";")[0], url[len(head) + 1 :])


def image_of_base64(at: str, media_type: object, text: object) -> Image:
    """Return the image of the type ``media_type`` whose file in base64 is ``text``.

    Raises InvalidRequest, which names ``at``, if the text is not base64 or the file is of another
    type, and the errors of ``Image.checked``.
    """
    if not isinstance(text, str):
        raise InvalidRequest(f"{at} must be a string", field=at)
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise InvalidRequest(f"{at} is not valid base64: {error}", field=at) from None
    image = Image.checked(data, at)
    if media_type not in (image.media_type, image.media_type.replace("jpeg", "jpg")):
        raise InvalidRequest(
            f"{at} is of the type {image.media_type}, but the request states {media_type!r:.64}",
            field=at,
        )
    return image


def data_url(image: Image) -> str:
    return f"data:{image.media_type};base64,{b64encode(image.data).decode()}"


def num_image_characters(value: object) -> int:
    """Return the number of characters of all texts in the image parts of a JSON value."""
    values, number = [value], 0
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            if value.get("type") in IMAGE_PARTS:
                number += num_text_characters(value)
            else:
                values += value.values()
    return number


def image_of_part(at: str, part: dict[str, Any]) -> Image:
    """Return the image of a part of a message in OpenAI's APIs.

    Raises UnsupportedContent for a file id, and the errors of ``image_of_url``.
    """
    if part.get("file_id") is not None:
        field = f"{at}.file_id"
        raise UnsupportedContent(
            f"{field} is not supported: send the image in image_url, as a data URL", field=field
        )
    url = part.get("image_url")
    if part["type"] == "input_image":
        return image_of_url(f"{at}.image_url", url)
    if not isinstance(url, dict):
        raise InvalidRequest(f"{at}.image_url must be an object", field=f"{at}.image_url")
    return image_of_url(f"{at}.image_url.url", url.get("url"))
