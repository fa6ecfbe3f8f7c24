"""Formats that settings name, and those that chat templates show."""

from __future__ import annotations

import pytest

from router.chat.parsers.gpt_oss import GPT_OSS, GPT_OSS_REASONING
from router.chat.parsers.hermes import HERMES
from router.chat.parsers.registry import Formats
from router.chat.parsers.think import THINK
from router.config import RouterConfig

HERMES_TEMPLATE = "{{ '<tool_call>' }}...{{ '</tool_call>' }}"
QWEN3 = HERMES_TEMPLATE + "{% if '</think>' in content %}<think>{% endif %}"
QWEN3_CODER = HERMES_TEMPLATE + "<function=...>\n<parameter=...>"
LLAMA3 = """<|start_header_id|>Respond with {"name": function name, "parameters": ...}"""
LLAMA4 = "<|python_tag|> [func_name1(params_name1=params_value1...), func_name2(params)]"
MISTRAL = "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"
MAGISTRAL = MISTRAL + "[THINK]{{ thinking }}[/THINK]"
DEEPSEEK_R1 = "{{ '<｜tool▁calls▁begin｜>' }}{{ content.split('</think>')[-1] }}"
GPT_OSS_TEMPLATE = "<|start|>assistant<|channel|>analysis<|message|>"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (HERMES_TEMPLATE, "hermes", None),
        (QWEN3, "hermes", "think"),
        (QWEN3_CODER, "qwen3_coder", None),
        (LLAMA3, "llama3", None),
        (LLAMA4, "pythonic", None),
        (MISTRAL, "mistral", None),
        (MAGISTRAL, "mistral", "mistral_think"),
        (DEEPSEEK_R1, "deepseek", "think"),
        (GPT_OSS_TEMPLATE, "gpt_oss", "gpt_oss"),
        ("{{ messages }}", None, None),
    ],
)
def test_formats_are_detected_from_the_template(
    template: str, tools: str | None, reasoning: str | None
) -> None:
    found = Formats.of("auto", "auto", template)

    assert (found.tools.name if found.tools else None) == tools
    assert (found.reasoning.name if found.reasoning else None) == reasoning


@pytest.mark.parametrize(
    ("settings", "template", "expected"),
    [
        (("hermes", "think"), "", Formats(HERMES, THINK)),
        (("auto", "none"), QWEN3, Formats(HERMES, None)),
        (("hermes", "auto"), GPT_OSS_TEMPLATE, Formats(HERMES, None)),
        (("gpt_oss", "none"), "", Formats(GPT_OSS, GPT_OSS_REASONING)),
        (("auto", "gpt_oss"), QWEN3, Formats(GPT_OSS, GPT_OSS_REASONING)),
    ],
)
def test_settings_take_precedence_over_the_template(
    settings: tuple[str, str], template: str, expected: Formats
) -> None:
    assert Formats.of(*settings, template) == expected


def test_unknown_formats_are_rejected_by_the_settings() -> None:
    for name in ("tool_format", "reasoning_format"):
        with pytest.raises(ValueError, match=name):
            RouterConfig(**{name: "other"})
