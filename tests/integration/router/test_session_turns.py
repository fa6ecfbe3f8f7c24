"""Chats of a session reuse the token ids of their earlier turns, with SmolLM2's tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from everlift import model_files
from everlift.client.client import AsyncClient
from everlift.errors import LedgerUnavailable
from everlift.hashes import BLOCK_SIZE, chunk_hashes
from everlift.model_files import ModelUnavailable
from router.ledger.base import MAX_TURNS
from router.ledger.entry import Stored, Turn
from tests.support.in_process import ROUTER, WORKER, Cluster, KeptLedger, cluster
from tests.support.router.http_client import JSON, ask
from worker.config import FakeModel

#: <|im_end|> ends an output; other tokens are random, and rarely survive decoding and encoding.
EOS = 2
FAKE = FakeModel(vocab_size=49152, max_model_len=8192, eos_token_id=EOS, eos_one_in=150)


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    try:
        model_files.locate("smollm2", "", weights=False)
    except ModelUnavailable as error:
        pytest.skip(str(error))


class WatchedLedger(KeptLedger):
    """Ledger that counts reads of a session's turns, and can fail or block them."""

    calls = 0
    error: Exception | None = None
    is_stuck = False

    async def turns(self, tenant: str, session_id: str, limit: int = MAX_TURNS) -> tuple[Turn, ...]:
        self.calls += 1
        if self.error is not None:
            raise self.error
        if self.is_stuck:
            await asyncio.Event().wait()
        return await super().turns(tenant, session_id, limit)


def served(routers: int) -> AbstractAsyncContextManager[Cluster]:
    router = replace(ROUTER, model="smollm2")
    worker = replace(WORKER, fake=FAKE, num_blocks=1024)
    return cluster(routers, 1, router, worker, WatchedLedger(time.monotonic))


@pytest.fixture
async def parts() -> AsyncIterator[Cluster]:
    async with served(1) as parts:
        yield parts


@pytest.fixture
async def two() -> AsyncIterator[Cluster]:
    async with served(2) as parts:
        yield parts


def watched(parts: Cluster) -> WatchedLedger:
    assert isinstance(parts.ledger, WatchedLedger)
    return parts.ledger


class Chat:
    def __init__(self, parts: Cluster, session: str, **options: Any) -> None:
        self._parts = parts
        self._headers = {**JSON, "x-session-id": session} if session else JSON
        self._options = {"max_tokens": 100, "temperature": 0, **options}
        self._number = 0
        self.messages: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.usage: dict[str, Any] = {}

    async def say(self, content: str, router: int = 0, **options: Any) -> Stored:
        self.messages.append({"role": "user", "content": content})
        self._number += 1
        name = f"r{self._number}-{id(self)}"
        body = {"messages": self.messages, **self._options, **options}
        headers = {**self._headers, "idempotency-key": name}
        address = self._parts.routers[router].http_address
        answer = await ask(address, "/v1/chat/completions", body, headers)
        assert answer.status == 200, answer.json
        self.usage = answer.json["usage"]
        self.answers = [choice["message"] for choice in answer.json["choices"]]
        self.messages.append(self.answers[0])
        return await self._parts.ledger.read(name)

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


def known(stored: Stored, choice: int = 0) -> list[int]:
    """Return the prompt and the output, without its end token."""
    output = list(stored.choices[choice].tokens)
    return [*stored.request.prompt_ids, *(output[:-1] if output[-1:] == [EOS] else output)]


async def test_turn_begins_with_prompt_and_answer(parts: Cluster) -> None:
    chat = Chat(parts, "s")
    before = await chat.say("How many?")
    for number in range(4):
        turn = await chat.say(f"And {number} more?")
        begin = known(before)
        assert list(turn.request.prompt_ids[: len(begin)]) == begin
        live = parts.routers[0]._requests._registry.recent.get(turn.request.request_id)
        assert live is not None
        assert list(live.request.chunk_hashes) == chunk_hashes(turn.request.prompt_ids)
        # The last token of an output was never computed.
        assert chat.cached == (len(begin) - 1) // BLOCK_SIZE * BLOCK_SIZE
        before = turn


