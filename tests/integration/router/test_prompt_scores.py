"""Log probabilities of prompts over HTTP, and completions without tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process import WORKER, Cluster, cluster
from tests.support.router import chat_support
from tests.support.router.http_client import JSON, ask, streamed
from tests.support.scripted import scripted_cluster
from worker.runner.fake_runner import expected_logprobs

COMPLETIONS = "/v1/completions"
PROMPTS = [list(b"ab"), list("cé".encode()), [7]]


@pytest.fixture
async def parts() -> AsyncIterator[Cluster]:
    async with cluster(workers=1) as parts:
        yield parts


@pytest.fixture
def address(parts: Cluster) -> str:
    return parts.routers[0].http_address


async def choices_of(address: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a whole answer, after a comparison with those of its stream.

    A chat's prompt_logprobs are moved into its first choice.
    """
    answer = await ask(address, path, body)
    assert answer.status == 200, answer.body
    choices: list[dict[str, Any]] = answer.json["choices"]
    if "prompt_logprobs" in answer.json:
        choices[0]["prompt_logprobs"] = answer.json["prompt_logprobs"]
    found = [await streamed_choice(address, path, body, i) for i in range(len(choices))]
    for choice, shown in zip(choices, found, strict=True):
        text = choice.get("text") or choice.get("message", {}).get("content") or ""
        assert shown["text"] == text
        assert shown["logprobs"] == (choice["logprobs"] or {})
        assert shown["prompt_logprobs"] == choice.get("prompt_logprobs")
        assert shown["finish_reason"] == choice["finish_reason"]
    return choices


async def streamed_choice(
    address: str, path: str, body: dict[str, Any], index: int
) -> dict[str, Any]:
    whole: dict[str, Any] = {"text": "", "logprobs": {}, "prompt_logprobs": None}
    async with streamed(address, path, {**body, "stream": True}, JSON) as stream:
        chunks = [event.json async for event in stream.events() if event.data[0] == "{"]
    of_choice = [
        (chunk, chunk["choices"][0]) for chunk in chunks if chunk["choices"][0]["index"] == index
    ]
    for place, (chunk, shown) in enumerate(of_choice):
        whole["text"] += shown.get("text") or shown.get("delta", {}).get("content") or ""
        for name, column in (shown["logprobs"] or {}).items():
            whole["logprobs"][name] = whole["logprobs"].get(name, []) + column
        for holder in (chunk, shown):
            if "prompt_logprobs" in holder:
                assert place == 0
                whole["prompt_logprobs"] = holder["prompt_logprobs"]
    return {**whole, "finish_reason": of_choice[-1][1]["finish_reason"]}


def scores(prompt: Sequence[int], num_top: int) -> list[Any]:
    return expected_logprobs(prompt, 1, num_top, WORKER.fake)


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("num_top", [0, 2])
async def test_echo_scores_the_prompt_of_every_choice(
    parts: Cluster, address: str, is_text: bool, num_top: int
) -> None:
    tokenizer = parts.routers[0]._models.first.tokenizer
    prompt: Any = [tokenizer.decode(it) for it in PROMPTS] if is_text else PROMPTS
    body = {"prompt": prompt, "n": 2, "max_tokens": 3, "temperature": 0, "echo": True}
    choices = await choices_of(address, COMPLETIONS, {**body, "logprobs": num_top})
    assert len(choices) == 6
    for choice, ids in zip(choices, [it for it in PROMPTS for _ in range(2)], strict=True):
        text, shown = choice["text"], choice["logprobs"]
        expected = scores(ids, num_top)
        assert text.startswith(tokenizer.decode(ids))
        count = len(ids)
        assert {len(column) for column in shown.values()} == {count + 3}
        assert (shown["token_logprobs"][0], shown["top_logprobs"][0]) == (None, None)
        assert shown["token_logprobs"][1:count] == pytest.approx([it.logprob for it in expected])
        assert all(len(it) in (num_top, num_top + 1) for it in shown["top_logprobs"][1:])
        assert shown["text_offset"] == sorted(shown["text_offset"])
        assert shown["text_offset"][count] == len(tokenizer.decode(ids))


async def test_zero_max_tokens_answer_with_the_prompt_only(address: str) -> None:
    body = {"prompt": PROMPTS, "n": 2, "max_tokens": 0, "temperature": 0}
    for more in ({}, {"echo": True}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}):
        choices = await choices_of(address, COMPLETIONS, {**body, **more})
        assert {choice["finish_reason"] for choice in choices} == {"length"}
        assert {choice["stop_reason"] for choice in choices} == {None}
        texts = ["ab", "ab", "cé", "cé", "\x07", "\x07"] if "echo" in more else [""] * 6
        assert [choice["text"] for choice in choices] == texts
        if "logprobs" in more:
            counts = [len(choice["logprobs"]["tokens"]) for choice in choices]
            assert counts == [2, 2, 3, 3, 1, 1]
    usage = (await ask(address, COMPLETIONS, body)).json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 0, 6)


