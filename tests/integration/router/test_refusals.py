"""Refused fields: the API page's table, and an example request for each of its rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everlift.client.client import AsyncClient
from everlift.hashes import token_digest
from tests.support.images import png, png_url
from tests.support.in_process import Cluster
from tests.support.router.chat_support import HERMES
from tests.support.router.http_client import JSON, Answer, ask
from tests.support.scripted import scripted_cluster

PAGE = Path(__file__).parents[3] / "deploy" / "guides" / "openai-refusals.md"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BEHIND_OUTPUT = f"1.1.{token_digest([5]):016x}"
#: A function with only a name, and a message.
TOOL = {"type": "function", "function": {"name": "f"}}
TURN = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class Case:
    """A request that the row named ``row`` refuses, with the error's code."""

    row: str
    code: str
    body: Any
    path: str = CHAT
    status: int = 400
    headers: Mapping[str, str] = field(default_factory=dict)


def chat(row: str, code: str, **fields: Any) -> Case:
    return Case(row, code, {"messages": [TURN], "max_tokens": 1, **fields})


def completion(row: str, code: str, **fields: Any) -> Case:
    return Case(row, code, {"prompt": "hi", "max_tokens": 1, **fields}, COMPLETIONS)


def message(row: str, code: str, **members: Any) -> Case:
    return chat(row, code, messages=[TURN, {"role": "user", **members}])


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def resumption(row: str, code: str, status: int, name: str, position: str) -> Case:
    headers = {"idempotency-key": name, "last-event-id": f"{name}/{position}"}
    return Case(row, code, {"prompt": "hi", "stream": True}, COMPLETIONS, status, headers)


def schema(row: str, content: Any, code: str = "invalid_grammar") -> Case:
    form = {"type": "json_schema", "json_schema": {"schema": content}}
    return chat(row, code, response_format=form)


