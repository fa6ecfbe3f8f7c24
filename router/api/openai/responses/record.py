"""Data of a response that is stored with its request. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from everlift.errors import OutOfRange
from everlift.images import Image
from router.api.openai.responses.fields import LOGPROBS, InputTokensFields, ResponseFields
from router.api.openai.responses.namespaces import own_names
from router.chat.images import data_url

#: First byte of the stored form, which distinguishes it from attachments of other APIs.
_MARK = b"R"
#: Maximum size of the stored form before its compression. A client of another API may send an
#: attachment that looks like the stored form, and is a thousand times as large when unpacked.
_MAX_BYTES = 16 << 20
#: Beginning of the URL of an image in the stored form; the digest of the image follows.
_STORED_IMAGE = "stored-image:"
#: Members of the parts of a message that are URLs of images.
_URLS = ("image_url", "url")
#: Members of a response that repeat the request, and their values if the request lacks them.
_ECHOED: Mapping[str, Any] = {
    "background": False,
    "conversation": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


@dataclass(frozen=True, slots=True)
class Record:
    """Request of a response as the client sent it, and its place among other responses.

    ``created_at`` is in seconds since 1970. ``ancestors`` are the names of the earlier responses
    that it continues, the first one first.
    """

    body: Mapping[str, Any]
    created_at: int
    ancestors: Sequence[str] = ()

    @classmethod
    def of(cls, fields: ResponseFields, created_at: int, ancestors: Sequence[str]) -> Self:
        body = fields.model_dump(mode="json", by_alias=True, exclude_none=True)
        return cls(body, created_at, tuple(ancestors))

    @property
    def is_stored(self) -> bool:
        return self.body.get("store") is not False

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in self.body.get("include", ())

    @property
    def echoed(self) -> dict[str, Any]:
        """Return the members of the response that repeat the request."""
        members = {name: self.body.get(name, default) for name, default in _ECHOED.items()}
        if (conversation_id := self.conversation_id) is not None:
            members["conversation"] = {"id": conversation_id}
        return members

    @property
    def conversation_id(self) -> str | None:
        """Return the id of the conversation that the response belongs to."""
        named = self.body.get("conversation")
        return named["id"] if isinstance(named, dict) else named

    @property
    def input_items(self) -> list[dict[str, Any]]:
        body = self.body["input"]
        if isinstance(body, str):
            content = [{"type": "input_text", "text": body}]
            return [{"type": "message", "role": "user", "content": content}]
        return list(body)

    @property
    def own_names(self) -> Mapping[str, Mapping[str, str]]:
        """Return the result of ``namespaces.own_names`` for the tools of the request."""
        return own_names(self.body.get("tools", ()))

    @property
    def prompt_fields(self) -> InputTokensFields:
        """Return the fields that made up the prompt."""
        names = InputTokensFields.names()
        return InputTokensFields.model_validate(
            {name: value for name, value in self.body.items() if name in names}
        )

    def to_bytes(self, images: Sequence[Image] = ()) -> bytes:
        """Return the stored form, which names ``images`` by their digests.

        Raises OutOfRange if the stored form is too large.
        """
        urls = {data_url(image): _stored_url(image) for image in images}
        fields = asdict(replace(self, body=_with_urls(self.body, urls)))
        data = json.dumps(fields, separators=(",", ":")).encode()
        if len(data) > _MAX_BYTES:
            raise OutOfRange(
                f"the request has more than {_MAX_BYTES} bytes and cannot be stored: set store to "
                "false, or shorten it",
                field="input",
            )
        return _MARK + zlib.compress(data)

    @classmethod
    def from_bytes(cls, data: bytes, images: Sequence[Image] = ()) -> Self | None:
        """Return the record that ``to_bytes`` wrote; None if ``data`` is something else.

        ``images`` are those that ``to_bytes`` received.
        """
        if data[:1] != _MARK:
            return None
        inflater = zlib.decompressobj()
        try:
            text = inflater.decompress(data[1:], _MAX_BYTES + 1)
            if not inflater.eof:
                return None
            record = cls(**_STORED.validate_json(text))
            _ = record.prompt_fields
        except (zlib.error, ValueError):
            return None
        urls = {_stored_url(image): data_url(image) for image in images}
        return replace(record, body=_with_urls(record.body, urls))


class _Stored(TypedDict):
    """Members of the stored form, named as the fields of Record."""

    body: dict[str, Any]
    created_at: int
    ancestors: list[str]


_STORED = TypeAdapter(_Stored)


def _stored_url(image: Image) -> str:
    return _STORED_IMAGE + image.digest.hex()


def _with_urls(value: Any, urls: Mapping[str, str]) -> Any:
    """Return a JSON value in which the URLs of images are replaced as ``urls`` states."""
    if not urls:
        return value
    if isinstance(value, list):
        return [_with_urls(each, urls) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: urls.get(each, each)
        if name in _URLS and isinstance(each, str)
        else _with_urls(each, urls)
        for name, each in value.items()
    }