@pytest.mark.parametrize("router", [0, 1])
async def test_turn_tokenises_only_its_new_text(
    two: Cluster, router: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Router 1 reads the earlier turn from the ledger."""
    tokenizer, texts = two.routers[router]._models.first.tokenizer, list[str]()
    encode = tokenizer.encode

    def recorded(text: str, *, add_special_tokens: bool = True) -> list[int]:
        texts.append(text)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", recorded)
    chat = Chat(two, "s")
    await chat.say("How many? " * 400, router=0)
    texts.clear()
    await chat.say("And more?", router=router)
    assert "And more?" in texts[0]
    # The new message with the template's text around it, the end of which is tokenised twice.
    assert sum(map(len, texts)) < 150


async def test_turn_of_another_session_is_tokenised(parts: Cluster) -> None:
    served = parts.routers[0]._models.first
    for session in ("", "other"):
        chat = Chat(parts, "s")
        before = await chat.say("How many?")
        other = Chat(parts, session)
        other.messages = chat.messages
        turn = await other.say("More?")
        begin = known(before)
        assert list(turn.request.prompt_ids[: len(begin)]) != begin
        assert served.tokenizer.decode(turn.request.prompt_ids)


async def test_turn_of_another_salt_is_tokenised(parts: Cluster) -> None:
    chat = Chat(parts, "s", cache_salt="a")
    begin = known(await chat.say("How many?"))
    turn = await chat.say("More?", cache_salt="b")
    assert list(turn.request.prompt_ids[: len(begin)]) != begin
    assert chat.cached == 0


@pytest.mark.parametrize("choice", [0, 1])
async def test_turn_continues_the_choice_that_the_client_kept(parts: Cluster, choice: int) -> None:
    chat = Chat(parts, "s", temperature=1)
    first = await chat.say("Choose.", n=2, seed=1)
    chat.messages[-1] = chat.answers[choice]
    begin = known(first, choice)
    turn = await chat.say("Go on.", n=1)
    assert list(turn.request.prompt_ids[: len(begin)]) == begin


async def test_edited_answer_keeps_the_prompt(parts: Cluster) -> None:
    chat = Chat(parts, "s")
    before = await chat.say("How many?")
    chat.messages[-1]["content"] += "!"
    turn = await chat.say("More?")
    prompt = list(before.request.prompt_ids)
    assert list(turn.request.prompt_ids[: len(prompt)]) == prompt
    begin = known(before)
    assert list(turn.request.prompt_ids[: len(begin)]) != begin


async def test_forgotten_turn_is_not_reused(parts: Cluster) -> None:
    chat = Chat(parts, "s")
    before = await chat.say("How many?")
    async with AsyncClient(parts.address) as client:
        await client.forget(before.request.request_id)
    turn = await chat.say("More?")
    begin = known(before)
    assert list(turn.request.prompt_ids[: len(begin)]) != begin


async def test_repeated_chat_is_the_same_request(parts: Cluster) -> None:
    """The prompt is tokenised differently the second time, since the earlier turn is forgotten."""
    chat = Chat(parts, "s")
    before = await chat.say("How many?")
    body = {
        "messages": [*chat.messages, {"role": "user", "content": "More?"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    headers = {**JSON, "x-session-id": "s", "idempotency-key": "same"}
    address = parts.routers[0].http_address
    first = await ask(address, "/v1/chat/completions", body, headers)
    parts.routers[0]._requests._turns.forget(before.request.request_id)
    second = await ask(address, "/v1/chat/completions", body, headers)
    assert (first.status, second.status) == (200, 200)
    assert second.json["choices"] == first.json["choices"]


async def test_turn_continues_at_another_router(two: Cluster) -> None:
    chat = Chat(two, "s")
    before = await chat.say("How many?")
    for number, router in enumerate((1, 0, 0, 1)):
        turn = await chat.say(f"And {number} more?", router)
        begin = known(before)
        assert list(turn.request.prompt_ids[: len(begin)]) == begin
        before = turn
    # One for the first turn, and one for each turn whose predecessor ended at the other router.
    assert watched(two).calls == 4


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_turn_is_tokenised_if_the_ledger_fails(two: Cluster, is_stuck: bool) -> None:
    chat = Chat(two, "s")
    before = await chat.say("How many?")
    watched(two).is_stuck = is_stuck
    watched(two).error = None if is_stuck else LedgerUnavailable("away")
    turn = await chat.say("More?", 1)
    begin = known(before)
    assert watched(two).calls == 2
    assert list(turn.request.prompt_ids[: len(begin)]) != begin


async def test_turn_of_another_model_is_not_read(two: Cluster) -> None:
    chat = Chat(two, "s")
    before = await chat.say("How many?")
    two.routers[1]._models.first.fingerprint = "other"
    turn = await chat.say("More?", 1)
    begin = known(before)
    assert list(turn.request.prompt_ids[: len(begin)]) != begin
