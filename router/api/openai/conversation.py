"""Conversion of chats and tools into prompts, and of outputs into tool calls."""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass

from everlift.errors import NoChatTemplate
from everlift.sampling import Grammar
from router.api.openai.fields import Chat, ChatFields
from router.chat.parsers.base import Parser
from router.chat.parsers.registry import Formats
from router.chat.templates import ChatTemplate
from router.chat.tools import Choice, ToolUse
from router.requests import tokenizer
from router.requests.tokenizer import ServedModel


@dataclass(frozen=True, slots=True)
class Conversation:
    """Prompt of a chat, and the tools that its output may call.

    ``prompt`` is a text with special tokens. ``grammar`` constrains the output, unless it is None.
    ``formats`` are those in which the model writes tool calls and reasoning.
    """

    prompt: str
    grammar: Grammar | None
    tools: ToolUse
    formats: Formats

    def parser(self, name: str, choice: int, *, is_constrained: bool = False) -> Parser:
        """Return a parser that separates a choice's reasoning, content and tool calls.

        ``name`` is the request's id, and ``choice`` the index of the choice. ``is_constrained``
        states that a grammar constrains the output. It holds from the first token, so the output
        has no reasoning, and is all content if it cannot call tools.
        """
        if not is_constrained:
            parser = self.tools.parser(self.formats.tools, name, choice)
            return self.formats.wrapped(parser, self.prompt)
        can_call = self.tools.choice is not Choice.NONE
        return self.tools.parser(self.formats.tools if can_call else None, name, choice)

    def needs(self, special_tokens: Collection[str]) -> bool:
        """Return whether the parser needs one of ``special_tokens`` in the output's text."""
        return not self._marks.isdisjoint(special_tokens)

    @property
    def _marks(self) -> Set[str]:
        """Marks for which the parser searches, if no grammar constrains the output."""
        form, reasoning = self.formats.tools, self.formats.reasoning
        is_read = form is not None and (self.tools.choice is Choice.AUTO or form.has_channels)
        marks = form.marks if form is not None and is_read else ()
        return {*marks, *(reasoning.marks if reasoning is not None else ())}


class Conversations:
    """Renderer of chats with the model's template; without a template, all chats are rejected."""

    def __init__(self, model: ServedModel, template: ChatTemplate | None) -> None:
        self._model = model
        self._template = template

    async def of(self, fields: ChatFields) -> Conversation:
        """Return the rendered prompt and the tools of a chat request.

        Raises NoChatTemplate, InvalidRequest if messages or tools are invalid, QueueFull if too
        many chats wait to be rendered, and EverliftError if no renderer process can be started.
        """
        tools = ToolUse.of(
            fields.tools, fields.tool_choice, fields.parallel_tool_calls is not False
        )
        prompt = await self._text(fields, tools)
        self._model.check_fits(prompt)
        formats = self._template.formats if self._template is not None else Formats()
        return Conversation(prompt, tools.grammar(formats.tools), tools, formats)

    async def prompt(self, fields: Chat, tools: ToolUse) -> tuple[int, ...]:
        """Return the token ids of a chat's prompt. Raises the same errors as ``of``."""
        text = await self._text(fields, tools)
        # A template writes the special tokens itself.
        return await tokenizer.with_text(
            len(text), lambda: self._model.encode(text, add_special_tokens=False)
        )

    async def _text(self, fields: Chat, tools: ToolUse) -> str:
        if self._template is None:
            raise NoChatTemplate(f"the model {self._model.name!r} has no chat template")
        return await self._template.render(
            fields.messages or [],
            tools.shown,
            add_generation_prompt=fields.add_generation_prompt,
            more=fields.chat_template_kwargs or {},
        )
