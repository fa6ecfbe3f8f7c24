"""Checks of the openai and langchain packages against a cluster with the demo model at
EVERLIFT_HTTP.

tests/integration runs this module in an environment with these clients.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI

BASE = f"http://{os.environ['EVERLIFT_HTTP']}/v1"
MODEL = "demo_model"
COUNT = "count from 17 to 24:"
NUMBERS = " 17 18 19 20 21 22 23 24"
USER: Any = [{"role": "user", "content": COUNT}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Writes a name down.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"enum": ["ann", "bob"]}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "note"}}
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"enum": [31, 32]}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client() -> Iterator[OpenAI]:
    with OpenAI(base_url=BASE, api_key="none", max_retries=0) as client:
        yield client


def test_models_list_and_retrieve_served_model(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "everlift"


def test_chat_completion_returns_message_and_usage(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, temperature=0)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", NUMBERS)
    assert (choice.finish_reason, answer.object) == ("stop", "chat.completion")
    assert answer.usage is not None and answer.usage.completion_tokens > 8
    assert answer._request_id is not None and answer.id == f"chatcmpl-{answer._request_id}"


def test_chat_reads_multi_turn_history(client: OpenAI) -> None:
    turns: Any = [
        {"role": "system", "content": "You count."},
        *USER,
        {"role": "assistant", "content": NUMBERS.strip()},
        {"role": "user", "content": [{"type": "text", "text": "days from tuesday, 3:"}]},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=turns, temperature=0)
    assert answer.choices[0].message.content == " tuesday wednesday thursday"


def test_chat_stream_yields_deltas_and_final_usage(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=USER,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == NUMBERS
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in pieces][-2:] == [None, "stop"]
    assert last.choices == [] and last.usage is not None and last.usage.prompt_tokens > 0
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens is not None


def test_openai_stream_helper_accumulates_full_text(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=USER, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == NUMBERS


def test_completions_preserve_order_of_prompts_and_choices(client: OpenAI) -> None:
    prompts = [COUNT, "repeat hello 3 times:"]
    right = [NUMBERS] * 2 + [" hello hello hello"] * 2
    answer = client.completions.create(
        model=MODEL, prompt=prompts, n=2, temperature=0, max_tokens=40
    )
    assert [choice.text for choice in answer.choices] == right
    texts = [""] * 4
    for chunk in client.completions.create(
        model=MODEL, prompt=prompts, n=2, temperature=0, max_tokens=40, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == right


def test_finish_reason_distinguishes_stop_from_length(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=COUNT, temperature=0, max_tokens=40, stop=[" 20", " 23"]
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" 17 18 19", "stop")
    short = client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, max_completion_tokens=3
    )
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == (" 17", "length")


def test_seed_makes_sampling_reproducible(client: OpenAI) -> None:
    def text(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="a", temperature=2, seed=seed, max_tokens=20
        )
        return str(answer.choices[0].text)

    assert text(7) == text(7) != text(8)
    assert text(-7) == text(-7)


def test_logprobs_match_returned_text(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == NUMBERS
    for token in logprobs.content:
        assert token.bytes == list(token.token.encode())
        assert token.top_logprobs[0].token == token.token
        assert len(token.top_logprobs) == 2 and token.logprob <= 0
    completion = client.completions.create(
        model=MODEL, prompt=COUNT, temperature=0, logprobs=1, max_tokens=6
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    text = completion.choices[0].text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert text[offset : offset + len(token)] == token


def test_logprobs_bytes_decode_to_emoji(client: OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "repeat \N{ROCKET} 3 times:"}]
    chat = client.chat.completions.create(
        model=MODEL, messages=asked, temperature=0, logprobs=True, top_logprobs=4
    )
    [choice] = chat.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert choice.message.content == " \N{ROCKET}" * 3
    decoded = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert decoded.decode() == choice.message.content
    assert all(len(token.top_logprobs) == 4 for token in choice.logprobs.content)


def test_logit_bias_changes_output(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, max_tokens=3, logit_bias={"5": 100}
    )
    plain = client.chat.completions.create(model=MODEL, messages=USER, temperature=0, max_tokens=3)
    assert answer.choices[0].message.content != plain.choices[0].message.content


def test_extra_body_sets_everlift_parameters(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=COUNT,
        max_tokens=5,
        extra_body={"top_k": 1, "ignore_eos": True, "min_tokens": 5, "priority": 3},
    )
    assert answer.choices[0].text == " 17 18"[: len(answer.choices[0].text)]
    one_of = client.completions.create(
        model=MODEL,
        prompt=COUNT,
        max_tokens=20,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert one_of.choices[0].text in ("yes", "no")


def test_response_format_constrains_output_to_json_schema(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "json name=ann age=31:"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, response_format=SCHEMA
    )
    assert json.loads(answer.choices[0].message.content or "") == {"name": "ann", "age": 31}
    any_object = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, response_format={"type": "json_object"}
    )
    assert isinstance(json.loads(any_object.choices[0].message.content or ""), dict)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_tool_choice_forces_call_and_accepts_tool_result(client: OpenAI, choice: Any) -> None:
    messages: Any = [{"role": "user", "content": "json name=ann:"}]
    asked: Any = dict(
        model=MODEL,
        messages=messages,
        temperature=0,
        tools=[TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "note"
    arguments = json.loads(call.function.arguments)
    assert arguments["name"] in ("ann", "bob")
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert json.loads(streamed.function.arguments) == arguments
    # The next turn contains the result of the call.
    result: Any = [
        *messages,
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
        {"role": "user", "content": COUNT},
    ]
    last = client.chat.completions.create(
        model=MODEL, messages=result, tools=[TOOL], tool_choice="none", temperature=0
    )
    assert last.choices[0].message.tool_calls is None


def test_errors_map_to_openai_exception_classes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-5", prompt="a")
    assert (unknown.value.code, unknown.value.param) == ("unknown_model", "model")
    assert unknown.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="a", top_p=2)
    assert (bad.value.code, bad.value.param) == ("out_of_range", "top_p")
    with pytest.raises(openai.BadRequestError) as grammar:
        client.completions.create(
            model=MODEL, prompt="a", extra_body={"structured_outputs": {"regex": "(" * 5}}
        )
    assert grammar.value.code == "invalid_grammar"
    with pytest.raises(openai.BadRequestError) as image:
        content: Any = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}])
    assert image.value.code == "unsupported_content"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="a")
    key = {"Idempotency-Key": "of-one-body"}
    client.completions.create(model=MODEL, prompt="a", max_tokens=1, extra_headers=key)
    with pytest.raises(openai.ConflictError):
        retrying = client.with_options(max_retries=2)
        retrying.completions.create(model=MODEL, prompt="b", max_tokens=1, extra_headers=key)


def test_stream_error_event_raises_api_error(client: OpenAI) -> None:
    for timeout_ms in (300, 600, 1200, 2400):
        # On a busy machine the deadline may pass before the stream begins.
        with suppress(openai.InternalServerError):
            stream = client.completions.create(
                model=MODEL,
                prompt=COUNT,
                max_tokens=900,
                stream=True,
                extra_body={"ignore_eos": True, "timeout_ms": timeout_ms},
            )
            break
    with pytest.raises(openai.APIError) as late:
        for _ in stream:
            pass
    assert late.value.code == "deadline_exceeded"


def test_client_timeout_raises_api_timeout_error() -> None:
    with (
        OpenAI(base_url=BASE, api_key="none", max_retries=0, timeout=0.2) as hasty,
        pytest.raises(openai.APITimeoutError),
    ):
        hasty.completions.create(
            model=MODEL, prompt=COUNT, max_tokens=900, extra_body={"ignore_eos": True}
        )


def test_async_client_serves_concurrent_chats() -> None:
    async def main() -> list[str | None]:
        async with AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(model=MODEL, messages=USER, temperature=0)
                    for _ in range(24)
                )
            )
            return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(main()) == [NUMBERS] * 24


def langchain(**more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=BASE, api_key="none", temperature=0, **more)  # type: ignore[arg-type]


def test_langchain_invokes_and_streams() -> None:
    answer = langchain().invoke([HumanMessage(COUNT)])
    assert answer.content == NUMBERS
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 8
    chunks = list(langchain(stream_usage=True).stream([HumanMessage(COUNT)]))
    assert "".join(str(chunk.content) for chunk in chunks) == NUMBERS
    turns = [HumanMessage(COUNT), AIMessage(NUMBERS), HumanMessage("days from tuesday, 2:")]
    assert langchain().invoke(turns).content == " tuesday wednesday"


def test_langchain_parses_tool_calls_and_structured_output() -> None:
    tool = langchain().bind_tools([TOOL], tool_choice="note")
    [call] = tool.invoke("json name=ann:").tool_calls
    assert call["name"] == "note" and call["args"]["name"] in ("ann", "bob")
    first, *rest = tool.stream("json name=ann:")
    [received] = sum(rest, first).tool_calls
    assert (received["name"], received["args"]) == (call["name"], call["args"])
    reader = langchain().with_structured_output(
        {"title": "person", **SCHEMA["json_schema"]["schema"]}, method="json_schema"
    )
    assert reader.invoke("json name=ann age=31:") == {"name": "ann", "age": 31}


@pytest.mark.parametrize("num_words", [500, 5_000, 200_000])
def test_langchain_raises_context_overflow_for_long_prompt(num_words: int) -> None:
    with pytest.raises(ContextOverflowError):
        langchain().invoke("hello " * num_words)
