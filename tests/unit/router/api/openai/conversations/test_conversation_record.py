"""Stored form of conversations, and the form in which their items are returned."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.errors import OutOfRange, RequestConflict
from router.api.openai.conversations.record import (
    MAX_COPIED_BYTES,
    MAX_RESPONSES,
    ConversationRecord,
    Entry,
    Parts,
    ResponseReference,
    added_items,
    idempotency_digest,
    shown_item,
)
from router.api.openai.responses.items import input_turns, items_of
from router.chat.conversation import Turn
from tests.support.router.conversations import turns

_TEXTS = st.text(max_size=8)


@st.composite
def records(draw: st.DrawFn) -> ConversationRecord:
    entries: list[Entry] = []
    for number in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            parts = draw(st.sampled_from([None, (), (({"id": "a"},), ({"id": "b"}, {"id": "c"}))]))
            entries.append(ResponseReference(f"r{number}", draw(st.floats(0, 2e9)), parts))
        else:
            entries.append({"id": f"i{number}", "type": "message", "content": draw(_TEXTS)})
    hidden = draw(st.lists(st.sampled_from("abc"), unique=True).map(tuple))
    metadata = draw(st.dictionaries(_TEXTS, _TEXTS, max_size=3))
    return ConversationRecord(draw(st.integers(0, 2**40)), metadata, tuple(entries), hidden)


@given(records())
def test_record_survives_storage(record: ConversationRecord) -> None:
    assert ConversationRecord.from_bytes(record.to_bytes()) == record


@given(records(), st.integers(0, 6))
def test_added_response_is_found_and_removed(record: ConversationRecord, number: int) -> None:
    name = f"r{number}"
    rest = record.without_response(name)
    assert not rest.has_response(name)
    added = rest.with_response(ResponseReference(name, 1.0))
    assert added.has_response(name)
    later = added.with_items([{"id": "later", "type": "message"}])
    assert later.before_response(name) == rest
    assert added.without_response(name) == rest
    assert rest.before_response(name) is rest


@given(records(), st.integers(0, 6))
def test_removed_item_is_gone_or_hidden(record: ConversationRecord, number: int) -> None:
    item_id = f"i{number}"
    left = record.without_item(item_id)
    own = [it for it in record.entries if not isinstance(it, ResponseReference)]
    if item_id in [it["id"] for it in own]:
        assert len(left.entries) == len(record.entries) - 1
    else:
        assert left.entries == record.entries
    assert left.hidden == (*record.hidden, item_id)
    assert left.without_item(item_id) == left


def test_repeated_call_adds_its_items_once() -> None:
    key, other = (idempotency_digest("/items", f"t/{name}") for name in "ab")
    raw = [{"role": "user", "content": "a"}, {"role": "user", "content": "a"}]
    items = added_items(raw, key)
    assert items == added_items(raw, key) and len({it["id"] for it in items}) == 2
    once = ConversationRecord(0, {}).with_added(items, key)
    assert once.entries == tuple(items) and once.with_added(items, key) is once
    for wrong in (raw[:1], [{"role": "user", "content": "b"}]):
        with pytest.raises(RequestConflict):
            once.with_added(added_items(wrong, key), key)
    deleted = once.without_item(items[0]["id"])
    assert deleted.with_added(items, key) is deleted
    assert len(once.with_added(added_items(raw, other), other).entries) == 4
    assert len(once.with_added(added_items(raw, ""), "").entries) == 4


def test_idempotency_digest_depends_on_path_and_tenant() -> None:
    calls = [("/a", "t/k"), ("/b", "t/k"), ("/a", "u/k"), ("/a", "k")]
    assert len({idempotency_digest(*call) for call in calls}) == 4


@given(turns())
def test_shown_items_have_the_same_turns(given: tuple[Turn, ...]) -> None:
    shown = [shown_item(item, f"i{at}") for at, item in enumerate(items_of(given))]
    assert tuple(input_turns(shown, "items")) == given
    assert [item["id"] for item in shown] == [f"i{at}" for at in range(len(shown))]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (
            {"role": "user", "content": "a", "status": None},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}],
                "status": "completed",
            },
        ),
        (
            {"id": "mine", "role": "assistant", "content": "a"},
            {
                "type": "message",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
                ],
                "status": "completed",
            },
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": "a", "status": "incomplete"},
            {"type": "function_call_output", "call_id": "c", "output": "a", "status": "incomplete"},
        ),
        (
            {"type": "reasoning", "content": []},
            {"type": "reasoning", "content": [], "summary": []},
        ),
    ],
)
def test_shown_item_has_openai_form(item: dict[str, Any], expected: dict[str, Any]) -> None:
    assert shown_item(item, "i1") == {"id": "i1", **expected}


def test_limits_of_a_record_are_enforced() -> None:
    references = tuple(ResponseReference(f"r{number}", 0.0) for number in range(MAX_RESPONSES))
    full = ConversationRecord(0, {}, references)
    with pytest.raises(OutOfRange, match="1024 responses"):
        full.with_response(ResponseReference("r", 0.0))
    large = ConversationRecord(0, {}, ({"id": "i", "content": "a" * (1 << 20)},))
    with pytest.raises(OutOfRange, match="1048576 are allowed"):
        large.to_bytes()


def test_copies_of_responses_leave_room_for_more() -> None:
    references = tuple(ResponseReference(f"r{number}", 0.0) for number in range(4))
    record = ConversationRecord(0, {}, references)
    half: Parts = (({"id": "i", "content": "a" * (MAX_COPIED_BYTES // 2)},),)
    small: Parts = (({"id": "j"},),)
    copied = record.with_copies({"r0": small, "r1": half, "r2": half, "r3": small})
    assert [it.parts for it in copied.references] == [small, half, None, small]
    assert len(copied.to_bytes()) <= MAX_COPIED_BYTES
    while len(copied.references) < MAX_RESPONSES:
        copied = copied.with_response(ResponseReference("a" * 64, time.time()))
    assert ConversationRecord.from_bytes(copied.to_bytes()) == copied
