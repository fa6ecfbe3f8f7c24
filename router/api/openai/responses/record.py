"""Data of a response that is stored with its request. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic_core import from_json, to_json

from everlift.images import Image
from router.api.http.fields import Fields
from router.api.openai.responses.fields import LOGPROBS, InputTokensFields, ResponseFields
from router.api.openai.responses.namespaces import own_names
from router.chat.images import data_url

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
        return cls(_as_json(fields), created_at, tuple(ancestors))

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
        """Return the stored form, which names ``images`` by their digests."""
        urls = {data_url(image): _stored_url(image) for image in images}
        # dataclasses.asdict would copy every value of the body.
        fields = {
            "body": _with_urls(self.body, urls),
            "created_at": self.created_at,
            "ancestors": self.ancestors,
        }
        return zlib.compress(to_json(fields))

    @classmethod
    def from_bytes(cls, data: bytes, images: Sequence[Image] = ()) -> Self:
        """Return the record that ``to_bytes`` wrote, with the ``images`` that it received."""
        record = cls(**from_json(zlib.decompress(data)))
        urls = {_stored_url(image): data_url(image) for image in images}
        return replace(record, body=_with_urls(record.body, urls))


def _as_json(value: Any) -> Any:
    """Return the JSON of fields; the values of other types are neither copied nor changed."""
    if not isinstance(value, Fields):
        return value
    members = {
        field.alias or name: _as_json(getattr(value, name))
        for name, field in type(value).model_fields.items()
    }
    return {name: member for name, member in members.items() if member is not None}


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
