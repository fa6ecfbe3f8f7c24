"""The conversation of `everlift chat`, without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.commands.chat import Conversation
from cluster.http_api import HttpApi
from everlift.errors import EverliftError


class Api(HttpApi):
    """HTTP API that streams the given texts, then fails or waits."""

    def __init__(self, *texts: str, error: EverliftError | None = None, waits: bool = False):
        self._texts = texts
        self._error = error
        self._waits = waits

    async def stream(self, path: str, body: object) -> AsyncIterator[Any]:
        for text in self._texts:
            yield {"choices": [{"delta": {"content": text}}]}
        if self._waits:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error


async def test_conversation_keeps_both_sides_of_an_answered_turn() -> None:
    conversation = Conversation(Api("Par", "is"), "model", {})
    await conversation.answer("capital?")
    assert conversation.messages == [
        {"role": "user", "content": "capital?"},
        {"role": "assistant", "content": "Paris"},
    ]


async def test_conversation_drops_a_turn_that_fails_midway() -> None:
    conversation = Conversation(Api("Par", error=EverliftError("lost")), "model", {})
    with pytest.raises(EverliftError):
        await conversation.answer("capital?")
    assert conversation.messages == []


async def test_conversation_adds_no_empty_answer() -> None:
    conversation = Conversation(Api("", ""), "model", {})
    await conversation.answer("capital?")
    assert [message["role"] for message in conversation.messages] == ["user"]


async def test_conversation_keeps_the_text_of_a_cancelled_answer() -> None:
    conversation = Conversation(Api("Par", waits=True), "model", {})
    answering = asyncio.create_task(conversation.answer("capital?"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert conversation.messages[-1] == {"role": "assistant", "content": "Par"}
