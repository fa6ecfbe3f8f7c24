"""Messages and variables of a chat, in the client's form and in the template's."""

import inspect
import threading
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from everlift.errors import InvalidRequest, NotUtf8, OutOfRange, UnsupportedContent
from router.chat import frames
from router.chat.checks import checked, json_length
from router.chat.conversation import ToolCall, Turn
from router.chat.messages import MAX_BYTES, MAX_MESSAGES, chat_turns, template_messages
from router.chat.templates import ChatTemplate
from tests.support.router import chat_support

USER = {"role": "user", "content": "hello"}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function, **more}


def shown(*messages: Any) -> list[Any]:
    return template_messages(chat_turns(list(messages)))


def test_content_parts_are_joined_into_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    assert shown({"role": "system", "content": "be brief"}, {"role": "user", "content": parts}) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo"},
    ]


def test_null_and_echoed_fields_do_not_reach_the_template() -> None:
    answer = {
        "role": "assistant",
        "content": "yes",
        "name": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }

    assert shown(answer) == [{"role": "assistant", "content": "yes"}]


def test_message_type_of_lm_eval_is_dropped() -> None:
    assert shown({"role": "user", "content": "hi", "type": "text"}) == [
        {"role": "user", "content": "hi"}
    ]


def test_tool_arguments_become_objects_and_results_get_names() -> None:
    messages = shown(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call('{"city": "Bern"}', index=0)]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "?"},
    )

    assert messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call({"city": "Bern"})]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain", "name": "weather"},
        {"role": "tool", "tool_call_id": "c2", "content": "?"},
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"a": 1}, {"a": 1}),
        ("", {}),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ('{"a": 1e999}', '{"a": 1e999}'),
        ('{"a": [1]}', {"a": [1]}),
        # text that is not a JSON object is shown unchanged
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ('{"a": NaN}', '{"a": NaN}'),
    ],
)
def test_tool_call_arguments_are_parsed_where_valid(given: Any, expected: Any) -> None:
    [message] = shown({"role": "assistant", "tool_calls": [call(given)]})

    assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_assistant_message_may_be_empty() -> None:
    assert shown({"role": "assistant"}) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"tool_calls": [call({})]}, ""),
        ({"tool_calls": []}, ""),
        ({"tool_calls": None, "function_call": None, "audio": None}, ""),
        ({"reasoning_content": "2 and 2"}, ""),
        ({"refusal": None}, ""),
    ],
)
def test_assistant_without_content_has_empty_content(
    content: Any, members: Any, expected: str
) -> None:
    [message] = shown({"role": "assistant", **content, **members})

    assert message["content"] == expected


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
def test_assistant_refusal_replaces_missing_content(content: Any) -> None:
    refused = {"role": "assistant", "refusal": "I cannot.", **content}

    assert shown(refused) == [{"role": "assistant", "content": "I cannot."}]
    assert shown({**refused, "content": "No."}) == [{"role": "assistant", "content": "No."}]


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_non_assistant_roles_require_content(role: str, content: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content must be a string"):
        shown({"role": role, "tool_call_id": "c1", **content})


@pytest.mark.parametrize("value", [None, "x", 1, {"type": "ephemeral"}, [1]])
@pytest.mark.parametrize("name", ["cache_control", "provider_specific_fields", "reasoning_details"])
def test_unknown_members_are_ignored(name: str, value: Any) -> None:
    extra = {name: value}
    function = {"name": "weather", "arguments": "{}"}
    calls = [
        {"id": "c1", "type": None, "index": 0, "function": {**function, **extra}, **extra},
        {"id": "c2", "function": {"name": "weather", "arguments": None}},
    ]
    messages = shown(
        {"role": "system", "content": [{"type": "text", "text": "brief", **extra}], **extra},
        {**USER, **extra, "tool_calls": [], "tool_call_id": "x", "reasoning": 1},
        {"role": "assistant", "content": None, "tool_calls": calls, **extra},
        {"role": "tool", "tool_call_id": "c1", "content": "rain", "tool_name": "w", **extra},
    )

    assert messages == [
        {"role": "system", "content": "brief"},
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": each, "type": "function", "function": {"name": "weather", "arguments": {}}}
                for each in ("c1", "c2")
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain", "name": "weather"},
    ]


@pytest.mark.parametrize("value", [{"type": "enabled"}, [{"text": "2"}]])
def test_reasoning_that_is_no_text_is_ignored(value: Any) -> None:
    assert shown({"role": "assistant", "content": "4", "thinking": value}) == [
        {"role": "assistant", "content": "4"}
    ]


REASONING = ("reasoning_content", "reasoning", "thinking")


@pytest.mark.parametrize("key", REASONING)
def test_reasoning_is_shown_under_each_name(key: str) -> None:
    message = {"role": "assistant", "content": "4"}

    assert shown({**message, key: "2 and 2"}) == [
        {**message, **dict.fromkeys(REASONING, "2 and 2")}
    ]


def test_thinking_is_not_shown_beside_text_and_calls() -> None:
    """The template of gpt-oss rejects a message with all three of them."""
    message = {"role": "assistant", "reasoning": "2 and 2", "tool_calls": [call({})]}
    [with_text, without] = shown({**message, "content": "4"}, message)

    assert "thinking" not in with_text and with_text["reasoning_content"] == "2 and 2"
    assert without["thinking"] == "2 and 2"


@pytest.mark.parametrize(
    ("messages", "error", "words"),
    [
        (None, InvalidRequest, "messages must be a list"),
        ([], InvalidRequest, "messages must be a list"),
        (["hello"], InvalidRequest, "messages[0] must be an object"),
        ([USER, {"content": "x"}], InvalidRequest, "messages[1].role must be one of system"),
        ([{"role": "robot", "content": ""}], InvalidRequest, "messages[0].role"),
        ([{"role": []}], InvalidRequest, "messages[0].role"),
        ([{"role": "user"}], InvalidRequest, "messages[0].content must be"),
        ([{"role": "user", "content": 3}], InvalidRequest, "messages[0].content must be"),
        ([{"role": "user", "content": []}], InvalidRequest, "messages[0].content must be"),
        ([{"role": "user", "content": ["a"]}], InvalidRequest, "content[0] must be an object"),
        ([{"role": "user", "content": [{"type": "text"}]}], InvalidRequest, "content[0].text"),
        ([{"role": "tool", "content": ""}], InvalidRequest, "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": {}}], InvalidRequest, "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], InvalidRequest, "tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [call(3)]}], InvalidRequest, "arguments must be"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a b"}}]}],
            InvalidRequest,
            "function.name must be 1 to 64",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            UnsupportedContent,
            "image_url.url must be a data URL",
        ),
        (
            [{"role": "assistant", "audio": {"id": "x"}}],
            UnsupportedContent,
            "messages[0].audio is not supported",
        ),
        ([USER] * (MAX_MESSAGES + 1), OutOfRange, f"at most {MAX_MESSAGES}"),
        ([{**USER, "content": "é" * (MAX_BYTES // 2)}], OutOfRange, "bytes"),
        ([{**USER, "content": "\ud800"}], NotUtf8, "surrogate"),
        ([{**USER, "name": float("nan")}], InvalidRequest, "NaN"),
        (
            [{"role": "assistant", "tool_calls": [call("[" * 100_000)]}],
            OutOfRange,
            "arguments is nested too deeply",
        ),
        (
            [{"role": "assistant", "tool_calls": [call('{"a":' + "[" * 80 + "]" * 80 + "}")]}],
            OutOfRange,
            "64 levels",
        ),
    ],
)
def test_malformed_messages_are_rejected_with_their_path(
    messages: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        chat_turns(messages)

    assert words in str(caught.value)
    assert type(caught.value) is error


def test_message_nesting_depth_is_bounded() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]

    with pytest.raises(OutOfRange, match="64 levels"):
        shown({"role": "user", "content": deep})


def test_size_of_messages_is_checked_before_their_depth() -> None:
    deep: Any = "x" * MAX_BYTES
    for _ in range(70):
        deep = [deep]

    with pytest.raises(OutOfRange, match="bytes"):
        shown({"role": "user", "content": deep})


@pytest.mark.parametrize(("count", "is_inline"), [(1, True), (70_000, False)])
async def test_chats_with_many_values_are_encoded_in_a_thread(
    count: int, is_inline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def encode(frame: Any) -> bytes:
        threads.append(threading.get_ident())
        return b""

    async def enqueue(template: ChatTemplate, request: bytes) -> str:
        return ""

    monkeypatch.setattr(frames, "encode", encode)
    monkeypatch.setattr(ChatTemplate, "_enqueue", enqueue)
    turn = Turn("assistant", calls=(ToolCall("c", "f", {"a": [1] * count}),))
    await chat_support.chat_template(tmp_path, "a").render([turn], None)
    assert (threads == [threading.get_ident()]) == is_inline


def test_json_length_ends_above_its_limit() -> None:
    value = {"a": ["bc", 1], "d": {"e": None}}
    assert json_length(value, 100) == json_length(value, 8) == 8
    assert json_length("abc", 100) == 4
    assert 4 < json_length([[1]] * 1000, 4) <= 1001
    assert json_length([1, *[["a" * 9]] * 1000], 2000) < 2100


def test_template_variables_may_be_set() -> None:
    given = {"enable_thinking": False, "reasoning_effort": "low", "thinking_budget": 3}

    assert checked(given) == given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "must be an object"),
        ({"tokenize": True}, "may not set tokenize"),
        ({"chat_template": "{{ 1 }}"}, "may not set chat_template"),
        ({"messages": "x"}, "may not set messages"),
        ({"tools": "x"}, "may not set tools"),
        ({"bos_token": "x"}, "may not set bos_token"),
        ({"__class__": 1}, "may not set __class__"),
        ({"a b": 1}, "may not set a b"),
        ({"documents": "x"}, "may not set documents"),
        ({"enable_thinking": []}, "enable_thinking must be"),
        ({"enable_thinking": None}, "enable_thinking must be"),
        ({f"a{i}": 1 for i in range(17)}, "more than 16"),
        ({"a": "x" * 5000}, "bytes"),
    ],
)
def test_template_variables_reserved_or_invalid_are_rejected(given: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(given)

    assert words in str(caught.value)


def test_template_variables_exclude_transformers_and_jinja_names() -> None:
    """Such names once selected server behaviour or the template: CVE-2025-62426, CVE-2025-61620."""
    functions = (
        PreTrainedTokenizerBase.apply_chat_template,
        chat_template_utils.render_jinja_template,
    )
    names = {name for function in functions for name in inspect.signature(function).parameters}
    environment = chat_template_utils._compile_jinja_template("").environment
    assert isinstance(environment, jinja2.sandbox.ImmutableSandboxedEnvironment)

    for name in names | set(environment.globals) | {"eos_token", "special_tokens"}:
        with pytest.raises(InvalidRequest):
            checked({name: True})
