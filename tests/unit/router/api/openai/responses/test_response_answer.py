"""Events of a response: the same for every division of its output into pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.errors import AttemptsExhausted, InvalidRequest, RouterStopping
from everlift.text import NO_STOPS, Stops
from router.api.http.fields import parse
from router.api.http.streaming import Event
from router.api.http.transcript import Collected, NewOutput, Transcript, Usage
from router.api.openai.responses.answer import FROM_START, ResponseAnswer
from router.api.openai.responses.fields import ResponseFields
from router.api.openai.responses.record import Record
from router.chat.parsers.base import CallableTools
from router.chat.parsers.hermes import HERMES
from router.chat.parsers.think import THINK
from tests.support.router.choices import finished, pieces
from tests.support.worker.vocabularies import BYTE_LEVEL

USAGE = Usage(5, 7, 3)
CALL = '<tool_call>{"name": "f", "arguments": {"a": "b\\"{"}}</tool_call>'
TEXTS = (
    "Hello.",
    f"Look: {CALL}",
    CALL + CALL,
    f"<think>two and two</think>\n\nfour {CALL} and text",
    "<think>unfinished",
    '<tool_call>{"name": "f", "arg',
    "",
)


def answer(after: int = FROM_START, **fields: Any) -> ResponseAnswer:
    body = {"input": "a", "metadata": {"k": "v"}, **fields}
    record = Record.of(parse(ResponseFields, body), 99, [])
    tools = CallableTools({"f": {}}, lambda index: f"call{index}", True)
    parser = THINK.wrapped(HERMES.parser(tools), "prompt")
    return ResponseAnswer("name", "model", record, parser, BYTE_LEVEL, after)


def streamed(
    text: str, cuts: list[int], after: int = FROM_START, reason: str = "stop"
) -> list[dict[str, Any]]:
    writer = answer(after)
    events: list[Event] = list(writer.first_events(USAGE))
    places = [0, *sorted(cuts), len(text)]
    for number, (start, end) in enumerate(itertools.pairwise(places), 1):
        is_last = number == len(places) - 1
        output = NewOutput(0, text[start:end], (), (), reason if is_last else None)
        events += writer.events(output, USAGE)
    events += writer.last_events(USAGE, ())
    loaded = [json.loads(event.data) for event in events]
    assert [event.name for event in events] == [event["type"] for event in loaded]
    return loaded


def units(events: list[dict[str, Any]]) -> list[Any]:
    """Split deltas into characters, each with its own sequence number."""
    found: list[Any] = []
    for event in events:
        if event["type"].endswith(".delta"):
            first = event["sequence_number"] - len(event["delta"]) + 1
            rest = {k: v for k, v in event.items() if k not in ("delta", "sequence_number")}
            found += [(first + i, char, rest) for i, char in enumerate(event["delta"])]
        else:
            found.append((event["sequence_number"], event))
    return found


@given(st.sampled_from(TEXTS), st.data())
def test_events_do_not_depend_on_the_pieces(text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=4))

    assert units(streamed(text, cuts)) == units(streamed(text, []))


@given(st.sampled_from(TEXTS), st.data())
def test_stream_begins_after_any_number(text: str, data: st.DataObject) -> None:
    whole = units(streamed(text, []))
    assert [unit[0] for unit in whole] == list(range(len(whole)))
    after = data.draw(st.integers(FROM_START, len(whole)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=3))

    assert units(streamed(text, cuts, after)) == whole[after + 1 :]


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("text", TEXTS)
def test_last_event_has_the_whole_answer(text: str, reason: str) -> None:
    events = streamed(text, [], reason=reason)
    whole = "".join(answer().encode_complete([Collected([text], finish_reason=reason)], USAGE))

    assert events[-1]["response"] == json.loads(whole)
    assert events[-1]["type"] == f"response.{json.loads(whole)['status']}"
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == json.loads(whole)["output"]


def test_output_has_reasoning_text_and_calls() -> None:
    reasoning, message, call, rest = streamed(TEXTS[3], [])[-1]["response"]["output"]

    assert reasoning["content"] == [{"type": "reasoning_text", "text": "two and two"}]
    assert message["content"][0]["text"].strip() == "four"
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": 'b"{'})
    assert rest["content"][0]["text"].strip() == "and text"


def test_resumed_stream_counts_what_the_client_has() -> None:
    writer = answer()
    output = NewOutput(0, "lo.", (), (), "stop", known_text="Hel", num_known=0)
    events = writer.events(output, USAGE) + writer.last_events(USAGE, ())
    whole = units(streamed("Hello.", []))

    assert units([json.loads(event.data) for event in events]) == whole[-len(events) - 2 :]


def test_failed_stream_ends_with_the_error() -> None:
    writer = answer()
    writer.first_events(USAGE)
    writer.events(NewOutput(0, "Hel", (), ()), USAGE)
    *ends, failed = writer.error_events(AttemptsExhausted("three losses"), {}, {})
    response = json.loads(failed.data)["response"]

    assert ends[-1].name == "response.output_item.done" and failed.name == "response.failed"
    assert (response["status"], response["output"][0]["status"]) == ("failed", "incomplete")
    assert response["error"] == {"code": "attempts_exhausted", "message": "three losses"}


def test_stream_can_go_on_after_an_interruption() -> None:
    writer = answer()
    begun = [*writer.first_events(USAGE), *writer.events(NewOutput(0, "Hel", (), ()), USAGE)]
    [event] = writer.error_events(RouterStopping("stopping"), {}, {"idempotency-key": "name"})
    interrupted = json.loads(event.data)

    assert (event.name, interrupted["code"]) == ("error", "router_stopping")
    assert interrupted["sequence_number"] == json.loads(begun[-1].data)["sequence_number"]
    assert interrupted["message"].endswith(
        f"GET /v1/responses/resp_name?stream=true&starting_after={interrupted['sequence_number']}"
    )
    known = [json.loads(each.data) for each in begun]
    rest = streamed("Hello.", [], interrupted["sequence_number"])
    assert units(known) + units(rest) == units(streamed("Hello.", []))


SCORED_TEXTS = (*TEXTS, "é🙂 Hello.", "<think>é🙂</think>\n\nfour🙂", f"{CALL} a {CALL} b")


def scored(
    text: str, cuts: list[int], after: int = FROM_START, stops: Stops = NO_STOPS
) -> list[dict[str, Any]]:
    """Return the events of a response with log probabilities, of which token n has -1 - n.

    The output is divided before the tokens number ``cuts``.
    """
    choice = finished(BYTE_LEVEL, BYTE_LEVEL.encode(text), stops, top=[(65, -0.5)])
    writer = answer(after, include=["message.output_text.logprobs"], top_logprobs=1)
    events = list(writer.first_events(USAGE))
    transcript = Transcript("name", 1, 1)
    for piece in pieces(choice, cuts):
        output = transcript.read(0, piece)
        events += writer.events(output, USAGE)
    events += writer.last_events(USAGE, ())
    return [json.loads(event.data) for event in events]


def deltas(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == "response.output_text.delta"]


def content_logprobs(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the log probabilities of all messages, after checking that all events have them."""
    parts = [it["content"][0] for it in events[-1]["response"]["output"] if it["type"] == "message"]
    for kind in ("response.output_text.done", "response.content_part.done"):
        done = [event.get("part", event) for event in events if event["type"] == kind]
        assert [it["logprobs"] for it in done if "logprobs" in it] == [
            it["logprobs"] for it in parts
        ]
    return [each for part in parts for each in part["logprobs"]]


