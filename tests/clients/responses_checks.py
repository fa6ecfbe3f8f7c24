"""Checks of the openai package's Responses against a scripted model at EVERLIFT_HTTP.

The model generates the text that its prompt requests (tests/support/scripted.py).
tests/integration runs this module in an environment with this client.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

BASE = f"http://{os.environ['EVERLIFT_HTTP']}/v1"
MODEL = os.environ["EVERLIFT_MODEL"]
NOTE: Any = {
    "type": "function",
    "name": "note",
    "description": "Writes a name down.",
    "parameters": {
        "type": "object",
        "properties": {"name": {"enum": ["ann", "bob"]}},
        "required": ["name"],
        "additionalProperties": False,
    },
    "strict": True,
}
STOP: Any = {"type": "function", "name": "stop", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "note", "arguments": {"name": "ann"}}\n</tool_call>'


def saying(said: str, **more: Any) -> dict[str, Any]:
    """Return a request that is answered with ``said``."""
    more = {"temperature": 0, "max_output_tokens": 200, **more}
    return {"model": MODEL, "input": f"say:{said}", **more}


@pytest.fixture
def client() -> Iterator[OpenAI]:
    with OpenAI(base_url=BASE, api_key="none", max_retries=0) as client:
        yield client


def plain(response: Any) -> dict[str, Any]:
    """Return a response without the time at which it was read."""
    body: dict[str, Any] = response.to_dict()
    return body


def test_response_has_text_and_usage(client: OpenAI) -> None:
    response = client.responses.create(**saying("It is warm.", metadata={"a": "b"}, top_p=0.5))
    assert response.output_text == "It is warm."
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (response.status, response.model, response.error) == ("completed", MODEL, None)
    assert response.metadata == {"a": "b"} and response.top_p == 0.5
    usage = response.usage
    assert usage is not None and usage.output_tokens > 3
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_stored_response_is_retrieved_and_deleted(client: OpenAI) -> None:
    response = client.responses.create(**saying("Yes."))
    assert plain(client.responses.retrieve(response.id)) == plain(response)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_repeated_response_is_the_same(client: OpenAI) -> None:
    name = {"Idempotency-Key": f"response-{time.time()}"}
    request = saying("Yes.")
    first = client.responses.create(**request, extra_headers=name)
    # Times of creation are in seconds.
    time.sleep(max(0.0, first.created_at + 1.1 - time.time()))
    assert plain(client.responses.create(**request, extra_headers=name)) == plain(first)
    events = list(client.responses.create(**request, extra_headers=name, stream=True))
    assert {it.response.created_at for it in events if hasattr(it, "response")} == {
        first.created_at
    }
    with pytest.raises(openai.ConflictError):
        client.responses.create(**saying("No."), extra_headers=name)


def test_unstored_response_cannot_be_retrieved(client: OpenAI) -> None:
    response = client.responses.create(**saying("Yes.", store=False))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**saying("No.", previous_response_id=response.id))


def test_stream_accumulates_to_the_stored_response(client: OpenAI) -> None:
    request = saying(f"I note it.\n{CALL}\n{CALL.replace('ann', 'bob')}", tools=[NOTE, STOP])
    with client.responses.stream(**request) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers)) and numbers[0] == 0
    message, *calls = final.output
    assert message.content[0].text.strip() == "I note it."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("note", {"name": "ann"}),
        ("note", {"name": "bob"}),
    ]
    stored = client.responses.retrieve(final.id)
    assert [item.to_dict() for item in stored.output] == [
        {key: value for key, value in item.to_dict().items() if key != "parsed_arguments"}
        | ({"content": stored.output[i].to_dict()["content"]} if i == 0 else {})
        for i, item in enumerate(final.output)
    ]
    assert stored.usage == final.usage


def test_response_has_log_probabilities(client: OpenAI) -> None:
    included: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    request = {"model": MODEL, "input": "count", "max_output_tokens": 12, "temperature": 0}
    response = client.responses.create(**request, **included)
    [message] = response.output
    [part] = message.content
    assert response.top_logprobs == 2 and part.text
    assert b"".join(bytes(it.bytes) for it in part.logprobs).decode() == part.text
    for each in part.logprobs:
        assert each.logprob <= 0 and len(each.top_logprobs) == 2
        # The most probable token was sampled, perhaps one of several.
        assert each.top_logprobs[0].logprob == each.logprob
    stored = client.responses.retrieve(response.id)
    assert plain(stored) == plain(response)

    events: list[Any] = list(client.responses.create(**request, **included, stream=True))
    deltas = [it for it in events if it.type == "response.output_text.delta"]
    listed = [each.to_dict() for delta in deltas for each in delta.logprobs]
    assert listed == [each.to_dict() for each in part.logprobs]
    [done] = [it for it in events if it.type == "response.output_text.done"]
    assert [each.to_dict() for each in done.logprobs] == listed
    assert events[-1].response.output[0].content == message.content
    again = list(client.responses.retrieve(events[0].response.id, stream=True))
    assert again[-1].to_dict() == events[-1].to_dict()
    assert client.responses.create(**request).output[0].content[0].logprobs == []


def test_log_probabilities_of_content_only(client: OpenAI) -> None:
    included: Any = {"include": ["message.output_text.logprobs"]}
    request = saying(f"I note it.\n{CALL}", tools=[NOTE], **included)
    with client.responses.stream(**request) as stream:
        message, call = stream.get_final_response().output
    assert call.type == "function_call"
    assert "".join(it.token for it in message.content[0].logprobs).strip() == "I note it."


def delta_text(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type.endswith(".delta"))


@pytest.mark.parametrize("background", [False, True])
def test_stream_is_read_again_from_any_number(client: OpenAI, background: bool) -> None:
    request = saying("one two three four", background=background)
    events = list(client.responses.create(**request, stream=True))
    response_id = events[0].response.id
    again = list(client.responses.retrieve(response_id, stream=True))
    assert delta_text(again) == delta_text(events) == "one two three four"
    assert again[-1].to_dict() == events[-1].to_dict()
    last = again[-1].sequence_number
    begin = next(e for e in again if e.type.endswith(".delta")).sequence_number
    for after in range(last + 1):
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=after))
        assert all(event.sequence_number > after for event in rest)
        if after >= begin:
            known = delta_text([e for e in again if e.sequence_number <= begin])
            text = "one two three four"[len(known) + after - begin :]
            assert delta_text(rest) == text


def test_later_response_continues_the_earlier_ones(client: OpenAI) -> None:
    first = client.responses.create(**saying("First.", instructions="Be brief."))
    second = client.responses.create(**saying("Second.", previous_response_id=first.id))
    third = client.responses.create(**saying("Third.", previous_response_id=second.id))
    assert [r.output_text for r in (first, second, third)] == ["First.", "Second.", "Third."]
    assert third.previous_response_id == second.id
    counted = [r.usage.input_tokens for r in (first, second, third)]
    assert counted == sorted(set(counted))
    # The prompt and the output of the turn before are reused, but for the last block.
    assert third.usage.input_tokens_details.cached_tokens > 0
    whole = [
        {"role": "user", "content": "say:First."},
        {"role": "assistant", "content": "First."},
        {"role": "user", "content": "say:Second."},
        {"role": "assistant", "content": "Second."},
        {"role": "user", "content": "say:Third."},
    ]
    sent = client.responses.create(**saying("", store=False) | {"input": whole})
    assert sent.usage.input_tokens == third.usage.input_tokens


def test_tool_result_is_answered(client: OpenAI) -> None:
    first = client.responses.create(**saying(CALL, tools=[NOTE]))
    [call] = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "note",
        {"name": "ann"},
    )
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "say:Written."}
    request = saying("", tools=[NOTE], previous_response_id=first.id) | {"input": [result]}
    assert client.responses.create(**request).output_text.startswith("Written.")
    items = [{"role": "user", "content": f"say:{CALL}"}, call.to_dict(), result]
    request = saying("", tools=[NOTE]) | {"input": items}
    assert client.responses.create(**request).output_text.startswith("Written.")


@pytest.mark.parametrize("streams", [False, True])
def test_function_in_a_namespace_is_called(client: OpenAI, streams: bool) -> None:
    tools: Any = [
        {"type": "namespace", "name": "diary", "description": "A diary.", "tools": [NOTE]},
        NOTE,
    ]
    said = CALL.replace("note", "diary__note") + CALL
    request = saying(said, tools=tools)
    if streams:
        with client.responses.stream(**request) as stream:
            response: Any = stream.get_final_response()
    else:
        response = client.responses.create(**request)
    calls = response.output
    assert [(call.name, call.namespace) for call in calls] == [("note", "diary"), ("note", None)]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "say:Written."}
        for call in calls
    ]
    continued = {"input": results, "previous_response_id": response.id}
    answer = client.responses.create(**saying("", tools=tools) | continued)
    items = [{"role": "user", "content": f"say:{said}"}, *(it.to_dict() for it in calls), *results]
    for item in items:
        item.pop("parsed_arguments", None)
    again = client.responses.create(**saying("", tools=tools) | {"input": items})
    assert (again.output_text, again.usage) == (answer.output_text, again.usage)
    assert again.usage.input_tokens == answer.usage.input_tokens


def test_tools_of_the_server_are_ignored(client: OpenAI) -> None:
    tools: Any = [{"type": "web_search"}, {"type": "local_shell"}, NOTE]
    response = client.responses.create(**saying(CALL, tools=tools))
    [call] = response.output
    assert call.name == "note"
    assert [tool.type for tool in response.tools] == ["web_search", "local_shell", "function"]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "note"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "note"}],
        },
    ],
)
def test_tool_choice_can_require_a_call(client: OpenAI, choice: Any) -> None:
    request = saying("No.", tools=[NOTE], tool_choice=choice, parallel_tool_calls=False)
    response = client.responses.create(**request)
    [call] = response.output
    assert call.name == "note" and json.loads(call.arguments)["name"] in ("ann", "bob")
    assert response.tool_choice == choice or response.tool_choice.to_dict() == choice


def test_text_format_constrains_the_output(client: OpenAI) -> None:
    schema = {**NOTE["parameters"], "properties": {"name": {"enum": ["bob"]}}}
    form = {"type": "json_schema", "name": "person", "schema": schema, "strict": True}
    response = client.responses.create(**saying("No.", text={"format": form}))
    assert json.loads(response.output_text) == {"name": "bob"}


def test_cut_response_is_incomplete(client: OpenAI) -> None:
    response = client.responses.create(**saying("one two three", max_output_tokens=1))
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert plain(client.responses.retrieve(response.id)) == plain(response)


def test_background_response_is_polled(client: OpenAI) -> None:
    response = client.responses.create(**saying("In the background.", background=True))
    assert response.status == "queued" and response.output == []
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress") and time.monotonic() < deadline:
        response = client.responses.retrieve(response.id)
    assert (response.status, response.output_text) == ("completed", "In the background.")


def test_background_response_is_cancelled(client: OpenAI) -> None:
    request = {"model": MODEL, "input": "count", "background": True, "max_output_tokens": 2000}
    response = client.responses.create(**request, extra_body={"min_p": 0.5})
    assert client.responses.cancel(response.id).status in ("cancelled", "completed", "incomplete")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(client.responses.create(**saying("a")).id)


def test_input_items_are_listed(client: OpenAI) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": f"{i}"}]} for i in range(5)
    ]
    response = client.responses.create(**saying("") | {"input": items})
    listed = list(client.responses.input_items.list(response.id, order="asc", limit=2))
    assert [item.content[0].text for item in listed] == ["0", "1", "2", "3", "4"]
    newest = list(client.responses.input_items.list(response.id))
    assert [item.id for item in newest] == [item.id for item in reversed(listed)]


def test_input_tokens_equal_the_usage(client: OpenAI) -> None:
    request = saying("Yes.", instructions="Be brief.", tools=[NOTE])
    asked = {key: request[key] for key in ("model", "input", "instructions", "tools")}
    counted = client.responses.input_tokens.count(**asked).input_tokens
    assert client.responses.create(**request).usage.input_tokens == counted


def test_long_conversation_is_truncated_if_asked(client: OpenAI) -> None:
    filler = [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "ok"}]
    answer = {"role": "assistant", "content": "word " * 4000}
    for earlier in (filler * 12, [answer]):
        items = [*earlier, {"role": "user", "content": "say:Still here."}]
        request = saying("", max_output_tokens=20) | {"input": items}
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**request)
        response = client.responses.create(**request, truncation="auto")
        assert response.output_text.startswith("Still here.")


def test_invalid_fields_are_named(client: OpenAI) -> None:
    for more, words in (
        ({"input": []}, "at least one item"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0]"),
        ({"tools": [{"type": "functions"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are no tools"),
        ({"conversation": "conv_1"}, "there is no conversation conv_1"),
        ({"top_logprobs": 2}, "include"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"background": True, "store": False}, "store"),
        ({"previous_response_id": "resp_missing"}, "missing"),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            client.responses.create(**saying("a") | more)
        assert words in str(caught.value), more
        assert caught.value.status_code in (400, 404)
