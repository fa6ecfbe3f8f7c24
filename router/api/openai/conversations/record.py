"""Conversation as it is stored in the ledger, and its items. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from everlift.errors import OutOfRange
from router.api.openai.responses.items import Item
from router.ledger.objects import MAX_OBJECT_BYTES

#: Maximum number of responses of one conversation.
MAX_RESPONSES = 1024


@dataclass(frozen=True, slots=True)
class ResponseReference:
    """Response whose items belong to a conversation once it has finished.

    ``name`` is its request id. ``added_at`` is the ledger time in seconds at which it was added:
    its request is created soon after that time.
    """

    name: str
    added_at: float


Entry = Item | ResponseReference


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """Conversation in the ledger.

    ``entries`` are items that clients added, and references to responses, in their order. Items of
    responses are not stored here; ``hidden`` has the ids of those that clients deleted.
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

    def with_response(self, reference: ResponseReference) -> Self:
        """Return the record with a further response. Raises OutOfRange if there are too many."""
        if len(self.references) >= MAX_RESPONSES:
            raise OutOfRange(
                f"a conversation has at most {MAX_RESPONSES} responses", field="conversation"
            )
        return replace(self, entries=(*self.entries, reference))

    def without_response(self, name: str) -> Self:
        kept = (it for it in self.entries if not _is_reference(it, name))
        return replace(self, entries=tuple(kept))

    def without_item(self, item_id: str) -> Self:
        """Return the record without an item, which is its own or one of a response."""
        kept = tuple(it for it in self.entries if not _is_item(it, item_id))
        if len(kept) < len(self.entries):
            return replace(self, entries=kept)
        return replace(self, hidden=tuple(dict.fromkeys((*self.hidden, item_id))))

    def before_response(self, name: str) -> Self:
        """Return the record as of before the response ``name`` was added; unchanged without it."""
        for index, entry in enumerate(self.entries):
            if _is_reference(entry, name):
                return replace(self, entries=self.entries[:index])
        return self

    def has_response(self, name: str) -> bool:
        return any(reference.name == name for reference in self.references)

    def to_bytes(self) -> bytes:
        """Return the stored form. Raises OutOfRange if it is too large for an object."""
        entries = [
            {"response": asdict(it)} if isinstance(it, ResponseReference) else {"item": it}
            for it in self.entries
        ]
        stored = {
            "created_at": self.created_at,
            "metadata": self.metadata,
            "entries": entries,
            "hidden": self.hidden,
        }
        data = json.dumps(stored, separators=(",", ":")).encode()
        if len(data) > MAX_OBJECT_BYTES:
            raise OutOfRange(
                f"the conversation would have {len(data)} bytes; at most {MAX_OBJECT_BYTES} are "
                "allowed: begin another one",
                field="items",
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        stored: dict[str, Any] = json.loads(data)
        entries = tuple(
            ResponseReference(**it["response"]) if "response" in it else it["item"]
            for it in stored["entries"]
        )
        return cls(stored["created_at"], stored["metadata"], entries, tuple(stored["hidden"]))


def _is_reference(entry: Entry, name: str) -> bool:
    return isinstance(entry, ResponseReference) and entry.name == name


def _is_item(entry: Entry, item_id: str) -> bool:
    return not isinstance(entry, ResponseReference) and entry["id"] == item_id


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
