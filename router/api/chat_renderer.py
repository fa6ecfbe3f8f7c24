"""Conversion of conversations into prompts, and of outputs into tool calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, replace

from everlift.errors import NoChatTemplate, OutOfRange, Unsupported
from everlift.images import Image
from everlift.sampling import Grammar
from router.chat.conversation import Conversation
from router.chat.parsers.base import Parser
from router.chat.parsers.registry import Formats
from router.chat.templates import ChatTemplate
from router.chat.tools import Choice, ToolUse
from router.requests import tokenizer
from router.requests.tokenizer import ServedModel

#: Maximum bytes of a request's chat_template. A renderer process keeps the last 128 templates in
#: compiled form, which takes 1.5 MiB for each one of this length.
MAX_TEMPLATE_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Prompt of a conversation for a model, and the tools that its output may call.

    ``prompt`` is a text with special tokens. ``grammar`` constrains the output, unless it is None.
    ``formats`` are those in which the model writes tool calls and reasoning. ``images`` are in the
    order of their placeholders in the prompt.
    """

    model: ServedModel
    prompt: str
    grammar: Grammar | None
    tools: ToolUse
    formats: Formats
    images: tuple[Image, ...] = ()

    def parser(self, name: str, choice: int, *, is_constrained: bool = False) -> Parser:
        """Return a parser that separates a choice's reasoning, content and tool calls.

        ``name`` is the request's id, and ``choice`` the index of the choice. ``is_constrained``
        states that a grammar constrains the output. The grammar applies from the first token, so
        the output has no reasoning. A constrained output is all content if ``tools`` allows no
        calls.
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
        """Marks of the tool and reasoning formats for which the parser searches.

        A mark is a text that delimits a part of the output, such as a tool call. The set is valid
        for outputs that no grammar constrains.
        """
        form, reasoning = self.formats.tools, self.formats.reasoning
        is_read = form is not None and (self.tools.choice is Choice.AUTO or form.has_channels)
        marks = form.marks if form is not None and is_read else ()
        return {*marks, *(reasoning.marks if reasoning is not None else ())}


class ChatRenderer:
    """Renderer of conversations with the chat templates of their models.

    ``accepts_templates`` permits conversations to have templates of their own. A conversation
    is rejected if neither the conversation nor its model has a template.
    """

    def __init__(
        self,
        templates: Mapping[str, ChatTemplate],
        *,
        accepts_templates: bool = False,
    ) -> None:
        """Create the renderer; ``templates`` are by model, as ``ChatTemplate.load`` returns them.

        Conversations with a model that has no entry are rejected, even those with a template of
        their own.
        """
        self._templates = templates
        self._accepts_templates = accepts_templates

    async def render(self, model: ServedModel, conversation: Conversation) -> RenderedChat:
        """Return the prompt of a conversation, with the tools and the grammar of its output.

        Raises NoChatTemplate if neither the model nor the conversation has a template, or if
        ``templates`` has no entry for the model. Raises Unsupported if the conversation has a
        template although ``accepts_templates`` is not set. Raises OutOfRange if this template is
        too long. Raises UnsupportedContent or OutOfRange for images that the model does not take.
        Raises PromptTextTooLong if the prompt is certainly longer than the context. Raises
        InvalidRequest or a subclass if the tools are invalid or the messages cannot be rendered.
        Raises QueueFull if too many chats wait to be rendered, and EverliftError if no renderer
        process can be started.
        """
        prompt = await self._text(model, conversation)
        model.check_fits(prompt)
        rendered = self.rendered(model, prompt, conversation.tools)
        return replace(rendered, images=conversation.images)

    def rendered(self, model: ServedModel, prompt: str, tools: ToolUse) -> RenderedChat:
        """Return the RenderedChat of ``prompt``, a prompt that was rendered before, without images.

        The end of such a prompt is enough if the result is only used to parse the output. Raises
        ToolsUnsupported or OutOfRange as ``ToolUse.grammar`` does.
        """
        template = self._templates.get(model.name)
        formats = template.formats if template is not None else Formats()
        return RenderedChat(model, prompt, tools.grammar(formats.tools), tools, formats)

    async def token_ids(
        self, model: ServedModel, conversation: Conversation, *, add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation's prompt.

        ``add_special_tokens``: also add the special tokens that the tokenizer itself adds to a
        text. The special tokens that the template writes are always included. Raises the errors of
        ``render``, except those of ``ToolUse.grammar``.
        """
        text = await self._text(model, conversation)
        return await _encode(model, text, add_special_tokens=add_special_tokens)

    async def count_tokens(self, rendered: RenderedChat) -> int:
        """Return the number of tokens of a prompt, even of one that is longer than the context.

        Raises PromptTextTooLong only if the prompt has more characters than the context can hold
        with the longest possible tokens.
        """
        return len(await _encode(rendered.model, rendered.prompt))

    async def _text(self, model: ServedModel, conversation: Conversation) -> str:
        model.check_images(conversation.images)
        own = conversation.chat_template
        if own is not None:
            self._check_template(own)
        template = self._templates.get(model.name)
        if template is None or not (template.is_models or own is not None):
            raise NoChatTemplate(f"the model {model.name!r} has no chat template")
        return await template.render(
            conversation.turns,
            conversation.tools.shown,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            more=conversation.template_variables,
            documents=conversation.documents,
            chat_template=own,
        )

    def _check_template(self, template: str) -> None:
        """Check that a request may have the chat template ``template``.

        Raises Unsupported if the router accepts no templates in requests, and OutOfRange if the
        template has more than MAX_TEMPLATE_BYTES bytes in UTF-8.
        """
        if not self._accepts_templates:
            raise Unsupported(
                "this router accepts no chat_template in requests: leave it out, or set "
                "router.allow_chat_template to true",
                field="chat_template",
            )
        if len(template.encode()) > MAX_TEMPLATE_BYTES:
            raise OutOfRange(
                f"chat_template has more than {MAX_TEMPLATE_BYTES} bytes", field="chat_template"
            )


async def _encode(
    model: ServedModel, text: str, *, add_special_tokens: bool = False
) -> tuple[int, ...]:
    return await tokenizer.with_text(
        len(text), lambda: model.encode(text, add_special_tokens=add_special_tokens)
    )
