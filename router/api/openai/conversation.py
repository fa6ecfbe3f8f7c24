"""Conversion of chats and tools into prompts, and of outputs into tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from everlift.errors import NoChatTemplate
from everlift.sampling import Grammar
from router.api.openai.fields import Chat, ChatFields
from router.chat.parsers.formats import ToolFormat
from router.chat.parsers.json_calls import Parser
from router.chat.templates import ChatTemplate
from router.chat.tools import ToolUse
from router.requests import tokenizer
from router.requests.tokenizer import ServedModel


@dataclass(frozen=True, slots=True)
class Conversation:
    """Prompt of a chat, and the tools that its output may call.

    ``prompt`` is a text with special tokens. ``grammar`` constrains the output, unless it is None.
    ``form`` is the format in which the model writes tool calls; None if it is unknown.
    """

    prompt: str
    grammar: Grammar | None
    tools: ToolUse
    form: ToolFormat | None

    def parser(self, name: str, choice: int) -> Parser:
        """Return a parser that separates the output text of a choice from its tool calls.

        ``name`` is the request's id, and ``choice`` the index of the choice.
        """
        return self.tools.parser(self.form, name, choice)


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
        form = self._template.tool_format if self._template is not None else None
        return Conversation(prompt, tools.grammar(form), tools, form)

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