@given(st.sampled_from(SCORED_TEXTS), st.data())
def test_logprobs_do_not_depend_on_the_pieces(text: str, data: st.DataObject) -> None:
    whole = scored(text, [])
    cuts = data.draw(st.lists(st.integers(1, 40), max_size=4))
    streamed = scored(text, cuts)
    found = content_logprobs(whole)

    assert streamed[-1]["response"] == whole[-1]["response"]
    assert [each for delta in deltas(streamed) for each in delta["logprobs"]] == found
    for message in whole[-1]["response"]["output"]:
        if message["type"] == "message":
            part = message["content"][0]
            shown = b"".join(bytes(it["bytes"]) for it in part["logprobs"]).decode()
            # White space next to a mark may be part of a token that begins or ends outside.
            assert part["text"].strip() in shown


@given(st.sampled_from(SCORED_TEXTS), st.data())
def test_logprobs_continue_after_any_number(text: str, data: st.DataObject) -> None:
    whole = scored(text, [*range(40)])
    after = data.draw(st.integers(FROM_START, whole[-1]["sequence_number"] - 1))
    rest = scored(text, data.draw(st.lists(st.integers(1, 40), max_size=4)), after)
    listed = [each for delta in deltas(rest) for each in delta["logprobs"]]
    found = content_logprobs(whole)

    assert rest[-1] == whole[-1]
    assert listed == found[len(found) - len(listed) :]
    # A delta that ``after`` cuts has some of its tokens.
    known = [it for it in deltas(whole) if it["sequence_number"] <= after]
    lacking = [it for it in deltas(whole) if it["sequence_number"] - len(it["delta"]) >= after]
    assert len(listed) <= len(found) - sum(len(it["logprobs"]) for it in known)
    assert len(listed) >= sum(len(it["logprobs"]) for it in lacking)


def test_logprobs_leave_out_reasoning_and_calls() -> None:
    text = f"<think>two</think>\n\nfour {CALL} five"
    found = content_logprobs(scored(text, []))

    assert "".join(each["token"] for each in found).split() == ["four", "five"]
    assert found[0]["top_logprobs"] == [
        {
            "token": BYTE_LEVEL.decode([65]),
            "logprob": -0.5,
            "bytes": [*BYTE_LEVEL.decode([65]).encode()],
        }
    ]


def test_token_that_a_stop_string_cuts_is_in_the_end() -> None:
    text, stops = "one two", Stops(("ne t",))
    whole = scored(text, [], stops=stops)
    for cut in range(1, 8):
        events = scored(text, [cut], stops=stops)
        assert (events[-1], deltas(events)) == (whole[-1], deltas(whole))
    assert [it["logprobs"] for it in deltas(whole)] == [[]]
    assert [it["bytes"] for it in content_logprobs(whole)] == [[*b"o"]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"include": ["reasoning.encrypted_content"], "top_logprobs": 0}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 5}, 5),
    ],
)
def test_fields_request_log_probabilities(fields: dict[str, Any], expected: int | None) -> None:
    assert parse(ResponseFields, {"input": "a", **fields}).num_logprobs == expected


def test_top_logprobs_without_include_are_refused() -> None:
    fields = parse(ResponseFields, {"input": "a", "top_logprobs": 5})
    with pytest.raises(InvalidRequest, match="top_logprobs needs message"):
        _ = fields.num_logprobs
