"""Conversations in a ledger: concurrent changes, tenants, and the states of their responses."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from everlift.errors import (
    ForgottenRequest,
    LedgerUnavailable,
    QueueFull,
    RequestConflict,
    UnknownModel,
    UnknownObject,
    UnknownRequest,
)
from router.api.openai.conversations.record import ConversationRecord, ResponseReference
from router.api.openai.conversations.stored import StoredConversation, StoredConversations
from router.auth.caller import ANYONE, Caller
from router.chat.conversation import Turn
from router.ledger.entry import State
from router.ledger.memory.memory import MemoryLedger

NEW = ConversationRecord(7, {"a": "b"})
NOW = 1000.0


class Responses:
    """Responses by the name of their request; ``get`` raises UnknownRequest for others."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    async def get(self, caller: Caller, response_id: str) -> Any:
        found = self.found.get(response_id.removeprefix("resp_"), UnknownRequest("none"))
        if isinstance(found, Exception):
            raise found
        return found

    def add(self, name: str, conversation_id: str, state: State = State.FINISHED) -> None:
        output = {"id": f"out-{name}", "role": "assistant", "content": f"to {name}"}
        self.found[name] = SimpleNamespace(
            name=name,
            record=SimpleNamespace(
                conversation_id=conversation_id, input_items=[{"role": "user", "content": name}]
            ),
            live=SimpleNamespace(entry=SimpleNamespace(state=state)),
            output_items=[output],
        )


class Yielding(MemoryLedger):
    """Ledger that lets other tasks run before each write."""

    async def put_object(
        self, name: str, data: bytes, version: int, retention_s: float | None = None
    ) -> int:
        await asyncio.sleep(0)
        return await super().put_object(name, data, version, retention_s)


@pytest.fixture
def responses() -> Responses:
    return Responses()


@pytest.fixture
def ledger() -> MemoryLedger:
    return Yielding(time.time)


@pytest.fixture
def stored(ledger: MemoryLedger, responses: Responses) -> StoredConversations:
    return StoredConversations(ledger, cast("Any", responses), lambda: NOW)


async def reread(
    stored: StoredConversations, conversation: StoredConversation
) -> ConversationRecord:
    return (await stored.get(ANYONE, conversation.conversation_id)).record


async def referring(stored: StoredConversations, *names: str, age_s: float = 60.0) -> Any:
    """Store a conversation that begins with an item, and then refers to responses."""
    references = [ResponseReference(name, NOW - age_s) for name in names]
    item = {"id": "own", "role": "user", "content": "own"}
    return await stored.create(ANYONE, ConversationRecord(7, {}, (item, *references)))


async def test_conversation_is_invisible_to_other_tenants(stored: StoredConversations) -> None:
    ann, bob = Caller("ann", frozenset()), Caller("bob", frozenset())
    conversation = await stored.create(ann, NEW)
    found = await stored.get(ann, conversation.conversation_id)
    assert found == conversation and found.record == NEW
    for caller in (bob, ANYONE):
        with pytest.raises(UnknownObject):
            await stored.get(caller, conversation.conversation_id)
        with pytest.raises(UnknownObject):
            await stored.delete(caller, conversation.conversation_id)
    await stored.delete(ann, conversation.conversation_id)
    with pytest.raises(UnknownObject):
        await stored.get(ann, conversation.conversation_id)


@pytest.mark.parametrize("name", ["", "conv_", "conv_../a", "a/b", f"conv_{'g' * 32}"])
async def test_malformed_id_is_unknown(stored: StoredConversations, name: str) -> None:
    with pytest.raises(UnknownObject):
        await stored.get(ANYONE, name)


async def test_concurrent_changes_are_all_applied(stored: StoredConversations) -> None:
    conversation = await stored.create(ANYONE, NEW)

    async def add(number: int) -> None:
        item = {"id": f"{number}"}
        await stored.change(
            ANYONE, conversation.conversation_id, lambda record: record.with_items([item])
        )

    await asyncio.gather(*(add(number) for number in range(8)))
    entries = (await reread(stored, conversation)).entries
    assert {entry["id"] for entry in entries if isinstance(entry, dict)} == set("01234567")


async def test_response_is_added_only_to_unchanged_record(stored: StoredConversations) -> None:
    conversation = await stored.create(ANYONE, NEW)
    adding = [stored.add_response(ANYONE, conversation, name) for name in ("r1", "r2")]
    assert sorted(await asyncio.gather(*adding)) == [False, True]
    assert len((await reread(stored, conversation)).references) == 1


async def test_finished_responses_have_their_items(
    stored: StoredConversations, responses: Responses
) -> None:
    conversation = await referring(stored, "r1", "r2")
    for name in ("r1", "r2"):
        responses.add(name, conversation.conversation_id)
    contents = await stored.contents(ANYONE, conversation)
    assert not contents.unfinished
    assert contents.turns == [
        Turn("user", ("own",)),
        Turn("user", ("r1",)),
        Turn("assistant", ("to r1",)),
        Turn("user", ("r2",)),
        Turn("assistant", ("to r2",)),
    ]
    assert len({item["id"] for item in contents.items}) == 5


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED, State.EXPIRED])
async def test_response_that_failed_has_no_items(
    stored: StoredConversations, responses: Responses, state: State
) -> None:
    conversation = await referring(stored, "r1")
    responses.add("r1", conversation.conversation_id, state)
    contents = await stored.contents(ANYONE, conversation)
    assert ([item["id"] for item in contents.items], contents.unfinished) == (["own"], "")


