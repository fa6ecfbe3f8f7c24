"""Checks of the anthropic package against a scripted model at EVERLIFT_HTTP.

The model generates the text that its prompt requests (tests/support/scripted.py).
tests/integration runs this module in an environment with this client.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

BASE = f"http://{os.environ['EVERLIFT_HTTP']}"
MODEL = os.environ["EVERLIFT_MODEL"]
NOTE: Any = {
    "name": "note",
    "description": "Writes a name down.",
    "input_schema": {
        "type": "object",
        "properties": {"name": {"enum": ["ann", "bob"]}},
        "required": ["name"],
        "additionalProperties": False,
    },
}
STOP: Any = {"name": "stop", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "note", "arguments": {"name": "ann"}}\n</tool_call>'


def saying(text: str, **more: Any) -> dict[str, Any]:
    """Return a request that is answered with ``text``."""
    messages = [{"role": "user", "content": f"say:{text}"}]
    greedy = {"temperature": 0}
    return {
        "model": MODEL,
        "max_tokens": 200,
        "messages": messages,
        "extra_body": greedy,
        **more,
    }


@pytest.fixture
def client() -> Iterator[Anthropic]:
    with Anthropic(base_url=BASE, api_key="none", max_retries=0) as client:
        yield client


def test_message_has_text_and_usage(client: Anthropic) -> None:
    message = client.messages.create(**saying("It is warm today."))
    [block] = message.content
    assert (block.type, block.text) == ("text", "It is warm today.")
    assert (message.role, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "end_turn",
        None,
    )
    assert message.id.startswith("msg_") and message.model == MODEL
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 5
    assert message.usage.output_tokens > 3


def test_repeated_prompt_is_read_from_the_cache(client: Anthropic) -> None:
    request = saying("Yes.", system="Answer briefly. " * 20)
    first, second = (client.messages.create(**request).usage for _ in range(2))
    assert second.cache_read_input_tokens > 0
    assert (
        first.input_tokens + first.cache_read_input_tokens
        == second.input_tokens + second.cache_read_input_tokens
    )


def test_stream_accumulates_to_the_whole_message(client: Anthropic) -> None:
    request = saying(f"I note it.\n{CALL}\n{CALL.replace('ann', 'bob')}", tools=[NOTE, STOP])
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        names = [event.type for event in stream]
        streamed = stream.get_final_message()
    for each in (whole, streamed):
        assert each.stop_reason == "tool_use"
        text, *calls = each.content
        assert text.type == "text" and text.text.strip() == "I note it."
        assert [(call.name, call.input) for call in calls] == [
            ("note", {"name": "ann"}),
            ("note", {"name": "bob"}),
        ]
        assert len({call.id for call in calls}) == 2
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert (names[0], names[-1]) == ("message_start", "message_stop")
    assert names.count("content_block_start") == names.count("content_block_stop") == 3


def test_raw_events_come_in_the_order_of_the_api(client: Anthropic) -> None:
    events = list(client.messages.create(**saying("one two three"), stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(event.delta.text for event in events[2:-3]) == "one two three"
    assert events[-2].delta.stop_reason == "end_turn"
    assert events[-2].usage.output_tokens > 0


def test_stop_sequence_and_max_tokens_end_a_message(client: Anthropic) -> None:
    message = client.messages.create(**saying("one two three", stop_sequences=[" three"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " three")
    assert message.content[0].text == "one two"
    cut = client.messages.create(**{**saying("one two three"), "max_tokens": 1})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 1)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "note"}])
def test_tool_choice_can_require_a_call(client: Anthropic, choice: Any) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    message = client.messages.create(**saying("No.", tools=[NOTE], tool_choice=choice))
    [call] = message.content
    assert (call.type, call.name, message.stop_reason) == ("tool_use", "note", "tool_use")
    assert call.input["name"] in ("ann", "bob")


def test_tool_choice_none_leaves_calls_as_text(client: Anthropic) -> None:
    message = client.messages.create(**saying(CALL, tools=[NOTE], tool_choice={"type": "none"}))
    [block] = message.content
    assert block.type == "text" and "<tool_call>" in block.text


def test_tool_result_is_answered(client: Anthropic) -> None:
    request = saying(CALL, tools=[NOTE])
    [call] = client.messages.create(**request).content
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "say:Written down."}],
    }
    request["messages"] += [
        {"role": "assistant", "content": [call.model_dump()]},
        {"role": "user", "content": [result]},
    ]
    message = client.messages.create(**request)
    assert message.content[0].text.startswith("Written down.")


def test_count_tokens_equals_the_usage(client: Anthropic) -> None:
    request = saying("Yes.", system="Answer briefly.", tools=[NOTE])
    counted = client.messages.count_tokens(
        **{name: request[name] for name in ("model", "messages", "system", "tools")}
    )
    usage = client.messages.create(**request).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_output_format_constrains_the_text(client: Anthropic) -> None:
    schema = {**NOTE["input_schema"], "properties": {"name": {"enum": ["bob"]}}}
    form = {"type": "json_schema", "schema": schema}
    message = client.messages.create(**saying("No.", output_config={"format": form}))
    assert json.loads(message.content[0].text) == {"name": "bob"}


def test_errors_are_those_of_the_package(client: Anthropic) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
    with pytest.raises(anthropic.BadRequestError) as rejected:
        client.messages.create(**{**saying(""), "messages": [{"role": "user", "content": [image]}]})
    body: Any = rejected.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert "messages[0].content[0]" in body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**saying(""), "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="unknown field"):
        client.messages.create(**saying("a", extra_body={"max_tokns": 1}))


def test_rejected_stream_is_an_error_response(client: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**saying("a", extra_body={"temperature": -1.0}), stream=True)


def test_last_assistant_message_is_continued(client: Anthropic) -> None:
    messages = [
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": "say:one two"},
    ]
    message = client.messages.create(**{**saying(""), "messages": messages, "max_tokens": 5})
    assert json.loads(message.model_dump_json())["usage"]["output_tokens"] <= 5
