"""Checks of the openai package against a model that calls tools, at EVERLIFT_HTTP.

EVERLIFT_TOOL_FORMAT names the format of its calls. The model generates the text that its prompt
requests (tests/support/scripted.py), or what a grammar permits if a call is required.
tests/integration runs this module in an environment with this client.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from openai import OpenAI

BASE = f"http://{os.environ['EVERLIFT_HTTP']}/v1"
FORMAT = os.environ["EVERLIFT_TOOL_FORMAT"]
#: Mark before a call, which a model may omit.
PYTHON_TAG = "<|python_tag|>"
NOTE: Any = {
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
STOP: Any = {"type": "function", "function": {"name": "stop"}}
NAMED: Any = {"type": "function", "function": {"name": "note"}}
ANN = ("note", {"name": "ann"})
BOB = ("note", {"name": "bob"})
END: tuple[str, dict[str, Any]] = ("stop", {})


def written(*calls: tuple[str, dict[str, Any]]) -> str:
    """Return the text of tool calls in the format under test."""
    if FORMAT == "hermes":
        shown = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in shown)
    return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)


def saying(text: str, **more: Any) -> dict[str, Any]:
    """Return a request that is answered with ``text``."""
    content = f"say:{text}"
    return dict(
        model=os.environ["EVERLIFT_MODEL"],
        messages=[{"role": "user", "content": content}],
        tools=[NOTE, STOP],
        temperature=0,
        max_tokens=200,
        **more,
    )


def called(message: Any) -> list[tuple[str, dict[str, Any]]]:
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls) and all(call.id for call in calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.fixture
def client() -> Iterator[OpenAI]:
    with OpenAI(base_url=BASE, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_tool_choice_auto_allows_plain_answer(client: OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(**saying("It is {warm} today.", **choice))
    [only] = answer.choices
    assert (only.message.content, only.message.tool_calls) == ("It is {warm} today.", None)
    assert only.finish_reason == "stop"


@pytest.mark.parametrize("calls", [[ANN], [END], [ANN, BOB], [BOB, END, ANN]])
def test_tool_choice_auto_parses_tool_calls(client: OpenAI, calls: Any) -> None:
    answer = client.chat.completions.create(**saying(written(*calls), tool_choice="auto"))
    [only] = answer.choices
    assert called(only.message) == calls
    assert (only.message.content, only.finish_reason) == (None, "tool_calls")


def test_tool_call_marker_is_stripped_from_content(client: OpenAI) -> None:
    if FORMAT == "hermes":
        text, content = f"I look.\n{written(ANN)}", "I look."
    else:
        text, content = PYTHON_TAG + written(ANN), ""
    [only] = client.chat.completions.create(**saying(text)).choices
    assert called(only.message) == [ANN]
    assert (only.message.content or "").strip() == content


def test_malformed_tool_call_is_returned_as_content(client: OpenAI) -> None:
    cut_off = written(ANN).partition("note")[0]
    for text in (written(("unknown", {})), cut_off, "<tool_call>no</tool_call>"):
        [only] = client.chat.completions.create(**saying(text)).choices
        assert (only.message.content, only.message.tool_calls) == (text, None)
        assert only.finish_reason == "stop"


def test_tool_choice_none_returns_call_text_as_content(client: OpenAI) -> None:
    [only] = client.chat.completions.create(**saying(written(ANN), tool_choice="none")).choices
    assert (only.message.content, only.message.tool_calls) == (written(ANN), None)


def test_parallel_tool_calls_false_returns_one_call(client: OpenAI) -> None:
    asked = saying(written(ANN, BOB), parallel_tool_calls=False)
    [only] = client.chat.completions.create(**asked).choices
    assert called(only.message) == [ANN]


def test_tool_call_stream_sends_incremental_arguments(client: OpenAI) -> None:
    ids: list[str] = []
    names: list[str] = []
    arguments = ["", ""]
    reasons: list[str] = []
    num_deltas = 0
    for chunk in client.chat.completions.create(**saying(written(ANN, BOB), stream=True)):
        [choice] = chunk.choices
        assert not choice.delta.content
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            num_deltas += 1
            assert call.function is not None
            ids += [call.id] if call.id else []
            names += [call.function.name] if call.function.name else []
            arguments[call.index] += call.function.arguments or ""
    assert names == ["note", "note"] and len(set(ids)) == 2
    assert [json.loads(each) for each in arguments] == [{"name": "ann"}, {"name": "bob"}]
    assert reasons == ["tool_calls"]
    # Calls are streamed while they are generated; a late reader gets several tokens in a delta.
    assert num_deltas > 2


@pytest.mark.parametrize("text", ["Nothing to do.", written(ANN, END)])
def test_openai_stream_helper_matches_unary_tool_calls(client: OpenAI, text: str) -> None:
    [whole] = client.chat.completions.create(**saying(text)).choices
    with client.chat.completions.stream(**saying(text)) as stream:
        for _ in stream:
            pass
        [streamed] = stream.get_final_completion().choices
    assert called(streamed.message) == called(whole.message)
    assert (streamed.message.content or None) == whole.message.content
    assert streamed.finish_reason == whole.finish_reason


@pytest.mark.parametrize("calls", [[END], [ANN, BOB]])
def test_langchain_stream_accumulates_tool_calls(calls: Any) -> None:
    asked = saying(written(*calls))
    model = ChatOpenAI(model=asked["model"], base_url=BASE, api_key="none", temperature=0)  # type: ignore[arg-type]
    first, *rest = model.bind_tools(asked["tools"]).stream(asked["messages"], max_tokens=200)
    message = sum(rest, first)
    assert [(call["name"], call["args"]) for call in message.tool_calls] == calls
    assert not message.invalid_tool_calls


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("is_stream", [False, True])
def test_tool_choice_required_forces_valid_call(
    client: OpenAI, choice: Any, is_stream: bool
) -> None:
    asked = saying("I would rather not.", tool_choice=choice, parallel_tool_calls=False)
    if is_stream:
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            [only] = stream.get_final_completion().choices
    else:
        [only] = client.chat.completions.create(**asked).choices
    assert only.finish_reason == "tool_calls"
    [(name, arguments)] = called(only.message)
    assert (name, arguments) in (ANN, BOB, END)
    assert choice == "required" or name == "note"


def test_tool_result_is_accepted_in_next_turn(client: OpenAI) -> None:
    asked = saying(written(ANN))
    [only] = client.chat.completions.create(**asked).choices
    [call] = only.message.tool_calls or []
    next_turn = saying("Written down.")
    messages = [
        *asked["messages"],
        only.message,
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
        *next_turn["messages"],
    ]
    [last] = client.chat.completions.create(**{**next_turn, "messages": messages}).choices
    assert (last.message.content, last.message.tool_calls) == ("Written down.", None)


def test_tool_call_ids_differ_between_choices(client: OpenAI) -> None:
    answer = client.chat.completions.create(**saying(written(ANN), n=2))
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 2
