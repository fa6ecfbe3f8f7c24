"""Conversion of the fields of a chat completion into a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everlift.errors import InvalidRequest
from router.api.openai.fields import Chat, ChatFields
from router.chat.checks import check_json
from router.chat.conversation import Conversation, Turn
from router.chat.messages import MAX_BYTES, chat_turns
from router.chat.tools import ToolUse
from router.requests import tokenizer


async def chat_conversation(fields: Chat) -> Conversation:
    """Return the conversation of a request; a large request is converted in a thread.

    Raises InvalidRequest if the messages, tools or documents are invalid.
    """
    choice, is_parallel = None, True
    if isinstance(fields, ChatFields):
        choice, is_parallel = fields.tool_choice, fields.parallel_tool_calls is not False
    messages, documents = fields.messages, fields.documents
    tools, turns = await tokenizer.with_json(
        [fields.tools, choice, messages, documents],
        lambda: (ToolUse.of(fields.tools, choice, is_parallel), _turns(messages, documents)),
    )
    continues = fields.continue_final_message is True
    if continues:
        _check_continuable(fields, turns)
    return Conversation(
        turns,
        tools,
        not continues if fields.add_generation_prompt is None else fields.add_generation_prompt,
        continues,
        template_variables=_variables(fields),
        documents=documents,
        chat_template=fields.chat_template,
    )


def _turns(messages: object, documents: Sequence[Mapping[str, Any]] | None) -> tuple[Turn, ...]:
    check_json("documents", documents, MAX_BYTES)
    return chat_turns(messages)


def _check_continuable(fields: Chat, turns: Sequence[Turn]) -> None:
    if fields.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true",
            field="continue_final_message",
        )
    if turns[-1].calls:
        at = f"messages[{len(turns) - 1}].tool_calls"
        raise InvalidRequest(
            f"{at}: continue_final_message cannot continue a message with tool calls", field=at
        )


def _variables(fields: Chat) -> Mapping[str, Any]:
    """Return the variables for the chat template.

    ``reasoning_effort`` sets the variable of the same name, and "none" also sets
    ``enable_thinking`` to False. Variables in ``chat_template_kwargs`` take precedence.
    """
    variables: dict[str, Any] = {}
    if isinstance(fields, ChatFields) and fields.reasoning_effort is not None:
        variables["reasoning_effort"] = fields.reasoning_effort
        if fields.reasoning_effort == "none":
            variables["enable_thinking"] = False
    return {**variables, **(fields.chat_template_kwargs or {})}
