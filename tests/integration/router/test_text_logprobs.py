"""Log probabilities over HTTP where characters consist of several tokens, on the demo model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.router import chat_support
from tests.support.router.http_client import JSON, ask, streamed
from tests.support.scripted import SAY, scripted_cluster

TEXT = "a \N{ROCKET}\N{GRINNING FACE} caf\N{LATIN SMALL LETTER E WITH ACUTE}!"
CHAT = {
    "messages": [{"role": "user", "content": f"{SAY}{TEXT}"}],
    "logprobs": True,
    "top_logprobs": 3,
}


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    async with scripted_cluster(tmp_path / "model", chat_support.HERMES) as parts:
        yield parts.routers[0].http_address


async def content(address: str, **fields: Any) -> tuple[str, list[Any]]:
    """Return text and logprob entries of a chat, after a comparison with its stream."""
    body = {**CHAT, **fields}
    [choice] = (await ask(address, "/v1/chat/completions", body)).json["choices"]
    text, entries = choice["message"]["content"], choice["logprobs"]["content"]
    async with streamed(address, "/v1/chat/completions", {**body, "stream": True}, JSON) as stream:
        chunks = [
            event.json["choices"][0] async for event in stream.events() if event.data[0] == "{"
        ]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == text
    parts = [entry for chunk in chunks for entry in chunk["logprobs"]["content"]]
    assert [part["bytes"] for part in parts] == [entry["bytes"] for entry in entries]
    assert chunks[-1]["stop_reason"] == choice["stop_reason"]
    return text, entries


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, TEXT), ({"stop": [" caf"]}, TEXT.partition(" caf")[0])]
)
async def test_chat_logprobs_bytes_join_to_text(address: str, fields: Any, expected: str) -> None:
    text, entries = await content(address, **fields)
    assert text == expected
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    assert any(entry["token"] == "\N{REPLACEMENT CHARACTER}" for entry in entries)


async def test_completion_logprobs_offsets_index_text(address: str) -> None:
    body = {
        "prompt": f"{SAY}{TEXT}<|im_end|>",
        "temperature": 0,
        "max_tokens": 40,
        "logprobs": 0,
    }
    [choice] = (await ask(address, "/v1/completions", body)).json["choices"]
    scores = choice["logprobs"]
    assert choice["text"] == TEXT
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        is_part = token.startswith("bytes:")
        assert TEXT[offset] in "🚀😀é" if is_part else TEXT.startswith(token, offset)
    assert scores["text_offset"].count(TEXT.index("\N{ROCKET}")) > 1
    assert [list(shown) for shown in scores["top_logprobs"]] == [
        [token] for token in scores["tokens"]
    ]
