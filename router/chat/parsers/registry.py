"""Formats of tool calls and reasoning: their names, and which of them a model writes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from router.chat.parsers.base import Parser, ReasoningFormat, ToolFormat
from router.chat.parsers.deepseek import DEEPSEEK
from router.chat.parsers.gpt_oss import GPT_OSS, GPT_OSS_REASONING
from router.chat.parsers.hermes import HERMES
from router.chat.parsers.llama3 import LLAMA3
from router.chat.parsers.mistral import MISTRAL
from router.chat.parsers.pythonic import PYTHONIC
from router.chat.parsers.qwen3_coder import QWEN3_CODER
from router.chat.parsers.think import MISTRAL_THINK, THINK

#: All formats. A template that shows several of them is in the first one.
TOOL_FORMATS: Sequence[ToolFormat] = (
    GPT_OSS,
    DEEPSEEK,
    MISTRAL,
    QWEN3_CODER,
    HERMES,
    PYTHONIC,
    LLAMA3,
)
REASONING_FORMATS: Sequence[ReasoningFormat] = (GPT_OSS_REASONING, MISTRAL_THINK, THINK)
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats of a model's tool calls and reasoning; each is None if it is unknown or unused."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def of(cls, tool_format: str, reasoning_format: str, template: str) -> Self:
        """Return the formats that two settings name, or that ``template`` shows for "auto".

        A model that writes messages in channels uses the format gpt_oss for both, so the tool
        format gpt_oss selects both. The reasoning format gpt_oss selects both if ``tool_format`` is
        "auto"; with another tool format, ``reasoning`` is None.
        """
        tools = find_tool_format(tool_format, template)
        reasoning = find_reasoning_format(reasoning_format, template)
        if tools is GPT_OSS or (tool_format == AUTO and reasoning is GPT_OSS_REASONING):
            return cls(GPT_OSS, GPT_OSS_REASONING)
        return cls(tools, None if reasoning is GPT_OSS_REASONING else reasoning)

    def wrapped(self, parser: Parser, prompt: str) -> Parser:
        """Return a parser that separates the reasoning and gives all other text to ``parser``.

        ``prompt`` may end with the beginning of the reasoning. Return ``parser`` itself if
        ``reasoning`` is None, or if ``parser`` already separates the reasoning (gpt_oss).
        """
        return parser if self.reasoning is None else self.reasoning.wrapped(parser, prompt)


def find_tool_format(setting: str, template: str) -> ToolFormat | None:
    """Return the format that ``setting`` names or, for "auto", the one found in ``template``.

    Return None for "auto" if the template shows no known format.
    """
    if setting == AUTO:
        return next((each for each in TOOL_FORMATS if each.is_shown(template)), None)
    return next(each for each in TOOL_FORMATS if each.name == setting)


def find_reasoning_format(setting: str, template: str) -> ReasoningFormat | None:
    """Return the format that ``setting`` names or, for "auto", the one found in ``template``.

    Return None for "none", and for "auto" if the template shows no known format.
    """
    if setting == AUTO:
        return next((each for each in REASONING_FORMATS if each.is_shown(template)), None)
    if setting == NONE:
        return None
    return next(each for each in REASONING_FORMATS if each.name == setting)
