"""Parsers of chats: separation of reasoning, and the special tokens that they need."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.chat_renderer import RenderedChat
from router.chat.deltas import Reasoning
from router.chat.parsers.registry import Formats
from router.chat.tools import ToolUse
from router.requests.tokenizer import ServedModel
from tests.support.router.chat_support import TOOLS, parsed, plain

MODEL = ServedModel.load("fake")
THOUGHT = "<think>\nHm.\n</think>\n\nYes."
CALL = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
CHANNELS = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
)


def conversation(
    tool_format: str, reasoning: str, *, choice: Any = None, tools: Any = TOOLS, prompt: str = "hi"
) -> RenderedChat:
    formats = Formats.of(tool_format, reasoning, "")
    use = ToolUse.of(tools, choice, True)
    return RenderedChat(MODEL, prompt, use.grammar(formats.tools), use, formats)


@pytest.mark.parametrize(
    ("chat", "text", "expected"),
    [
        (conversation("hermes", "think"), THOUGHT, [Reasoning("Hm."), "Yes."]),
        (conversation("hermes", "none"), THOUGHT, [THOUGHT]),
        (
            conversation("hermes", "think", prompt="hi<think>\n"),
            f"Hm.</think>{CALL}",
            [Reasoning("Hm."), ("search", "{}")],
        ),
        (
            conversation("hermes", "think", tools=None, prompt="hi<think>\n"),
            f"Hm.</think>{CALL}",
            [Reasoning("Hm."), CALL],
        ),
        (conversation("hermes", "think", prompt="<think>\n\n</think>\n\n"), "Yes.", ["Yes."]),
        (conversation("gpt_oss", "auto"), CHANNELS, [Reasoning("Hm."), "Yes."]),
        (conversation("gpt_oss", "auto", tools=None), CHANNELS, [Reasoning("Hm."), "Yes."]),
    ],
)
def test_conversation_parser_separates_reasoning(
    chat: RenderedChat, text: str, expected: Any
) -> None:
    assert plain(parsed(chat.parser("r", 0), [text])) == expected


@pytest.mark.parametrize(
    ("chat", "text", "expected"),
    [
        (conversation("auto", "think", tools=None, prompt="<think>"), '{"a": 1}', ['{"a": 1}']),
        (conversation("auto", "think", tools=None), THOUGHT, [THOUGHT]),
        (conversation("gpt_oss", "auto", tools=None), '"<|end|>"', ['"<|end|>"']),
        (conversation("gpt_oss", "auto"), '{"a": 1}', ['{"a": 1}']),
        (
            conversation("hermes", "think", choice="required", prompt="<think>"),
            '[{"name": "search", "arguments": {}}]',
            [("search", "{}")],
        ),
    ],
)
def test_constrained_output_has_no_reasoning(chat: RenderedChat, text: str, expected: Any) -> None:
    assert plain(parsed(chat.parser("r", 0, is_constrained=True), [text])) == expected


@pytest.mark.parametrize(
    ("chat", "special_tokens", "expected"),
    [
        (conversation("hermes", "think"), ["<|im_end|>"], False),
        (conversation("hermes", "none"), ["<tool_call>"], True),
        (conversation("hermes", "none", tools=None), ["<tool_call>"], False),
        (conversation("hermes", "none", choice="required"), ["<tool_call>"], False),
        (conversation("hermes", "think", tools=None), ["<think>"], True),
        (conversation("mistral", "none"), ["[TOOL_CALLS]", "</s>"], True),
        (conversation("mistral", "mistral_think", tools=None), ["[/THINK]"], True),
        (conversation("llama3", "none"), ["<|python_tag|>"], True),
        (conversation("gpt_oss", "auto", tools=None), ["<|message|>"], True),
    ],
)
def test_conversation_needs_special_tokens_that_are_marks(
    chat: RenderedChat, special_tokens: list[str], expected: bool
) -> None:
    assert chat.needs(special_tokens) is expected
