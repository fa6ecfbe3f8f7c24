"""Translation between the items of Responses and the internal form of a conversation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from everlift.errors import EverliftError, InvalidRequest, OutOfRange, UnsupportedContent
from router.api.http.fields import parse
from router.api.openai.responses.fields import InputTokensFields, ResponseFields
from router.api.openai.responses.items import (
    input_turns,
    items_of,
    template_variables,
    tool_use,
    with_ids,
)
from router.api.openai.responses.namespaces import own_names
from router.api.openai.responses.record import Record
from router.chat.conversation import ToolCall, Turn
from router.chat.tools import Choice
from tests.support.router.conversations import turns

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}


def space(*tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": "n", "description": "some", "tools": list(tools)}


@given(turns())
def test_turns_survive_the_way_through_items(given: tuple[Turn, ...]) -> None:
    assert tuple(input_turns(items_of(given))) == given
    assert tuple(input_turns(with_ids(items_of(given), "r"))) == given


def test_items_of_the_assistant_become_one_turn() -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "2 and 2"}]}
    message = {"role": "assistant", "content": [{"type": "output_text", "text": "4"}]}

    assert input_turns([reasoning, message, CALL, CALL]) == [
        Turn("assistant", ("4",), "2 and 2", (ToolCall("c", "f", {"a": 1}),) * 2)
    ]
    assert len(input_turns([message, message, reasoning])) == 3
    assert len(input_turns([CALL, message])) == 2


@pytest.mark.parametrize(
    ("choice", "expected", "callable_names"),
    [
        (None, Choice.AUTO, ["f", "g"]),
        ("none", Choice.NONE, ["f", "g"]),
        ({"type": "function", "name": "g"}, Choice.NAMED, ["f", "g"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            Choice.AUTO,
            ["g"],
        ),
    ],
)
def test_tool_choice_is_translated(choice: Any, expected: Choice, callable_names: Any) -> None:
    tools = [TOOL, {**TOOL, "name": "g"}]
    fields = parse(InputTokensFields, {"input": "a", "tools": tools, "tool_choice": choice})
    use = tool_use(fields)

    assert use.choice is expected
    assert [function.name for function in use.callable] == callable_names


IGNORED = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "custom",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "shell",
    "tool_search",
    "web_search",
    "web_search_preview",
)


@pytest.mark.parametrize("kind", IGNORED)
def test_tools_of_other_types_are_left_out(kind: str) -> None:
    other = {"type": kind, "name": "other", "tools": [{**TOOL, "name": "g"}]}
    use = tool_use(parse(InputTokensFields, {"input": "a", "tools": [other, TOOL]}))

    assert [function.name for function in use.functions] == ["f"]
    with pytest.raises(InvalidRequest, match="there are no tools"):
        fields = {"input": "a", "tools": [other], "tool_choice": "required"}
        tool_use(parse(InputTokensFields, fields))


def test_functions_in_namespaces_have_joined_names() -> None:
    long = "n" * 63
    inner = [{**TOOL, "name": "g"}, {"type": "custom", "name": "other"}]
    spaces = [
        {"type": "namespace", "name": name, "description": "some", "tools": inner}
        for name in ("crm", "mcp__files__", long)
    ]
    choice = {"type": "function", "name": "g", "namespace": "crm"}
    fields = {"input": "a", "tools": [TOOL, *spaces], "tool_choice": choice}
    use = tool_use(parse(InputTokensFields, fields))

    names = [function.name for function in use.functions]
    assert names[:3] == ["f", "crm__g", "mcp__files__g"] and use.named == "crm__g"
    assert len(names[3]) == 64 and names[3].startswith(long[:40])
    assert [function.shown["function"]["name"] for function in use.functions] == names
    assert [*own_names([TOOL, *spaces])] == names[1:]
    assert own_names(spaces)[names[3]] == {"namespace": long, "name": "g"}
    [turn] = input_turns([{**CALL, "name": "g", "namespace": long}])
    assert turn.calls[0].name == names[3]


def test_client_metadata_is_accepted() -> None:
    plain = parse(ResponseFields, {"input": "a"})
    fields = parse(ResponseFields, {"input": "a", "client_metadata": {"session_id": "s"}})

    assert fields.generation == plain.generation


@pytest.mark.parametrize(
    ("effort", "expected"),
    [
        (None, {}),
        ("none", {"enable_thinking": False}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
    ],
)
def test_reasoning_effort_is_a_template_variable(effort: Any, expected: Any) -> None:
    fields = parse(InputTokensFields, {"input": "a", "reasoning": {"effort": effort}})

    assert template_variables(fields.reasoning) == expected
    assert template_variables(None) == {}


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"input": []}, InvalidRequest, "at least one item"),
        ({"input": [{"role": "tool"}]}, InvalidRequest, "input[0].role"),
        ({"input": [{"role": "user"}]}, InvalidRequest, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, UnsupportedContent, "input[0]"),
        ({"input": [{"type": 3}]}, UnsupportedContent, "input[0]"),
        ({"input": [{**CALL, "name": "a b"}]}, InvalidRequest, "input[0].name"),
        ({"input": [{**CALL, "call_id": None}]}, InvalidRequest, "input[0].call_id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c"}]},
            InvalidRequest,
            "input[0].output",
        ),
        ({"input": [{"type": "reasoning", "content": 1}]}, InvalidRequest, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            InvalidRequest,
            "input[0].content[0].image_url must be a string",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            UnsupportedContent,
            "input[0].content[0]: models read texts and images",
        ),
        ({"tools": [{"type": "functions"}]}, InvalidRequest, "tools[0]: unknown type 'functions'"),
        (
            {"tools": [{"type": "custom"}, TOOL, TOOL]},
            InvalidRequest,
            "tools[2] has the same name as an earlier tool: f",
        ),
        ({"tools": [{"type": "function"}]}, InvalidRequest, "tools[0].name"),
        ({"tools": [{"type": "namespace", "tools": []}]}, InvalidRequest, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, InvalidRequest, "tools[0].tools"),
        ({"tools": [space({"type": "function"})]}, InvalidRequest, "tools[0].tools[0].name"),
        ({"tools": [space(space(TOOL))]}, InvalidRequest, "tools[0].tools[0]: unknown type"),
        ({"tools": [space(TOOL), space(TOOL)]}, InvalidRequest, "tools[1] has the same name"),
        (
            {"tools": [space(*({**TOOL, "name": f"f{n}"} for n in range(129)))]},
            OutOfRange,
            "at most 128",
        ),
        ({"input": [{**CALL, "namespace": "a b"}]}, InvalidRequest, "input[0].namespace"),
        ({"tool_choice": {"type": "web_search"}}, InvalidRequest, "tool_choice must be"),
        ({"tool_choice": "all"}, InvalidRequest, "tool_choice must be"),
        ({"tool_choice": "required"}, InvalidRequest, "there are no tools"),
        ({"conversation": {"name": "c"}}, EverliftError, "conversation.name"),
    ],
)
def test_malformed_fields_are_rejected_with_their_path(
    fields: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        parsed = parse(InputTokensFields, {"input": "a", **fields})
        input_turns(parsed.input)
        tool_use(parsed)

    assert words in str(caught.value)


def test_json_schema_format_needs_a_schema() -> None:
    fields = parse(ResponseFields, {"input": "a", "text": {"format": {"type": "json_schema"}}})

    with pytest.raises(InvalidRequest, match=r"text\.format\.schema is missing"):
        _ = fields.generation


def test_generation_has_the_shared_fields() -> None:
    given = {"temperature": 0.5, "seed": 3, "priority": 1, "min_p": 0.1, "on_disconnect": "grace"}
    fields = parse(ResponseFields, {"input": "a", "max_output_tokens": 9, **given})
    kept = parse(ResponseFields, {"input": "a", "background": True, **given})

    assert {name: getattr(fields.generation, name) for name in given} == given
    assert fields.generation.max_tokens == 9
    assert kept.generation.on_disconnect == "continue"


def test_record_survives_storage() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    body = {"input": [CALL], "tools": [TOOL], "text": {"format": form}, "metadata": {"a": "b"}}
    record = Record.of(parse(ResponseFields, body), 1234, ["first", "second"])
    again = Record.from_bytes(record.to_bytes())

    assert (again.body, again.created_at, [*again.ancestors]) == (body, 1234, ["first", "second"])
    assert again.prompt_fields == parse(
        InputTokensFields, {key: body[key] for key in ("input", "tools", "text")}
    )
