"""Conversations in the ledger, read with the items of their responses."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from everlift.errors import (
    ConversationLocked,
    EverliftError,
    ForgottenRequest,
    RequestConflict,
    UnknownModel,
    UnknownObject,
    UnknownRequest,
)
from router.api.openai.conversations.record import (
    ConversationRecord,
    Parts,
    ResponseReference,
    shown_item,
)
from router.api.openai.responses.items import Item, input_turns, item_id
from router.api.openai.responses.stored import (
    PREFIX,
    READS_AT_ONCE,
    StoredResponse,
    StoredResponses,
)
from router.auth.caller import Caller
from router.chat.conversation import Turn
from router.ledger.base import Ledger
from router.ledger.entry import State
from router.ledger.objects import ObjectConflict, object_name
from router.requests import tokenizer

#: Errors for which the output of a response cannot be read.
_Unreadable = UnknownRequest | UnknownModel

_KIND = "conversations"
_ID = re.compile(r"conv_[0-9a-f]{32}")
#: Maximum number of attempts to change a conversation that others change at the same time.
_MAX_TRIES = 16
#: Seconds within which the request of a response that was added to a conversation is created. A
#: response without a request then no longer locks the conversation: its router was lost.
_CREATION_S = 10.0


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """Conversation as it was read from the ledger; ``version`` is that of its object."""

    conversation_id: str
    record: ConversationRecord
    version: int

    @property
    def body(self) -> dict[str, object]:
        return {
            "id": self.conversation_id,
            "object": "conversation",
            "created_at": self.record.created_at,
            "metadata": self.record.metadata,
        }


@dataclass(frozen=True, slots=True)
class Contents:
    """Items of a conversation in their order, grouped into ``parts``.

    A part has successive items that clients added, or the input or the output of one response. No
    turn extends over several parts. ``unfinished`` is the name of a response that has not ended;
    empty if there is none.
    """

    parts: Sequence[Sequence[Item]]
    unfinished: str = ""

    @property
    def items(self) -> list[Item]:
        return [item for part in self.parts for item in part]

    @property
    def turns(self) -> list[Turn]:
        return [turn for part in self.parts for turn in input_turns(part, "conversation")]


class StoredConversations:
    """Reader and writer of conversations; ``ledger_time`` returns the ledger's time in seconds."""

    def __init__(
        self, ledger: Ledger, responses: StoredResponses, ledger_time: Callable[[], float]
    ) -> None:
        self._ledger = ledger
        self._responses = responses
        self._ledger_time = ledger_time

    async def create(
        self, caller: Caller, record: ConversationRecord, key: str = ""
    ) -> StoredConversation:
        """Store a new conversation; return the existing one if a call with ``key`` created it.

        ``key`` is the result of ``idempotency_digest``, or empty. Raises OutOfRange if the record
        is too large, RequestConflict if the key was used with other items, UnknownObject if the
        existing conversation is deleted meanwhile, LedgerFull and LedgerUnavailable.
        """
        new = StoredConversation(f"conv_{key or secrets.token_hex(16)}", record, 0)
        try:
            return await self._put(caller, new, record)
        except ObjectConflict:
            known = await self.get(caller, new.conversation_id)
            known.record.check_added([it for it in record.entries if isinstance(it, dict)], key)
            return known

    async def get(self, caller: Caller, conversation_id: str) -> StoredConversation:
        """Return a conversation. Raises UnknownObject and LedgerUnavailable."""
        stored = await self._ledger.get_object(_name(caller, conversation_id))
        if stored is None:
            raise _unknown(conversation_id)
        data = stored.data
        record = await tokenizer.with_text(len(data), lambda: ConversationRecord.from_bytes(data))
        return StoredConversation(conversation_id, record, stored.version)

    async def change(
        self,
        caller: Caller,
        conversation_id: str,
        changed: Callable[[ConversationRecord], ConversationRecord],
    ) -> StoredConversation:
        """Replace the record of a conversation by ``changed(record)``, and return the result.

        Items of ended responses are copied into the record first: a change prolongs the life of the
        conversation, but not that of the responses' requests. Raises UnknownObject,
        ConversationLocked if others change the conversation all the time, OutOfRange if the record
        becomes too large, LedgerFull, LedgerUnavailable, and the errors of ``changed``.
        """
        for _ in range(_MAX_TRIES):
            known = await self._copied(caller, await self.get(caller, conversation_id))
            record = changed(known.record)
            if record == known.record:
                return known
            with suppress(ObjectConflict):
                return await self._put(caller, known, record)
        raise ConversationLocked(
            f"other requests are changing the conversation {conversation_id}: try again"
        )

    async def _copied(self, caller: Caller, known: StoredConversation) -> StoredConversation:
        """Return ``known`` with the items of its ended responses copied into the record.

        A response is left as it is if its model is no longer served, or if its items would make the
        record too large. Nothing is stored.
        """
        responses = await self._read(caller, known.record)
        copies = {
            name: _response_parts(response, known.conversation_id)
            for name, response in responses.items()
            if not isinstance(response, EverliftError) and response.live.entry.state.is_final
        }
        return replace(known, record=known.record.with_copies(copies)) if copies else known

    async def _put(
        self, caller: Caller, known: StoredConversation, record: ConversationRecord
    ) -> StoredConversation:
        name, conversation_id = _name(caller, known.conversation_id), known.conversation_id
        version = await self._ledger.put_object(name, record.to_bytes(), known.version)
        return StoredConversation(conversation_id, record, version)

    async def delete(self, caller: Caller, conversation_id: str) -> None:
        """Delete a conversation, but not its responses.

        Raises UnknownObject and LedgerUnavailable.
        """
        if not await self._ledger.delete_object(_name(caller, conversation_id)):
            raise _unknown(conversation_id)

    async def contents(self, caller: Caller, conversation: StoredConversation) -> Contents:
        """Return the items of a conversation.

        Responses that failed or were cancelled contribute no items. A response whose request was
        erased or has expired contributes only items that were copied into the record before. Raises
        UnknownModel if a response has items that were not copied, and its model is no longer
        served.
        """
        record = conversation.record
        responses = await self._read(caller, record)
        parts: list[Sequence[Item]] = []
        own: list[Item] = []
        unfinished = ""
        for entry in record.entries:
            if not isinstance(entry, ResponseReference):
                if not own:
                    parts.append(own)
                own.append(entry)
                continue
            added, is_unfinished = self._parts(entry, responses, conversation.conversation_id)
            if is_unfinished:
                unfinished = entry.name
            if added:
                parts += added
                own = []
        hidden = set(record.hidden)
        shown = [[item for item in part if item["id"] not in hidden] for part in parts]
        return Contents([part for part in shown if part], unfinished)

    def _parts(
        self,
        reference: ResponseReference,
        responses: Mapping[str, StoredResponse | _Unreadable],
        conversation_id: str,
    ) -> tuple[Parts, bool]:
        """Return the items of a response, and whether it is unfinished."""
        if reference.parts is not None:
            return reference.parts, False
        response = responses[reference.name]
        if isinstance(response, UnknownModel):
            raise response
        if isinstance(response, UnknownRequest):
            return (), self._may_be_created(reference, response)
        is_unfinished = (
            response.record.conversation_id == conversation_id
            and not response.live.entry.state.is_final
        )
        return _response_parts(response, conversation_id), is_unfinished

    async def _read(
        self, caller: Caller, record: ConversationRecord
    ) -> dict[str, StoredResponse | _Unreadable]:
        """Read the responses whose items were not copied into ``record``; return them by name.

        A response without a request is represented by its UnknownRequest, and one whose model is no
        longer served by its UnknownModel.
        """
        references = [it for it in record.references if it.parts is None]
        found: dict[str, StoredResponse | _Unreadable] = {}
        for start in range(0, len(references), READS_AT_ONCE):
            names = [it.name for it in references[start : start + READS_AT_ONCE]]
            read = await asyncio.gather(*(self._response(caller, name) for name in names))
            found.update(zip(names, read, strict=True))
        return found

    async def _response(self, caller: Caller, name: str) -> StoredResponse | _Unreadable:
        try:
            return await self._responses.get(caller, PREFIX + name)
        except (UnknownRequest, UnknownModel) as error:
            return error

    def _may_be_created(self, reference: ResponseReference, error: UnknownRequest) -> bool:
        if isinstance(error, ForgottenRequest):
            return False
        return self._ledger_time() - reference.added_at < _CREATION_S

    async def add_response(
        self, caller: Caller, conversation: StoredConversation, name: str
    ) -> bool:
        """Add a response to a conversation, before the request of the response is created.

        Items of ended responses are copied into the record, as by ``change``. Return False, and add
        nothing, if the conversation has changed since it was read.
        """
        reference = ResponseReference(name, self._ledger_time())
        known = await self._copied(caller, conversation)
        try:
            await self._put(caller, known, known.record.with_response(reference))
        except ObjectConflict:
            return False
        return True

    async def remove_response(self, caller: Caller, conversation_id: str, name: str) -> None:
        """Remove a response with its items, unless the conversation does not exist.

        Raises the errors of ``change``.
        """
        with suppress(UnknownObject):
            await self.change(caller, conversation_id, lambda it: it.without_response(name))

    async def withdraw_response(
        self, caller: Caller, conversation_id: str, name: str, error: EverliftError
    ) -> None:
        """Remove a response whose request was rejected with ``error``.

        Nothing changes if the request was created nevertheless. If the ledger fails, the response
        stays, but it contributes nothing and soon no longer locks the conversation.
        """
        is_other = isinstance(error, RequestConflict)
        with suppress(EverliftError):
            if is_other or isinstance(await self._response(caller, name), UnknownRequest):
                await self.change(caller, conversation_id, lambda it: it.without_response(name))


def _response_parts(response: StoredResponse, conversation_id: str) -> Parts:
    """Return the items that a response adds to a conversation; none unless it has finished.

    The result is also empty if the response does not belong to the conversation. Such a
    response was created by another call, under the name that was added to the conversation.
    """
    is_of_this = response.record.conversation_id == conversation_id
    if not is_of_this or response.live.entry.state is not State.FINISHED:
        return ()
    name = response.name
    before = [
        shown_item(item, item_id("item", name, index))
        for index, item in enumerate(response.record.input_items)
    ]
    return tuple(before), tuple(response.output_items)


def _name(caller: Caller, conversation_id: str) -> str:
    if not _ID.fullmatch(conversation_id):
        raise _unknown(conversation_id)
    return object_name(caller.tenant, _KIND, conversation_id)


def _unknown(conversation_id: str) -> UnknownObject:
    return UnknownObject(f"there is no conversation {conversation_id[:64]}")
