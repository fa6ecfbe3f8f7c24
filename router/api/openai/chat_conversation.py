"""Conversion of the fields of a chat completion into a conversation."""

from __future__ import annotations

from router.api.openai.fields import Chat, ChatFields
from router.chat.conversation import Conversation, num_text_characters
from router.chat.messages import chat_turns
from router.chat.tools import ToolUse
from router.requests import tokenizer


async def chat_conversation(fields: Chat) -> Conversation:
    """Return the conversation of a request; long messages are converted in a thread.

    Raises InvalidRequest if the messages or tools are invalid.
    """
    choice, is_parallel = None, True
    if isinstance(fields, ChatFields):
        choice, is_parallel = fields.tool_choice, fields.parallel_tool_calls is not False
    tools = ToolUse.of(fields.tools, choice, is_parallel)
    messages = fields.messages
    turns = await tokenizer.with_text(num_text_characters(messages), lambda: chat_turns(messages))
    return Conversation(
        turns,
        tools,
        fields.add_generation_prompt,
        template_variables=fields.chat_template_kwargs or {},
    )
