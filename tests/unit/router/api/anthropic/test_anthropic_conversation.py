"""Translation between Anthropic's messages and the internal form of a conversation."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given

from everlift.errors import InvalidRequest, UnsupportedContent
from everlift.images import Image
from router.api.anthropic.conversation import conversation_of, messages_of
from router.api.anthropic.fields import CountTokensFields, MessagesFields
from router.api.http.fields import parse
from router.chat.conversation import Conversation, ToolCall, Turn
from router.chat.tools import Choice
from tests.support.images import png
from tests.support.router.conversations import turns

HELLO = {"role": "user", "content": "hello"}
THINKING = {"type": "thinking", "thinking": "2 and 2", "signature": "x"}
REDACTED = {"type": "redacted_thinking", "data": "y"}
URL = {"type": "url", "url": "https://a.b/c.png"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": b64encode(png(1)).decode()}
IMAGE = {"type": "image", "source": SOURCE}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
TEXT = {"type": "text", "text": "4"}
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}


def result_of(*blocks: object) -> dict[str, object]:
    return {"type": "tool_result", "tool_use_id": "c", "content": [*blocks]}


def read(**fields: Any) -> Conversation:
    return conversation_of(parse(CountTokensFields, {"model": "m", "messages": [HELLO], **fields}))


@given(turns())
def test_turns_survive_the_way_through_messages(given: tuple[Turn, ...]) -> None:
    system, messages = messages_of(given)
    again = read(messages=[*messages, HELLO], **({"system": system} if system else {}))

    assert again.turns == (*given, Turn("user", ("hello",)))


def test_user_message_is_split_at_tool_results() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": "rain"}
    text = {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}}

    assert read(messages=[{"role": "user", "content": [text, result, text, text]}]).turns == (
        Turn("user", ("so?",)),
        Turn("tool", ("rain",), call_id="c"),
        Turn("user", ("so?", "so?")),
    )


def test_user_message_has_images() -> None:
    text = {"type": "text", "text": "so?"}
    [turn] = read(messages=[{"role": "user", "content": [IMAGE, text]}]).turns
    assert turn == Turn("user", (Image.checked(png(1), "image"), "so?"))


def test_images_of_tool_results_follow_the_results() -> None:
    text = {"type": "text", "text": "here"}
    content = [result_of(text, IMAGE), result_of(IMAGE), {"type": "text", "text": "so?"}]
    image = Image.checked(png(1), "image")
    assert read(messages=[{"role": "user", "content": content}]).turns == (
        Turn("tool", ("here",), call_id="c"),
        Turn("tool", (), call_id="c"),
        Turn("user", (image, image, "so?")),
    )


def test_assistant_message_has_reasoning_text_and_calls() -> None:
    blocks = [
        THINKING,
        REDACTED,
        TEXT,
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}, "caller": {}},
    ]
    [_, turn, _] = read(messages=[HELLO, {"role": "assistant", "content": blocks}, HELLO]).turns

    assert turn == Turn("assistant", ("4",), "2 and 2", (ToolCall("c", "f", {"a": 1}),))


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [(None, False), ({"type": "disabled"}, False), ({"type": "enabled", "budget_tokens": 9}, True)],
)
def test_thinking_is_a_template_variable(thinking: Any, expected: bool) -> None:
    assert read(thinking=thinking).template_variables == {"enable_thinking": expected}


@pytest.mark.parametrize(
    ("raw", "choice", "is_parallel"),
    [
        (None, Choice.AUTO, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, Choice.AUTO, False),
        ({"type": "any"}, Choice.REQUIRED, True),
        ({"type": "tool", "name": "f"}, Choice.NAMED, True),
        ({"type": "none"}, Choice.NONE, True),
    ],
)
def test_tool_choice_is_translated(raw: Any, choice: Choice, is_parallel: bool) -> None:
    tools = read(tools=[TOOL], tool_choice=raw).tools

    assert (tools.choice, tools.is_parallel) == (choice, is_parallel)


@pytest.mark.parametrize("content", ["I", [], [THINKING, TEXT]])
def test_last_assistant_message_is_continued(content: Any) -> None:
    conversation = read(messages=[HELLO, {"role": "assistant", "content": content}])

    assert conversation.continue_final_message and not conversation.add_generation_prompt
    assert not read().continue_final_message


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([TEXT, CALL], "cannot continue a message with tool_use"),
        ([CALL, TEXT], "cannot continue a message with tool_use"),
        ([THINKING], "must end with text, which the answer continues, not with thinking"),
        ([TEXT, REDACTED], "must end with text, which the answer continues, not with redacted"),
    ],
)
def test_last_assistant_message_must_end_with_text(blocks: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        read(messages=[HELLO, {"role": "assistant", "content": blocks}])

    assert str(caught.value).startswith("messages[1].content")


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"messages": [{"role": "tool", "content": ""}]}, InvalidRequest, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, InvalidRequest, "[0].content must be a string or"),
        ({"messages": [{"role": "user", "content": []}]}, InvalidRequest, "must not be empty"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, InvalidRequest, "content[0] must be"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            InvalidRequest,
            "messages[0].content[0].source must be an object",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": URL}]}]},
            UnsupportedContent,
            "messages[0].content[0].source.type must be base64, not url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            UnsupportedContent,
            "messages[0].content[0]: models read texts and images, not document",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            InvalidRequest,
            "tool_use_id must be a string",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}]},
            InvalidRequest,
            "input must be an object",
        ),
        ({"system": [{"type": "image"}]}, UnsupportedContent, "system[0]"),
        ({"tools": [{"type": "bash_20250124", "name": "b"}]}, InvalidRequest, "tools[0].type"),
        ({"tools": [{"name": "a b"}]}, InvalidRequest, "tools[0].name must be 1 to 64"),
        (
            {"tools": [{"name": "a", "input_schema": {"type": "array"}}]},
            InvalidRequest,
            "tools[0].input_schema must be the schema of an object",
        ),
        ({"tool_choice": {"type": "any"}}, InvalidRequest, "there are no tools"),
        ({"tool_choice": {"type": "all"}}, InvalidRequest, "must be auto, any, none or tool"),
    ],
)
def test_malformed_fields_are_rejected_with_their_path(
    fields: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        read(**fields)

    assert words in str(caught.value)


def test_context_management_is_accepted() -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]

    assert read(context_management={"edits": edits}) == read()


def test_generation_has_the_shared_parameters() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    fields = parse(
        MessagesFields,
        {
            "model": "m",
            "messages": [HELLO],
            "max_tokens": 9,
            "stop_sequences": ["x"],
            "top_k": 3,
            "metadata": {"user_id": "u"},
            "output_config": form,
        },
    ).generation

    assert (fields.max_tokens, fields.stop, fields.top_k, fields.user) == (9, ["x"], 3, "u")
    assert fields.response_format is not None
    assert fields.response_format.json_schema is not None
    assert fields.response_format.json_schema.schema_ == {"type": "object"}
