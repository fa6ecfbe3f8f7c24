"""Chats of a session reuse the token ids of their earlier turns, with SmolLM2's tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from everlift import model_files
from everlift.client.client import AsyncClient
from everlift.hashes import BLOCK_SIZE
from everlift.model_files import ModelUnavailable
from router.ledger.entry import Stored
from tests.support.in_process import ROUTER, WORKER, Cluster, cluster
from tests.support.router.http_client import JSON, ask
from worker.config import FakeModel

#: <|im_end|> ends an output; the others are random, so that their text rarely has the same tokens.
EOS = 2
FAKE = FakeModel(vocab_size=49152, max_model_len=8192, eos_token_id=EOS, eos_one_in=150)


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    try:
        model_files.locate("smollm2", "", weights=False)
    except ModelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
async def parts() -> AsyncIterator[Cluster]:
    router = replace(ROUTER, model="smollm2")
    worker = replace(WORKER, fake=FAKE, num_blocks=1024)
    async with cluster(1, 1, router, worker) as parts:
        yield parts


class Chat:
    def __init__(self, parts: Cluster, session: str, **options: Any) -> None:
        self._parts = parts
        self._headers = {**JSON, "x-session-id": session} if session else JSON
        self._options = {"max_tokens": 100, "temperature": 0, **options}
        self._number = 0
        self.messages: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.usage: dict[str, Any] = {}

    async def say(self, content: str, **options: Any) -> Stored:
        self.messages.append({"role": "user", "content": content})
        self._number += 1
        name = f"r{self._number}-{id(self)}"
        body = {"messages": self.messages, **self._options, **options}
        headers = {**self._headers, "idempotency-key": name}
        address = self._parts.routers[0].http_address
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
    """The prompt and the output, without the token that ended it."""
    output = list(stored.choices[choice].tokens)
    return [*stored.request.prompt_ids, *(output[:-1] if output[-1:] == [EOS] else output)]


async def test_turn_begins_with_prompt_and_answer(parts: Cluster) -> None:
    chat = Chat(parts, "s")
    before = await chat.say("How many?")
    for number in range(4):
        turn = await chat.say(f"And {number} more?")
        begin = known(before)
        assert list(turn.request.prompt_ids[: len(begin)]) == begin
        # The last token of an output was never computed.
        assert chat.cached == (len(begin) - 1) // BLOCK_SIZE * BLOCK_SIZE
        before = turn


async def test_turn_of_another_session_is_tokenised(parts: Cluster) -> None:
    served = parts.routers[0]._model
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
    """Also when its prompt is spliced otherwise by then."""
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
    parts.routers[0]._requests.turns.forget(before.request.request_id)
    second = await ask(address, "/v1/chat/completions", body, headers)
    assert (first.status, second.status) == (200, 200)
    assert second.json["choices"] == first.json["choices"]