async def test_prompt_logprobs_name_ids_ranks_and_tokens(address: str) -> None:
    body = {"prompt": PROMPTS, "n": 2, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 2}
    choices = await choices_of(address, COMPLETIONS, body)
    for choice, ids in zip(choices, [it for it in PROMPTS for _ in range(2)], strict=True):
        none, *entries = choice["prompt_logprobs"]
        assert none is None and choice["logprobs"] is None
        for entry, token, expected in zip(entries, ids[1:], scores(ids, 2), strict=True):
            assert entry[str(token)]["rank"] == expected.rank
            assert entry[str(token)]["logprob"] == pytest.approx(expected.logprob)
            assert set(entry) == {str(token), *(str(top) for top, _ in expected.top)}
            for rank, (top, logprob) in enumerate(expected.top, start=1):
                assert entry[str(top)]["rank"] == rank
                assert entry[str(top)]["logprob"] == pytest.approx(logprob)
    [_, second] = choices[0]["prompt_logprobs"]
    assert second[str(ord("b"))]["decoded_token"] == "b"


async def test_echo_and_prompt_logprobs_have_their_own_tops(address: str) -> None:
    body = {"prompt": "abc", "max_tokens": 1, "temperature": 0, "echo": True}
    for num_echoed, num_scored in ((1, 3), (3, 1)):
        fields = {"logprobs": num_echoed, "prompt_logprobs": num_scored}
        [choice] = await choices_of(address, COMPLETIONS, {**body, **fields})
        for shown, entry in zip(
            choice["logprobs"]["top_logprobs"][1:3], choice["prompt_logprobs"][1:], strict=True
        ):
            assert len(shown) in (num_echoed, num_echoed + 1)
            assert len(entry) in (num_scored, num_scored + 1)


async def test_prompt_scores_survive_a_reconnection(address: str) -> None:
    body = {"prompt": "abc", "n": 2, "max_tokens": 8, "echo": True, "logprobs": 1, "stream": True}
    headers = {**JSON, "accept": "text/event-stream", "idempotency-key": "mine"}
    headers["x-request-id"] = "mine"
    async with streamed(address, COMPLETIONS, {**body, "on_disconnect": "continue"}, headers) as it:
        events = [event async for event in it.events() if event.data[0] == "{"]
    resumed = {**headers, "last-event-id": events[0].id}
    async with streamed(address, COMPLETIONS, {**body, "on_disconnect": "continue"}, resumed) as it:
        rest = [event async for event in it.events() if event.data[0] == "{"]
    for index in range(2):
        found = [
            [it.json["choices"][0] for it in read if it.json["choices"][0]["index"] == index]
            for read in (events, [events[0], *rest])
        ]
        whole, again = ([row for it in read for row in it["logprobs"]["tokens"]] for read in found)
        assert whole == again and whole[:3] == ["a", "b", "c"] and len(whole) == 11


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"prompt_logprobs": 21}, "out_of_range", "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "out_of_range", "prompt_logprobs"),
        ({"prompt": "", "prompt_logprobs": 1}, "empty_prompt", "prompt"),
        ({"prompt": "", "echo": True, "logprobs": 1}, "empty_prompt", "prompt"),
        ({"prompt": [], "prompt_logprobs": 1}, "empty_prompt", "prompt"),
        ({"prompt": [1024], "prompt_logprobs": 1}, "out_of_range", "prompt"),
        ({"prompt": [1] * 4096, "max_tokens": 0, "echo": True}, "prompt_too_long", "prompt"),
        ({"prompt": "a" * 5000, "prompt_logprobs": 1}, "prompt_too_long", "prompt"),
        ({"prompt": "a" * 600_000, "prompt_logprobs": 1}, "prompt_text_too_long", "prompt"),
        (
            {"prompt": "a" * 4000, "prompt_logprobs": 20, "stream": True},
            "out_of_range",
            "prompt_logprobs",
        ),
        (
            {"prompt": "a" * 4000, "echo": True, "logprobs": 20, "stream": True},
            "out_of_range",
            "logprobs",
        ),
        (
            {"prompt": ["a" * 4000] * 13, "n": 1, "prompt_logprobs": 20},
            "out_of_range",
            "prompt_logprobs",
        ),
    ],
)
async def test_bad_prompt_score_requests_are_refused(
    address: str, body: dict[str, Any], code: str, param: str
) -> None:
    answer = await ask(address, COMPLETIONS, {"prompt": "a", **body})
    assert (answer.status, answer.error) == (400, (code, param)), answer.body


async def test_chat_prompt_logprobs_are_those_of_the_prompt(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path / "model", chat_support.HERMES) as parts:
        address = parts.routers[0].http_address
        messages = [{"role": "user", "content": "count from 3 to 5: say:four"}]
        tokens = (await ask(address, "/tokenize", {"messages": messages})).json["tokens"]
        body = {"messages": messages, "n": 2, "max_tokens": 2, "temperature": 0}
        chats = "/v1/chat/completions"
        scored, other = await choices_of(address, chats, {**body, "prompt_logprobs": 1})
        assert "prompt_logprobs" not in other
        none, *entries = scored["prompt_logprobs"]
        assert none is None
        assert all(str(token) in it for token, it in zip(tokens[1:], entries, strict=True))
        # A completion of the same tokens has the same scores.
        completion = {"prompt": tokens, "max_tokens": 0, "prompt_logprobs": 1}
        [same] = await choices_of(address, COMPLETIONS, completion)
        for entry, expected in zip(entries, same["prompt_logprobs"][1:], strict=True):
            assert list(entry) == list(expected)
            for token, it in entry.items():
                assert it["logprob"] == pytest.approx(expected[token]["logprob"], abs=1e-4)
        plain = await choices_of(address, chats, body)
        assert not any("prompt_logprobs" in choice for choice in plain)
