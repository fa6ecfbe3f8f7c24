"""Request fields of vLLM and SGLang over HTTP: prompts, special tokens and token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everlift.messages import MAX_BAD_WORD_BYTES, MAX_BAD_WORDS
from everlift.sampling import MAX_ALLOWED_TOKENS
from tests.support.example_counts import long
from tests.support.in_process import ROUTER, Cluster, cluster
from tests.support.router.chat_support import HERMES
from tests.support.router.http_client import JSON, ask, streamed
from tests.support.scripted import SAY, scripted_cluster

USER = {"role": "user", "content": "count"}
ASSISTANT = {"role": "assistant", "content": "From 17"}
#: Template that renders documents and the variables of reasoning_effort.
SHOWING = """\
{% for it in documents or [] %}{{ it.title }}: {{ it.text }}; {% endfor %}
{{- reasoning_effort }} {{ enable_thinking }} {{ messages[-1].content }}<|im_end|>"""


async def tokens(parts: Cluster, **body: Any) -> list[int]:
    answer = await ask(parts.routers[0].http_address, "/tokenize", body)
    assert answer.status == 200, answer.json
    found: list[int] = answer.json["tokens"]
    return found


async def complete(parts: Cluster, **body: Any) -> Any:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = await ask(parts.routers[0].http_address, path, body)
    assert answer.status == 200, answer.json
    return answer.json


async def chunks_of(
    parts: Cluster, path: str, body: Any, headers: Mapping[str, str] = JSON
) -> list[Any]:
    body = {**body, "stream": True}
    async with streamed(parts.routers[0].http_address, path, body, headers) as stream:
        assert stream.status == 200
        return [event.json async for event in stream.events() if event.data != "[DONE]"]


def ids_of(chunk: Any) -> list[int]:
    return [token for choice in chunk["choices"] for token in choice["token_ids"]]


async def test_continued_message_is_the_end_of_the_prompt(tmp_path: Path) -> None:
    messages = [USER, ASSISTANT]
    prompt = "<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\nFrom 17"
    async with scripted_cluster(tmp_path / "m", HERMES) as parts:
        whole = await tokens(parts, prompt=prompt)
        assert await tokens(parts, messages=messages, continue_final_message=True) == whole
        answer = await complete(parts, messages=messages, continue_final_message=True, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == len(whole)
        answer = await ask(
            parts.routers[0].http_address,
            "/v1/chat/completions",
            {"messages": messages, "continue_final_message": True, "add_generation_prompt": True},
        )
        assert (answer.status, answer.error) == (400, ("invalid_request", "continue_final_message"))


async def test_template_receives_documents_and_effort(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path / "m", SHOWING) as parts:
        answer = await complete(
            parts,
            messages=[USER],
            documents=[{"title": "a", "text": f"{SAY}four"}],
            reasoning_effort="none",
            max_tokens=20,
        )
    assert answer["choices"][0]["message"]["content"] == "four; none False count"


async def test_special_tokens_are_in_the_text_on_request(tmp_path: Path) -> None:
    body = {"prompt": f"{SAY}four<|im_end|>", "include_stop_str_in_output": True}
    async with scripted_cluster(tmp_path / "m", HERMES) as parts:
        texts = [
            (await complete(parts, **body, **fields))["choices"][0]["text"]
            for fields in ({}, {"skip_special_tokens": True}, {"skip_special_tokens": False})
        ]
        messages = [{"role": "user", "content": f"{SAY}four"}]
        [choice] = (
            await complete(
                parts,
                messages=messages,
                include_stop_str_in_output=True,
                skip_special_tokens=False,
            )
        )["choices"]
    assert texts == ["four", "four", "four<|endoftext|>"]
    assert choice["message"]["content"] == "four<|endoftext|>"


@pytest.mark.parametrize("prompt", ["count", [5, 6, 7], ["count", "say"]])
@pytest.mark.parametrize("n", [1, 2])
async def test_completion_returns_its_token_ids(prompt: Any, n: int) -> None:
    body = {"prompt": prompt, "n": n, "max_tokens": 20, "seed": 1, "return_token_ids": True}
    async with cluster(workers=1) as parts:
        choices = (await complete(parts, **body))["choices"]
        chunks = await chunks_of(parts, "/v1/completions", body)
        plain = await complete(parts, **{**body, "return_token_ids": False})
        decode = parts.routers[0]._models.first.tokenizer.decode
    prompts = prompt if isinstance(prompt[0], str) and isinstance(prompt, list) else [prompt]
    ids = [[*each.encode()] if isinstance(each, str) else each for each in prompts]
    for choice in choices:
        assert choice["prompt_token_ids"] == ids[choice["index"] // n]
        assert len(choice["token_ids"]) == 20 and decode(choice["token_ids"]) == choice["text"]
        own = [it for chunk in chunks for it in chunk["choices"] if it["index"] == choice["index"]]
        assert [it.get("prompt_token_ids") for it in own] == [
            choice["prompt_token_ids"],
            *[None] * (len(own) - 1),
        ]
        assert [token for it in own for token in it["token_ids"]] == choice["token_ids"]
        assert all(it["token_ids"] or it["finish_reason"] for it in own)
    assert not any("token_ids" in it or "prompt_token_ids" in it for it in plain["choices"])


async def test_chat_returns_its_token_ids(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": f"{SAY}größer als 日本"}]
    body = {"messages": messages, "n": 2, "return_token_ids": True}
    async with scripted_cluster(tmp_path / "m", HERMES) as parts:
        answer = await complete(parts, **body)
        chunks = await chunks_of(parts, "/v1/chat/completions", body)
        prompt = await tokens(parts, messages=messages)
        plain = await complete(parts, messages=messages)
        decode = parts.routers[0]._models.first.tokenizer.decode
    assert answer["prompt_token_ids"] == prompt
    assert [it.get("prompt_token_ids") for it in chunks if "prompt_token_ids" in it] == [prompt] * 2
    for choice in answer["choices"]:
        assert decode(choice["token_ids"]) == choice["message"]["content"] == "größer als 日本"
        own = [it for chunk in chunks for it in chunk["choices"] if it["index"] == choice["index"]]
        assert [token for it in own for token in it["token_ids"]] == choice["token_ids"]
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


async def test_token_ids_continue_after_a_reconnection() -> None:
    body = {"prompt": [5, 6], "max_tokens": 30, "temperature": 0, "return_token_ids": True}
    async with cluster(workers=1) as parts:
        address = parts.routers[0].http_address
        whole = (await complete(parts, **body))["choices"][0]
        headers = {**JSON, "idempotency-key": "a"}
        async with streamed(address, "/v1/completions", {**body, "stream": True}, headers) as it:
            *events, _ = [event async for event in it.events()]
        for cut in (0, len(events) // 2, len(events) - 2):
            before = [token for it in events[: cut + 1] for token in ids_of(it.json)]
            resumed = {**headers, "last-event-id": events[cut].id}
            chunks = await chunks_of(parts, "/v1/completions", body, resumed)
            assert before + [token for it in chunks for token in ids_of(it)] == whole["token_ids"]
            assert not any("prompt_token_ids" in it["choices"][0] for it in chunks)


async def test_prompt_ids_of_many_choices_are_limited() -> None:
    async with cluster(workers=1) as parts:
        body = {"prompt": [5] * 4000, "n": 128, "return_token_ids": True, "max_tokens": 1}
        prompts = {**body, "prompt": [body["prompt"]] * 9}
        answer = await ask(parts.routers[0].http_address, "/v1/completions", prompts)
        assert (answer.status, answer.error) == (400, ("out_of_range", "return_token_ids"))


@pytest.mark.long
@pytest.mark.parametrize("is_text", [True, long(False)])
async def test_prompt_is_truncated_to_its_end(is_text: bool) -> None:
    ids = [65 + i % 26 for i in range(3000)]
    prompt = bytes(ids).decode() if is_text else ids
    body = {"max_tokens": 1, "return_token_ids": True, "prompt": prompt}
    async with cluster(workers=1) as parts:
        assert parts.routers[0]._models.first.longest_sequence == 4096
        for fields, kept in (
            ({"truncate_prompt_tokens": 2}, 2),
            ({"truncate_prompt_tokens": 5000}, 3000),
            ({"truncate_prompt_tokens": -1, "max_tokens": 96}, 3000),
            ({"truncate_prompt_tokens": -1, "max_tokens": 2096}, 2000),
            ({"truncate_prompt_tokens": -1, "max_tokens": 5000}, None),
            ({"truncate_prompt_tokens": 3000, "max_tokens": 2000}, None),
        ):
            answer = await ask(parts.routers[0].http_address, "/v1/completions", body | fields)
            if kept is None:
                refused = "context_length_exceeded", "max_tokens"
                assert (answer.status, answer.error) == (400, refused), fields
                continue
            assert answer.json["choices"][0]["prompt_token_ids"] == ids[-kept:], fields
            assert answer.json["usage"]["prompt_tokens"] == kept


@pytest.mark.parametrize("is_text", [True, False])
async def test_truncated_prompt_may_exceed_the_context(is_text: bool) -> None:
    ids = [65 + i % 26 for i in range(50_000)]
    prompt = bytes(ids).decode() if is_text else ids
    body = {"prompt": prompt, "return_token_ids": True, "truncate_prompt_tokens": -1}
    async with cluster(workers=1) as parts:
        answer = await complete(parts, **body, max_tokens=1)
        assert answer["choices"][0]["prompt_token_ids"] == ids[-4095:]


@pytest.mark.parametrize("count", [0, -2, 2**31])
async def test_invalid_truncation_is_refused_by_name(count: int) -> None:
    async with cluster(workers=0) as parts:
        body = {"prompt": "a", "truncate_prompt_tokens": count}
        answer = await ask(parts.routers[0].http_address, "/v1/completions", body)
        assert (answer.status, answer.error) == (400, ("out_of_range", "truncate_prompt_tokens"))


async def test_truncated_chat_of_a_session_has_its_last_tokens(tmp_path: Path) -> None:
    turns = [USER, ASSISTANT, {"role": "user", "content": "on to 30 and then stop"}]
    async with scripted_cluster(tmp_path / "m", HERMES) as parts:
        for messages in (turns[:1], turns):
            whole = await tokens(parts, messages=messages)
            for length in (4, len(whole)):
                answer = await complete(
                    parts,
                    messages=messages,
                    max_tokens=1,
                    truncate_prompt_tokens=length,
                    prompt_cache_key="s",
                    return_token_ids=True,
                )
                assert answer["prompt_token_ids"] == whole[-length:]


OWN = "{{ bos_token }}{% for it in messages %}({{ it.role }}) {{ it.content }}{% endfor %}"


async def test_template_of_a_request_needs_permission(tmp_path: Path) -> None:
    body = {"messages": [USER], "chat_template": OWN}
    async with scripted_cluster(tmp_path / "m", HERMES) as parts:
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await ask(parts.routers[0].http_address, path, body)
            assert (answer.status, answer.error) == (400, ("unsupported", "chat_template"))
            assert "router.allow_chat_template" in answer.json["error"]["message"]


@pytest.mark.parametrize("has_own", [True, False])
async def test_permitted_template_renders_its_own_chat(tmp_path: Path, has_own: bool) -> None:
    def remove_template(directory: Path) -> None:
        if not has_own:
            (directory / "chat_template.jinja").unlink()
            (directory / "tokenizer_config.json").write_text("{}")

    config = replace(ROUTER, allow_chat_template=True)
    developer = {"role": "developer", "content": f"{SAY}four<|im_end|>"}
    async with scripted_cluster(tmp_path / "m", HERMES, remove_template, config) as parts:
        address, body = parts.routers[0].http_address, {"messages": [USER, developer]}
        expected = await tokens(parts, prompt=f"(user) count(system) {SAY}four<|im_end|>")
        own = {**body, "chat_template": OWN}
        assert await tokens(parts, **own) == expected
        tools = [{"type": "function", "function": {"name": "f"}}]
        chat = {**own, "tools": tools, "tool_choice": "none", "return_token_ids": True}
        answer = await complete(parts, **chat)
        assert answer["prompt_token_ids"] == expected
        assert answer["choices"][0]["message"]["content"] == "four"
        own = {**body, "chat_template": OWN.replace("(", "developer(")}
        assert await tokens(parts, **own) == await tokens(
            parts, prompt=f"developer(user) countdeveloper(developer) {SAY}four<|im_end|>"
        )
        for template, code in (("{% if %}", "template_error"), ("a" * 32769, "out_of_range")):
            answer = await ask(address, "/tokenize", {**body, "chat_template": template})
            assert (answer.status, answer.error[0]) == (400, code)
        answer = await ask(address, "/tokenize", body)
        assert answer.status == (200 if has_own else 400)
        assert has_own or answer.error[0] == "no_chat_template"


@pytest.mark.parametrize("temperature", [0, 1])
async def test_output_has_only_allowed_tokens_and_no_bad_words(temperature: int) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 200,
        "temperature": temperature,
        "seed": 3,
        "allowed_token_ids": [*b" <xz"],
        "bad_words": ["x ", " <"],
        "n": 2,
        "return_token_ids": True,
    }
    async with cluster(workers=1) as parts:
        free = await complete(parts, **body | {"bad_words": None})
        answer = await complete(parts, **body)
    for choice in answer["choices"]:
        assert {*choice["token_ids"]} <= {*b" xz"} and "x" in choice["text"]
        assert "x " not in choice["text"]
    assert all("x " in choice["text"] and "<" in choice["text"] for choice in free["choices"])


async def test_model_obeys_allowed_tokens_and_bad_words(tmp_path: Path) -> None:
    body = {"prompt": "count from 17 to 30:", "temperature": 0, "max_tokens": 24}
    async with scripted_cluster(tmp_path / "m", HERMES) as parts:
        text = (await complete(parts, **body))["choices"][0]["text"]
        word = text.split()[2]
        answer = await complete(parts, **body, bad_words=[word], return_token_ids=True)
        sequences = [await tokens(parts, prompt=each) for each in (word, f" {word}")]
        ids = answer["choices"][0]["token_ids"]
        for sequence in sequences:
            found = [ids[i : i + len(sequence)] for i in range(len(ids))]
            assert sequence not in found
        assert answer["choices"][0]["text"] != text
        allowed = await tokens(parts, prompt="1 2 3")
        answer = await complete(parts, **body, allowed_token_ids=allowed, return_token_ids=True)
        assert {*answer["choices"][0]["token_ids"]} <= {*allowed}
        assert len(answer["choices"][0]["token_ids"]) == 24


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"allowed_token_ids": []}, "invalid_request", "allowed_token_ids"),
        ({"allowed_token_ids": [5000]}, "out_of_range", "allowed_token_ids"),
        ({"allowed_token_ids": [5] * (MAX_ALLOWED_TOKENS + 1)}, "out_of_range", None),
        ({"allowed_token_ids": [97], "bad_words": ["ba"]}, "invalid_request", "allowed_token_ids"),
        (
            {"allowed_token_ids": [97], "stop_token_ids": [97], "min_tokens": 1},
            "invalid_request",
            "allowed_token_ids",
        ),
        ({"allowed_token_ids": [97], "regex": "a"}, "invalid_request", "allowed_token_ids"),
        ({"bad_words": ["a"], "json_schema": {}}, "invalid_request", "bad_words"),
        ({"bad_words": [""]}, "invalid_request", "bad_words"),
        ({"bad_words": ["a" * (MAX_BAD_WORD_BYTES + 1)]}, "out_of_range", "bad_words"),
        ({"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, "out_of_range", "bad_words"),
        ({"bad_words": [1]}, "invalid_request", "bad_words[0]"),
    ],
)
async def test_restriction_without_tokens_is_refused_by_name(
    fields: dict[str, Any], code: str, param: str | None
) -> None:
    body = {"prompt": "a", "max_tokens": 2, **fields}
    async with cluster(workers=1) as parts:
        answer = await ask(parts.routers[0].http_address, "/v1/completions", body)
        assert (answer.status, answer.error) == (400, (code, param or "allowed_token_ids"))
        left = {"allowed_token_ids": [97, 98], "bad_words": ["ba"], "stop_token_ids": [97]}
        answer = await complete(parts, prompt="a", max_tokens=2, min_tokens=2, **left)
        assert answer["choices"][0]["text"] == "bb"