@pytest.mark.parametrize("state", [State.QUEUED, State.RUNNING])
async def test_unfinished_response_is_named(
    stored: StoredConversations, responses: Responses, state: State
) -> None:
    conversation = await referring(stored, "r1", "r2")
    responses.add("r1", conversation.conversation_id, state)
    contents = await stored.contents(ANYONE, conversation)
    assert ([item["id"] for item in contents.items], contents.unfinished) == (["own"], "r1")


@pytest.mark.parametrize(
    ("age_s", "error", "unfinished"),
    [
        (60.0, UnknownRequest("none"), ""),
        (0.0, UnknownRequest("none"), "r1"),
        (0.0, ForgottenRequest("erased"), ""),
    ],
)
async def test_missing_request_is_skipped_or_awaited(
    stored: StoredConversations,
    responses: Responses,
    age_s: float,
    error: Exception,
    unfinished: str,
) -> None:
    conversation = await referring(stored, "r1", age_s=age_s)
    responses.found["r1"] = error
    contents = await stored.contents(ANYONE, conversation)
    assert ([item["id"] for item in contents.items], contents.unfinished) == (["own"], unfinished)


async def test_response_of_another_conversation_is_skipped(
    stored: StoredConversations, responses: Responses
) -> None:
    conversation = await referring(stored, "r1", age_s=0.0)
    responses.add("r1", "conv_other")
    contents = await stored.contents(ANYONE, conversation)
    assert ([item["id"] for item in contents.items], contents.unfinished) == (["own"], "")


@pytest.mark.parametrize("adds_response", [False, True])
async def test_items_outlive_the_requests_of_responses(
    stored: StoredConversations, responses: Responses, adds_response: bool
) -> None:
    conversation = await referring(stored, "r1", "r2", "r3")
    conversation_id = conversation.conversation_id
    for name, state in (("r1", State.FINISHED), ("r2", State.FAILED), ("r3", State.RUNNING)):
        responses.add(name, conversation_id, state)
    before = (await stored.contents(ANYONE, conversation)).parts
    if adds_response:
        assert await stored.add_response(ANYONE, conversation, "r4")
    else:
        await stored.change(ANYONE, conversation_id, lambda it: it.with_metadata({"c": "d"}))
    for name in ("r1", "r2"):
        del responses.found[name]
    used = await stored.get(ANYONE, conversation_id)
    assert [list(part) for part in (await stored.contents(ANYONE, used)).parts] == [
        list(part) for part in before
    ]
    responses.add("r3", conversation_id)
    turns = (await stored.contents(ANYONE, used)).turns
    assert turns[-2:] == [Turn("user", ("r3",)), Turn("assistant", ("to r3",))]


async def test_removed_response_takes_its_copy_along(
    stored: StoredConversations, responses: Responses
) -> None:
    conversation = await referring(stored, "r1", "r2")
    for name in ("r1", "r2"):
        responses.add(name, conversation.conversation_id)
    await stored.remove_response(ANYONE, conversation.conversation_id, "r1")
    left = await stored.get(ANYONE, conversation.conversation_id)
    items = (await stored.contents(ANYONE, left)).items
    assert [item["id"] for item in items][::2] == ["own", "out-r2"]
    await stored.delete(ANYONE, conversation.conversation_id)
    await stored.remove_response(ANYONE, conversation.conversation_id, "r2")


async def test_response_of_an_unserved_model_can_be_removed(
    stored: StoredConversations, responses: Responses
) -> None:
    conversation = await referring(stored, "r1", "r2")
    responses.add("r1", conversation.conversation_id)
    responses.found["r2"] = UnknownModel("no longer served")
    with pytest.raises(UnknownModel):
        await stored.contents(ANYONE, conversation)
    await stored.remove_response(ANYONE, conversation.conversation_id, "r2")
    left = await stored.get(ANYONE, conversation.conversation_id)
    items = (await stored.contents(ANYONE, left)).items
    assert [item["id"] for item in items][::2] == ["own", "out-r1"]


async def test_deleted_items_are_hidden(stored: StoredConversations, responses: Responses) -> None:
    conversation = await referring(stored, "r1")
    responses.add("r1", conversation.conversation_id)
    for item_id in ("own", "out-r1"):
        conversation = await stored.change(
            ANYONE, conversation.conversation_id, lambda it, i=item_id: it.without_item(i)
        )
    assert (await stored.contents(ANYONE, conversation)).turns == [Turn("user", ("r1",))]


@pytest.mark.parametrize(
    ("exists", "error", "is_kept"),
    [
        (False, QueueFull("full"), False),
        (True, LedgerUnavailable("away"), True),
        (True, RequestConflict("other body"), False),
    ],
)
async def test_rejected_response_is_withdrawn(
    stored: StoredConversations, responses: Responses, exists: bool, error: Any, is_kept: bool
) -> None:
    conversation = await referring(stored, "r1")
    if exists:
        responses.add("r1", conversation.conversation_id, State.QUEUED)
    await stored.withdraw_response(ANYONE, conversation.conversation_id, "r1", error)
    assert (await reread(stored, conversation)).has_response("r1") is is_kept


async def test_withdrawal_without_ledger_raises_nothing(
    stored: StoredConversations, responses: Responses
) -> None:
    conversation = await referring(stored, "r1")
    responses.found["r1"] = LedgerUnavailable("away")
    error = QueueFull("full")
    await stored.withdraw_response(ANYONE, conversation.conversation_id, "r1", error)
    assert (await reread(stored, conversation)).has_response("r1")
