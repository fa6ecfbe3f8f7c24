"""Conversation as it is stored in the ledger, and its items. Pure."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Self

from everlift.errors import OutOfRange, RequestConflict
from router.api.openai.responses.items import Item
from router.ledger.objects import MAX_OBJECT_BYTES

#: Maximum number of responses of one conversation.
MAX_RESPONSES = 1024
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


#: Maximum size of a record to which items of responses are copied. The rest of an object is for
#: references to further responses and for items that clients add.
MAX_COPIED_BYTES = MAX_OBJECT_BYTES - (1 << 17)

Parts = tuple[tuple[Item, ...], ...]


@dataclass(frozen=True, slots=True)
class ResponseReference:
    """Reference to a response, whose items belong to the conversation once the response finishes.

    ``name`` is the request id of the response. ``added_at`` is the ledger time in seconds at which
    the response was added; its request is created soon after that time. ``parts`` are copies of the
    items, in the form of ``Contents.parts``; None before the items are copied from the request. The
    request may expire after the copy.
    """

    name: str
    added_at: float
    parts: Parts | None = None

    @property
    def stored(self) -> dict[str, object]:
        stored: dict[str, object] = {"name": self.name, "added_at": self.added_at}
        return stored if self.parts is None else {**stored, "parts": self.parts}

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Self:
        parts = stored.get("parts")
        copied = None if parts is None else tuple(tuple(part) for part in parts)
        return cls(stored["name"], stored["added_at"], copied)


Entry = Item | ResponseReference


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """Conversation in the ledger.

    ``entries`` are items that clients added, and references to responses, in their order.
    ``hidden`` has the ids of items that clients deleted.
    """

    created_at: int
    metadata: Mapping[str, str]
    entries: tuple[Entry, ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def references(self) -> list[ResponseReference]:
        return [entry for entry in self.entries if isinstance(entry, ResponseReference)]

    def with_metadata(self, metadata: Mapping[str, str]) -> Self:
        return replace(self, metadata=dict(metadata))

    def with_items(self, items: Sequence[Item]) -> Self:
        return replace(self, entries=(*self.entries, *items))

    def with_added(self, items: Sequence[Item], key: str) -> Self:
        """Return the record with ``items``, unless an earlier call with ``key`` added them.

        ``key`` is the result of ``idempotency_digest``, or empty if the call has no key. ``items``
        are the result of ``added_items`` for ``key``. Raises RequestConflict if an earlier call
        with ``key`` added other items.
        """
        if not key or not self._added_by(key):
            return self.with_items(items)
        self.check_added(items, key)
        return self

    def check_added(self, items: Sequence[Item], key: str) -> None:
        """Raise RequestConflict unless the calls with ``key`` added exactly ``items``.

        ``key`` is the result of ``idempotency_digest``.
        """
        if self._added_by(key) != {item["id"] for item in items}:
            raise RequestConflict("the idempotency key was already used with other items")

    def _added_by(self, key: str) -> set[str]:
        """Return the ids of items that a call with a key added, including deleted ones."""
        own = (entry["id"] for entry in self.entries if not isinstance(entry, ResponseReference))
        return {it for it in (*own, *self.hidden) if _begin(key) in it}

    def with_response(self, reference: ResponseReference) -> Self:
        """Return the record with a further response. Raises OutOfRange if there are too many."""
        if len(self.references) >= MAX_RESPONSES:
            raise OutOfRange(
                f"a conversation has at most {MAX_RESPONSES} responses", field="conversation"
            )
        return replace(self, entries=(*self.entries, reference))

    def with_copies(self, copies: Mapping[str, Parts]) -> Self:
        """Return the record with copies of the items of its responses.

        ``copies`` has the items of each response, by the response's name. A response whose items
        would make the record larger than MAX_COPIED_BYTES is left as it is.
        """
        room = MAX_COPIED_BYTES - len(self._encoded())
        entries: list[Entry] = []
        for entry in self.entries:
            if isinstance(entry, ResponseReference) and entry.name in copies:
                copied = replace(entry, parts=copies[entry.name])
                size = len(_encoded(copied.stored))
                if size <= room:
                    room, entry = room - size, copied
            entries.append(entry)
        return replace(self, entries=tuple(entries))

    def without_response(self, name: str) -> Self:
        kept = (it for it in self.entries if not _is_reference(it, name))
        return replace(self, entries=tuple(kept))

    def without_item(self, item_id: str) -> Self:
        """Return the record without an item, whether a client or a response added the item."""
        kept = tuple(it for it in self.entries if not _is_item(it, item_id))
        hidden = tuple(dict.fromkeys((*self.hidden, item_id)))
        return replace(self, entries=kept, hidden=hidden)

    def before_response(self, name: str) -> Self:
        """Return the record with only the entries before the response ``name``.

        A record without that response is returned unchanged.
        """
        for index, entry in enumerate(self.entries):
            if _is_reference(entry, name):
                return replace(self, entries=self.entries[:index])
        return self

    def has_response(self, name: str) -> bool:
        return any(reference.name == name for reference in self.references)

    def to_bytes(self) -> bytes:
        """Return the stored form. Raises OutOfRange if it is too large for an object."""
        data = self._encoded()
        if len(data) > MAX_OBJECT_BYTES:
            raise OutOfRange(
                f"the conversation would have {len(data)} bytes; at most {MAX_OBJECT_BYTES} are "
                "allowed: begin another one",
                field="items",
            )
        return data

    def _encoded(self) -> bytes:
        entries = [
            {"response": it.stored} if isinstance(it, ResponseReference) else {"item": it}
            for it in self.entries
        ]
        stored = {
            "created_at": self.created_at,
            "metadata": self.metadata,
            "entries": entries,
            "hidden": self.hidden,
        }
        return _encoded(stored)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        stored: dict[str, Any] = json.loads(data)
        entries = tuple(
            ResponseReference.from_stored(it["response"]) if "response" in it else it["item"]
            for it in stored["entries"]
        )
        return cls(stored["created_at"], stored["metadata"], entries, tuple(stored["hidden"]))


def _encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _is_reference(entry: Entry, name: str) -> bool:
    return isinstance(entry, ResponseReference) and entry.name == name


def _is_item(entry: Entry, item_id: str) -> bool:
    return not isinstance(entry, ResponseReference) and entry["id"] == item_id


def idempotency_digest(path: str, name: str) -> str:
    """Return the key that ``added_items`` takes, for a call of ``path``.

    ``name`` is the call's idempotency key, with the tenant if tenants are distinguished.
    """
    return blake2b(f"{path} {name}".encode(), digest_size=16).hexdigest()


def _begin(key: str) -> str:
    """Return the middle part of the ids of items, which is the same for all items of a call.

    ``key`` is the ``idempotency_digest`` of the call that adds the items. An id consists of a
    prefix such as ``msg``, this part, and a digest of the items and the item's index.
    """
    return f"_{key[:16]}"


def added_items(raw: Sequence[Item], key: str) -> list[Item]:
    """Return items that a client adds, with new ids.

    ``key`` is the result of ``idempotency_digest``, or empty for random ids. Ids made with a key
    depend only on the key and the items: a repeated call adds the same items, and other items have
    other ids.
    """
    ids = _derived_ids(raw, key) if key else [f"_{secrets.token_hex(16)}" for _ in raw]
    return [
        shown_item(item, _PREFIXES[item.get("type", "message")] + new_id)
        for item, new_id in zip(raw, ids, strict=True)
    ]


def _derived_ids(raw: Sequence[Item], key: str) -> list[str]:
    body = json.dumps(raw).encode()
    ends = (blake2b(body, digest_size=8, salt=b"%d" % index) for index in range(len(raw)))
    return [_begin(key) + end.hexdigest() for end in ends]


def shown_item(item: Item, item_id: str) -> Item:
    """Return an item in the form in which OpenAI's API returns it, with the id ``item_id``."""
    kind = item.get("type", "message")
    members = {name: value for name, value in item.items() if value is not None}
    shown = {**members, "id": item_id, "type": kind}
    if kind == "reasoning":
        return {"summary": [], **shown}
    content = shown.get("content")
    if kind == "message" and isinstance(content, str):
        is_output = shown.get("role") == "assistant"
        part: Item = {"type": "output_text" if is_output else "input_text", "text": content}
        if is_output:
            part |= {"annotations": [], "logprobs": []}
        shown["content"] = [part]
    return {"status": "completed", **shown}