CASES = [
    chat("any field that is not listed", "unknown_field", typical_p=1),
    replace(chat("`model` other", "unknown_model", model="other"), status=404),
    chat("`audio`, `modalities`", "unsupported", audio={"voice": "a"}),
    chat("`audio`, `modalities`", "invalid_request", modalities=["text", "audio"]),
    chat("`functions`, `function_call`", "unsupported", functions=[{"name": "f"}]),
    chat("`functions`, `function_call`", "unsupported", function_call="auto"),
    chat("`web_search_options`, `moderation`", "unsupported", web_search_options={}),
    chat("`web_search_options`, `moderation`", "unsupported", moderation={}),
    chat("`guided_json`", "unsupported", guided_json={}),
    completion("`suffix`", "unsupported", suffix="x"),
    completion("`best_of` above `n`", "out_of_range", best_of=2),
    completion(
        "more than 2^15 log probabilities",
        "out_of_range",
        prompt=[1] * 2000,
        prompt_logprobs=20,
        stream=True,
    ),
    completion("`echo` or", "unsupported", echo=True, truncate_prompt_tokens=5),
    completion("`echo` or", "unsupported", prompt_logprobs=1, truncate_prompt_tokens=5),
    completion(
        "`return_token_ids` with",
        "out_of_range",
        prompt=["a" * 40_000],
        n=128,
        return_token_ids=True,
    ),
    chat("`top_logprobs` without", "invalid_request", top_logprobs=1),
    chat("`top_logprobs` without", "invalid_request", stream_options={"include_usage": True}),
    completion("a value beyond", "too_many_requests", prompt=["a"] * 129),
    chat("`tools: []`", "invalid_request", tools=[]),
    chat("`tools[i].type`", "invalid_request", tools=[{"type": "custom"}]),
    chat("`tool_choice` `required`", "invalid_request", tool_choice="required"),
    chat(
        "two forms",
        "invalid_request",
        tools=[TOOL],
        tool_choice="required",
        structured_outputs={"regex": "a"},
    ),
    chat(
        "two forms",
        "invalid_request",
        response_format={"type": "json_object"},
        structured_outputs={"regex": "a"},
    ),
    chat(
        "`allowed_token_ids` or",
        "invalid_request",
        bad_words=["a"],
        structured_outputs={"regex": "a"},
    ),
    chat(
        "`allowed_token_ids` or",
        "invalid_request",
        allowed_token_ids=[0],
        stop_token_ids=[0],
        min_tokens=1,
    ),
    chat("a value beyond", "out_of_range", allowed_token_ids=[1] * 16385),
    chat("a value beyond", "out_of_range", bad_words=["a" * 129]),
    chat("a value beyond", "out_of_range", bad_words=["a"] * 65),
    chat(
        "`continue_final_message` with",
        "invalid_request",
        continue_final_message=True,
        add_generation_prompt=True,
    ),
    message("`messages[i].role`", "invalid_request", role="function", name="f", content="x"),
    message("`messages[i].content` null", "invalid_request", content=None),
    message("`messages[i].audio`", "unsupported_content", role="assistant", audio={"id": "a"}),
    message("`messages[i].audio`", "unsupported_content", role="assistant", function_call={}),
    *(
        message("content parts", "unsupported_content", content=[{"type": kind, kind: {}}])
        for kind in ("input_audio", "file")
    ),
    *(
        message("images for a model", "unsupported_content", content=[image_part(url)])
        for url in (png_url(png(1)), "https://a.b/c.png")
    ),
    message(
        "images for a model", "unsupported_content", role="system", content=[image_part("data:,")]
    ),
    message("an image that is not", "invalid_request", content=[image_part(png_url(b"GIF"))]),
    chat("`chat_template`, unless", "unsupported", chat_template="a"),
    chat("prompt and `max_tokens`", "context_length_exceeded", max_tokens=100_000),
    completion("a prompt of `max_model_len`", "prompt_too_long", prompt=[5] * 100_000),
    completion("a prompt of more than 128", "prompt_text_too_long", prompt="a " * 500_000),
    chat("a value beyond", "out_of_range", max_tokens=0),
    chat("a value beyond", "out_of_range", seed=2**64),
    chat("`min_tokens` above", "out_of_range", min_tokens=2),
    chat("a value beyond", "too_many_stops", stop=["a"] * 17),
    chat("a value beyond", "too_many_stops", stop_token_ids=[1] * 65),
    chat(
        "a value beyond",
        "logit_bias_too_large",
        logit_bias={str(token): 1 for token in range(1025)},
    ),
    completion("an empty prompt", "empty_prompt", prompt=""),
    completion("half a surrogate", "not_utf8", prompt="\ud83d"),
    chat("a value beyond", "out_of_range", tools=[TOOL] * 129),
    chat("a value beyond", "out_of_range", cache_salt="x" * 129),
    chat("a value beyond", "out_of_range", temperature=-1),
    chat("a value beyond", "too_many_choices", n=129),
    chat(
        "more than 2^20 log", "out_of_range", n=128, logprobs=True, top_logprobs=20, max_tokens=400
    ),
    schema("a schema or grammar that", {"not": {"type": "string"}}),
    chat("a schema or grammar that", "invalid_grammar", structured_outputs={"grammar": "x ::="}),
    schema("a value beyond", {"description": "x" * (64 << 10)}, "grammar_too_large"),
    schema("a schema that no value", {"enum": []}),
    Case(
        "an existing `Idempotency-Key`",
        "request_conflict",
        {"prompt": "other"},
        COMPLETIONS,
        409,
        {"idempotency-key": "taken"},
    ),
    replace(
        resumption("`Last-Event-ID` without `stream`", "invalid_request", 400, "a", "0.0.0.e"),
        body={"prompt": "hi"},
    ),
    resumption(
        "`Last-Event-ID` of an unknown", "unknown_request", 404, "b", f"0.0.{token_digest(()):016x}"
    ),
    resumption("`Last-Event-ID` that states output", "data_loss", 500, "c", BEHIND_OUTPUT),
    resumption("`Last-Event-ID` of a request", "forgotten_request", 404, "erased", BEHIND_OUTPUT),
    Case("a body above", "message_too_large", b" " * (33 << 20), status=413),
    Case("a body that is not JSON", "malformed_body", b"{"),
    Case("a body that is not JSON", "malformed_body", b"[" * 200 + b"]" * 200),
    Case("a body that is not JSON", "malformed_body", b'{"seed": ' + b"1" * 21 + b"}"),
    replace(
        chat("a content type", "unsupported_media_type"),
        headers={"content-type": "text/plain"},
        status=415,
    ),
]
#: Rows covered by other tests: models with other templates or images, and connection limits.
ELSEWHERE = (
    "a chat, if the model",
    "`tools`, if the chat template",
    "messages that the chat template",
    "`truncate_prompt_tokens` or `prompt_logprobs` with images",
    "a body that has not arrived",
    "headers, trailers",
)


def rows() -> dict[str, str]:
    """Return the answers of the page's table of refusals, by field."""
    lines = (line for line in PAGE.read_text().splitlines() if "|" in line)
    cells = (re.split(r"\s*\|\s*", line.strip("| ")) for line in lines)
    return {field: answer for field, answer, _ in list(cells)[2:]}


def row_of(prefix: str) -> str:
    [name] = [name for name in rows() if name.startswith(prefix)]
    return name


async def send(parts: Cluster, case: Case, headers: Mapping[str, str]) -> Answer:
    return await ask(parts.routers[0].http_address, case.path, case.body, {**JSON, **headers})


def test_refusal_table_rows_have_examples() -> None:
    shown = [*(case.row for case in CASES), *ELSEWHERE]
    assert {row_of(prefix) for prefix in shown} == set(rows())


def test_refusal_examples_match_code_and_status_of_row() -> None:
    for case in CASES:
        stated = rows()[row_of(case.row)]
        assert f"`{case.code}`" in stated, case
        assert (str(case.status) in stated) == (case.status != 400), case


async def test_refusal_examples_are_rejected_as_stated(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path / "m", HERMES) as parts:
        for name in ("taken", "erased"):
            answer = await send(parts, completion("", ""), {"idempotency-key": name})
            assert answer.status == 200
        async with AsyncClient(parts.address) as client:
            await client.forget("erased")
        wrong = []
        for case in CASES:
            answer = await send(parts, case, case.headers)
            if (answer.status, answer.error[0]) != (case.status, case.code):
                wrong.append((case, answer.status, answer.json))
    assert not wrong
