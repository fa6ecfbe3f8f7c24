"""Handlers of ``/v1/conversations``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from starlette.responses import Response
from typing_extensions import TypedDict

from everlift.errors import UnknownObject
from router.api.http.endpoint import Call, JsonResponse
from router.api.openai.conversations.fields import (
    ConversationFields,
    ConversationItemsFields,
    ConversationUpdateFields,
)
from router.api.openai.conversations.record import (
    ConversationRecord,
    added_items,
    idempotency_digest,
)
from router.api.openai.conversations.stored import StoredConversations
from router.api.openai.responses.item_page import item_page, whole_page
from router.api.openai.responses.items import Item, input_turns
from router.api.service import idempotency_key
from router.requests import tokenizer


class ConversationBody(TypedDict):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(TypedDict):
    id: str
    object: Literal["conversation.deleted"]
    deleted: bool


class Conversations:
    def __init__(self, stored: StoredConversations) -> None:
        self._stored = stored

    async def create(self, call: Call) -> Response:
        fields = await call.fields(ConversationFields)
        key = _key(call)
        items = await _new_items(fields.items or [], key)
        record = ConversationRecord(int(time.time()), fields.metadata or {}, tuple(items))
        return JsonResponse((await self._stored.create(call.caller, record, key)).body)

    async def retrieve(self, call: Call) -> Response:
        return JsonResponse((await self._stored.get(call.caller, _id(call))).body)

    async def update(self, call: Call) -> Response:
        metadata = (await call.fields(ConversationUpdateFields)).metadata
        changed = await self._stored.change(
            call.caller, _id(call), lambda record: record.with_metadata(metadata)
        )
        return JsonResponse(changed.body)

    async def delete(self, call: Call) -> Response:
        await self._stored.delete(call.caller, _id(call))
        return JsonResponse({"id": _id(call), "object": "conversation.deleted", "deleted": True})

    async def list_items(self, call: Call) -> Response:
        return JsonResponse(item_page(await self._items(call), call.request.query_params))

    async def add_items(self, call: Call) -> Response:
        key = _key(call)
        items = await _new_items((await call.fields(ConversationItemsFields)).items, key)
        await self._stored.change(
            call.caller, _id(call), lambda record: record.with_added(items, key)
        )
        return JsonResponse(whole_page(items))

    async def retrieve_item(self, call: Call) -> Response:
        return JsonResponse(await self._item(call))

    async def delete_item(self, call: Call) -> Response:
        item_id = (await self._item(call))["id"]
        changed = await self._stored.change(
            call.caller, _id(call), lambda record: record.without_item(item_id)
        )
        return JsonResponse(changed.body)

    async def _items(self, call: Call) -> list[Item]:
        conversation = await self._stored.get(call.caller, _id(call))
        return (await self._stored.contents(call.caller, conversation)).items

    async def _item(self, call: Call) -> Item:
        item_id = call.request.path_params["item_id"]
        for item in await self._items(call):
            if item["id"] == item_id:
                return item
        raise UnknownObject(f"the conversation {_id(call)} has no item {item_id[:64]}")


async def _new_items(raw: Sequence[Item], key: str) -> list[Item]:
    """Check items that a client adds, and return them with new ids (``added_items``).

    ``key`` is the result of ``_key``. Raises the errors of ``input_turns``.
    """
    if raw:
        await tokenizer.with_json(raw, lambda: input_turns(raw, "items"))
    return added_items(raw, key)


def _key(call: Call) -> str:
    """Return the key that identifies a call and its repetitions; empty if the client sent none."""
    sent = idempotency_key(call.headers)
    return idempotency_digest(call.request.url.path, call.caller.qualify(sent)) if sent else ""


def _id(call: Call) -> str:
    conversation_id: str = call.request.path_params["conversation_id"]
    return conversation_id
