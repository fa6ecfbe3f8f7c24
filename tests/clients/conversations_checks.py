"""Checks of the openai package's Conversations against a scripted model at EVERLIFT_HTTP.

The model generates the text that its prompt requests (tests/support/scripted.py).
tests/integration runs this module in an environment with this client.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

BASE = f"http://{os.environ['EVERLIFT_HTTP']}/v1"
MODEL = os.environ["EVERLIFT_MODEL"]
HELLO: Any = {"type": "message", "role": "user", "content": "Hello"}
HI: Any = {"type": "message", "role": "assistant", "content": "Hi."}


def saying(said: str, **more: Any) -> dict[str, Any]:
    """Return a request that is answered with ``said``."""
    more = {"temperature": 0, "max_output_tokens": 200, **more}
    return {"model": MODEL, "input": f"say:{said}", **more}


@pytest.fixture
def client() -> Iterator[OpenAI]:
    with OpenAI(base_url=BASE, api_key="none", max_retries=0) as client:
        yield client


def texts(client: OpenAI, conversation_id: str, **query: Any) -> list[str]:
    """Return the texts of a conversation's messages, oldest first."""
    listed = client.conversations.items.list(conversation_id, order="asc", **query)
    return [item.content[0].text for item in listed]


def test_conversation_is_created_changed_and_deleted(client: OpenAI) -> None:
    created = client.conversations.create(metadata={"a": "b"})
    assert created.object == "conversation" and created.id.startswith("conv_")
    assert abs(created.created_at - time.time()) < 60
    assert client.conversations.retrieve(created.id) == created
    changed = client.conversations.update(created.id, metadata={"c": "d"})
    assert (changed.metadata, changed.created_at) == ({"c": "d"}, created.created_at)
    assert client.conversations.retrieve(created.id) == changed
    deleted = client.conversations.delete(created.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (
        created.id,
        True,
        "conversation.deleted",
    )
    for call in (client.conversations.retrieve, client.conversations.delete):
        with pytest.raises(openai.NotFoundError, match=created.id):
            call(created.id)


def test_items_are_added_listed_and_deleted(client: OpenAI) -> None:
    conversation_id = client.conversations.create(items=[HELLO, HI]).id
    more = [HELLO | {"content": f"{number}"} for number in range(5)]
    added = client.conversations.items.create(conversation_id, items=more)
    assert [item.content[0].text for item in added.data] == ["0", "1", "2", "3", "4"]
    assert texts(client, conversation_id, limit=2) == ["Hello", "Hi.", "0", "1", "2", "3", "4"]
    listed = list(client.conversations.items.list(conversation_id, limit=3))
    assert [item.content[0].text for item in listed][:2] == ["4", "3"]
    assert len({item.id for item in listed}) == 7
    answer = listed[-2]
    assert (answer.type, answer.role, answer.status) == ("message", "assistant", "completed")
    assert answer.content[0].type == "output_text"
    get = client.conversations.items.retrieve
    assert get(answer.id, conversation_id=conversation_id) == answer
    left = client.conversations.items.delete(answer.id, conversation_id=conversation_id)
    assert left.id == conversation_id
    with pytest.raises(openai.NotFoundError, match=answer.id):
        get(answer.id, conversation_id=conversation_id)
    assert texts(client, conversation_id) == ["Hello", "0", "1", "2", "3", "4"]


def test_responses_continue_the_conversation(client: OpenAI) -> None:
    items = [{"type": "message", "role": "system", "content": "Be brief."}, HELLO, HI]
    conversation_id = client.conversations.create(items=items).id
    first = client.responses.create(**saying("First.", conversation=conversation_id))
    named: Any = {"id": conversation_id}
    with client.responses.stream(**saying("Second.", conversation=named)) as stream:
        second = stream.get_final_response()
    third = client.responses.create(**saying("Third.", conversation=conversation_id))
    answers = [first, second, third]
    assert [it.output_text for it in answers] == ["First.", "Second.", "Third."]
    assert {it.conversation.id for it in answers if it.conversation} == {conversation_id}
    assert client.responses.retrieve(second.id).conversation == second.conversation
    said = ["Be brief.", "Hello", "Hi."]
    for answer in answers:
        said += [f"say:{answer.output_text}", answer.output_text]
    assert texts(client, conversation_id) == said
    # The prompt and the output of the turn before are reused, but for the last block.
    assert third.usage is not None and third.usage.input_tokens_details.cached_tokens > 0
    roles = ["system", "user", "assistant", *["user", "assistant"] * 3]
    whole = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    sent = client.responses.create(**saying("", store=False) | {"input": whole[:-1]})
    assert sent.usage is not None and sent.usage.input_tokens == third.usage.input_tokens
    asked = {"model": MODEL, "input": "say:Third.", "conversation": conversation_id}
    assert client.responses.input_tokens.count(**asked).input_tokens > third.usage.input_tokens


def test_items_of_responses_are_deleted(client: OpenAI) -> None:
    conversation_id = client.conversations.create().id
    response = client.responses.create(**saying("First.", conversation=conversation_id))
    [message] = response.output
    client.conversations.items.delete(message.id, conversation_id=conversation_id)
    assert texts(client, conversation_id) == ["say:First."]
    client.responses.create(**saying("Second.", conversation=conversation_id))
    client.responses.delete(response.id)
    assert texts(client, conversation_id) == ["say:Second.", "Second."]


def test_background_response_joins_the_conversation(client: OpenAI) -> None:
    conversation_id = client.conversations.create().id
    request = saying("Later.", conversation=conversation_id, background=True)
    response = client.responses.create(**request)
    assert response.conversation is not None and response.conversation.id == conversation_id
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress") and time.monotonic() < deadline:
        response = client.responses.retrieve(response.id)
    assert texts(client, conversation_id) == ["say:Later.", "Later."]


def test_rejected_response_leaves_no_trace(client: OpenAI) -> None:
    conversation_id = client.conversations.create().id
    with pytest.raises(openai.APIStatusError):
        client.responses.create(**saying("a", conversation=conversation_id) | {"model": "none"})
    answer = client.responses.create(**saying("Yes.", conversation=conversation_id))
    assert answer.output_text == "Yes."
    assert texts(client, conversation_id) == ["say:Yes.", "Yes."]


def test_repeated_response_is_added_once(client: OpenAI) -> None:
    conversation_id = client.conversations.create(items=[HELLO, HI]).id
    request = saying("Yes.", conversation=conversation_id)
    name = {"Idempotency-Key": f"{conversation_id}-1"}
    first, again = [client.responses.create(**request, extra_headers=name) for _ in range(2)]
    assert (again.id, again.output_text) == (first.id, "Yes.")
    assert texts(client, conversation_id) == ["Hello", "Hi.", "say:Yes.", "Yes."]


def test_invalid_conversations_are_refused(client: OpenAI) -> None:
    conversation_id = client.conversations.create().id
    response = client.responses.create(**saying("Yes.", conversation=conversation_id))
    for more, status, words in (
        ({"conversation": "conv_missing"}, 404, "conv_missing"),
        ({"conversation": f"conv_{'0' * 32}"}, 404, "there is no conversation"),
        ({"conversation": {"name": "a"}}, 400, "conversation"),
        ({"conversation": conversation_id, "store": False}, 400, "store"),
        (
            {"conversation": conversation_id, "previous_response_id": response.id},
            400,
            "exclude each other",
        ),
        ({"previous_response_id": response.id}, 400, conversation_id),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            client.responses.create(**saying("a") | more)
        assert words in str(caught.value) and caught.value.status_code == status, more
    for items, words in (
        ([{"type": "image_generation_call"}], "items[0]"),
        ([HELLO, HELLO | {"content": [{"type": "input_image"}]}], "items[1].content[0]"),
        ([HELLO] * 21, "items"),
        ([], "items"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.conversations.items.create(conversation_id, items=items)
        assert words in str(caught.value), items
    assert len(texts(client, conversation_id)) == 2


def test_repeated_items_are_added_once(client: OpenAI) -> None:
    conversation_id = client.conversations.create().id
    add = client.conversations.items.create
    name = {"Idempotency-Key": "turn-1"}
    first = add(conversation_id, items=[HELLO, HI], extra_headers=name)
    assert add(conversation_id, items=[HELLO, HI], extra_headers=name) == first
    assert texts(client, conversation_id) == ["Hello", "Hi."]
    with pytest.raises(openai.ConflictError, match="idempotency key"):
        add(conversation_id, items=[HI], extra_headers=name)
    with pytest.raises(openai.BadRequestError, match="idempotency-key"):
        add(conversation_id, items=[HI], extra_headers={"Idempotency-Key": "a b"})
    deleted = first.data[0].id
    client.conversations.items.delete(deleted, conversation_id=conversation_id)
    assert add(conversation_id, items=[HELLO, HI], extra_headers=name) == first
    assert texts(client, conversation_id) == ["Hi."]
    # Without a key, and in another conversation, the items are new.
    add(conversation_id, items=[HELLO])
    add(conversation_id, items=[HELLO])
    assert texts(client, conversation_id) == ["Hi.", "Hello", "Hello"]
    other = client.conversations.create().id
    add(other, items=[HELLO, HI], extra_headers=name)
    assert texts(client, other) == ["Hello", "Hi."]


def test_repeated_conversation_is_created_once(client: OpenAI) -> None:
    create = client.conversations.create
    name = {"Idempotency-Key": f"talk-{time.time()}"}
    first = create(items=[HELLO], metadata={"a": "b"}, extra_headers=name)
    assert create(items=[HELLO], metadata={"a": "b"}, extra_headers=name) == first
    assert texts(client, first.id) == ["Hello"]
    with pytest.raises(openai.ConflictError, match="idempotency key"):
        create(items=[HI], extra_headers=name)
    assert create().id != create().id
