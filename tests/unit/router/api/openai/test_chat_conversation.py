"""Conversation of a chat completion's fields: continued messages, documents, reasoning effort."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pydantic_core import to_json

from everlift.errors import InvalidRequest, OutOfRange
from router.api.anthropic import messages
from router.api.anthropic.fields import CountTokensFields
from router.api.http.fields import parse
from router.api.openai.chat_conversation import chat_conversation
from router.api.openai.conversations import conversations
from router.api.openai.fields import ChatFields, TokenizeFields
from router.api.openai.responses import responses
from router.api.openai.responses.fields import InputTokensFields
from router.chat import checks
from router.chat.conversation import Conversation
from router.chat.messages import MAX_BYTES

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "It is"}
CALLING = {
    **ASSISTANT,
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
}


@pytest.fixture
def serialising_threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return a set to which the threads that check the size of a JSON value are added."""
    threads: set[int] = set()

    def serialised(value: Any, **options: Any) -> bytes:
        threads.add(threading.get_ident())
        return to_json(value, **options)

    monkeypatch.setattr(checks, "to_json", serialised)
    return threads


async def converted(**fields: Any) -> Conversation:
    return await chat_conversation(parse(ChatFields, {"messages": [USER, ASSISTANT], **fields}))


@pytest.mark.parametrize(
    ("fields", "adds", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
        ({"continue_final_message": False, "add_generation_prompt": None}, True, False),
    ],
)
async def test_final_message_is_continued_or_followed(
    fields: dict[str, Any], adds: bool, continues: bool
) -> None:
    found = await converted(**fields)
    assert (found.add_generation_prompt, found.continue_final_message) == (adds, continues)
    body = {"messages": [USER, ASSISTANT], **fields}
    assert await chat_conversation(parse(TokenizeFields, body)) == found


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [USER, CALLING]}, "messages[1].tool_calls"),
    ],
)
async def test_message_that_cannot_be_continued_is_refused(
    fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message") as caught:
        await converted(continue_final_message=True, **fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("effort", "variables"),
    [
        (None, {}),
        ("high", {"reasoning_effort": "high"}),
        ("none", {"reasoning_effort": "none", "enable_thinking": False}),
    ],
)
async def test_reasoning_effort_becomes_template_variables(
    effort: str | None, variables: dict[str, Any]
) -> None:
    assert (await converted(reasoning_effort=effort)).template_variables == variables
    kwargs = {"enable_thinking": True, "a": 1}
    merged = await converted(reasoning_effort=effort, chat_template_kwargs=kwargs)
    assert merged.template_variables == variables | kwargs


async def test_unknown_reasoning_effort_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^reasoning_effort: .*'minimal'") as caught:
        await converted(reasoning_effort="some")
    assert caught.value.field == "reasoning_effort"


@pytest.mark.parametrize(
    ("fields", "inline"),
    [
        ({}, True),
        ({"messages": [{**USER, "x": [1] * 5000}]}, False),
        ({"documents": [{"x": [1] * 5000}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": [1] * 5000}}]}, False),
    ],
)
async def test_large_chats_are_converted_in_a_thread(
    fields: dict[str, Any], inline: bool, serialising_threads: set[int]
) -> None:
    await converted(**fields)
    assert len(serialising_threads) == 1
    assert (threading.get_ident() in serialising_threads) == inline


LARGE = {**USER, "x": [1] * 5000}


@pytest.mark.parametrize(
    "convert",
    [
        lambda: messages._conversation(
            parse(CountTokensFields, {"model": "m", "messages": [LARGE]})
        ),
        lambda: responses._conversation(parse(InputTokensFields, {"input": [LARGE]}), []),
        lambda: conversations._new_items([LARGE], ""),
    ],
    ids=["messages", "responses", "conversations"],
)
async def test_large_requests_of_all_apis_are_converted_in_a_thread(
    convert: Callable[[], Awaitable[object]], serialising_threads: set[int]
) -> None:
    await convert()
    assert len(serialising_threads) == 1
    assert threading.get_ident() not in serialising_threads


async def test_documents_are_limited_and_passed_on() -> None:
    documents = [{"title": "a", "text": "b"}, {"c": [1]}]
    assert (await converted(documents=documents)).documents == documents
    assert (await converted()).documents is None
    with pytest.raises(OutOfRange, match=f"^documents has .* at most {MAX_BYTES}"):
        await converted(documents=[{"text": "a" * MAX_BYTES}])
    with pytest.raises(InvalidRequest, match=r"^documents\[1\]: ") as caught:
        await converted(documents=[{}, "a"])
    assert caught.value.field == "documents[1]"
