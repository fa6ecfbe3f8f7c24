"""Conversion between Anthropic's messages and the internal form of a conversation. Pure."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from everlift.errors import InvalidRequest, OutOfRange, UnsupportedContent
from everlift.images import Image
from router.api.anthropic.fields import CountTokensFields
from router.chat.checks import check_function_name, check_json
from router.chat.conversation import Conversation, Part, Role, ToolCall, Turn
from router.chat.images import image_of_base64, num_image_characters
from router.chat.messages import MAX_BYTES, MAX_MESSAGES, check_image_role, text_of
from router.chat.tools import Choice, Function, ToolUse, checked_function, functions_of

Block = dict[str, Any]

#: Blocks of an assistant that a client sends back, and of which nothing reaches the prompt.
_IGNORED = ("redacted_thinking",)
_CHOICES = {"auto": Choice.AUTO, "any": Choice.REQUIRED, "none": Choice.NONE}


def conversation_of(fields: CountTokensFields) -> Conversation:
    """Return the conversation of a request.

    If the last message is the assistant's, the answer continues its text. The template variable
    ``enable_thinking`` states whether ``thinking`` was requested. Raises UnsupportedContent for
    content other than texts and images, OutOfRange for too many or too large messages or tools,
    NotUtf8 for an unpaired surrogate, and InvalidRequest for other faults.
    """
    if len(fields.messages) > MAX_MESSAGES:
        raise OutOfRange(f"at most {MAX_MESSAGES} messages, not {len(fields.messages)}")
    check_json("messages", fields.messages, MAX_BYTES, num_image_characters)
    turns = [
        *_system(fields.system),
        *(
            turn
            for i, message in enumerate(fields.messages)
            for turn in _turns(f"messages[{i}]", message)
        ),
    ]
    continues = turns[-1].role == "assistant"
    if continues:
        last = len(fields.messages) - 1
        _check_continuable(f"messages[{last}].content", fields.messages[last].get("content"))
    is_thinking = fields.thinking is not None and fields.thinking.type != "disabled"
    return Conversation(
        tuple(turns),
        _tools(fields),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_variables={"enable_thinking": is_thinking},
    )


def _check_continuable(at: str, content: object) -> None:
    """Raise InvalidRequest, naming ``at``, if an assistant's message cannot be continued.

    The prompt ends with the text of the message: calls, and reasoning without a text after it,
    would be lost. As in Anthropic's API, the message may be empty.
    """
    kinds = [block["type"] for _, block in _blocks(at, content)]
    if "tool_use" in kinds:
        raise InvalidRequest(
            f"{at}: the answer cannot continue a message with tool_use; add a message with its "
            "tool_result"
        )
    if kinds and kinds[-1] != "text":
        raise InvalidRequest(
            f"{at} of the last message must end with text, which the answer continues, not with "
            f"{kinds[-1]}"
        )


def _system(system: str | Sequence[object] | None) -> Iterator[Turn]:
    if system:
        check_json("system", system, MAX_BYTES)
        yield Turn("system", _parts("system", system, "system"))


def _parts(at: str, content: object, role: Role) -> tuple[Part, ...]:
    return tuple(_part(where, block, role) for where, block in _blocks(at, content))


def _part(at: str, block: Block, role: Role) -> Part:
    kind = block["type"]
    if kind == "image":
        check_image_role(at, role)
        return _image(f"{at}.source", block.get("source"))
    if kind != "text":
        raise UnsupportedContent(f"{at}: models read texts and images, not {kind[:64]}", field=at)
    return text_of(f"{at}.text", block.get("text"))


def _image(at: str, source: object) -> Image:
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{at} must be an object with a type", field=at)
    if kind != "base64":
        raise UnsupportedContent(
            f"{at}.type must be base64, not {kind[:64]}: the router fetches no files",
            field=f"{at}.type",
        )
    return image_of_base64(f"{at}.data", source.get("media_type"), source.get("data"))


def _blocks(at: str, content: object) -> list[tuple[str, Block]]:
    """Return the blocks of ``content``, each with its position in the request.

    A string is one text block at the position ``at``. Raises InvalidRequest if ``content`` is
    neither a string nor a list, or if a block is not an object with a type.
    """
    if isinstance(content, str):
        return [(at, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise InvalidRequest(f"{at} must be a string or a list of blocks")
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidRequest(f"{at}[{i}] must be an object with a type")
    return [(f"{at}[{i}]", block) for i, block in enumerate(content)]


def _turns(at: str, message: Mapping[str, object]) -> list[Turn]:
    role, content = message.get("role"), message.get("content")
    if role == "system":
        return [Turn("system", _parts(f"{at}.content", content, "system"))]
    if role not in ("user", "assistant"):
        raise InvalidRequest(f"{at}.role must be user, assistant or system")
    blocks = _blocks(f"{at}.content", content)
    return [_assistant(blocks)] if role == "assistant" else _user(at, blocks)


def _user(at: str, blocks: Sequence[tuple[str, Block]]) -> list[Turn]:
    """Return a turn for each tool result, and one for each uninterrupted sequence of other blocks.

    Images of tool results are moved to the beginning of the user turn after the last tool result,
    because templates read only texts in tool results. A missing user turn is added for them. Raises
    InvalidRequest or a subclass if there are no blocks, or if a block is invalid.
    """
    turns: list[Turn] = []
    parts: list[Part] = []
    images: list[Part] = []
    for where, block in blocks:
        if block["type"] != "tool_result":
            parts.append(_part(where, block, "user"))
            continue
        if parts:
            turns.append(Turn("user", tuple(parts)))
            parts = []
        call_id = text_of(f"{where}.tool_use_id", block.get("tool_use_id"))
        result = _parts(f"{where}.content", block.get("content") or "", "user")
        texts = tuple(part for part in result if isinstance(part, str))
        turns.append(Turn("tool", texts, call_id=call_id))
        images += [part for part in result if isinstance(part, Image)]
    if images or parts:
        turns.append(Turn("user", (*images, *parts)))
    if not turns:
        raise InvalidRequest(f"{at}.content must not be empty")
    return turns


def _assistant(blocks: Sequence[tuple[str, Block]]) -> Turn:
    parts: list[Part] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for where, block in blocks:
        match block["type"]:
            case "thinking":
                reasoning.append(text_of(f"{where}.thinking", block.get("thinking")))
            case "tool_use":
                calls.append(_call(where, block))
            case kind if kind not in _IGNORED:
                parts.append(_part(where, block, "assistant"))
    return Turn("assistant", tuple(parts), "".join(reasoning), tuple(calls))


def _call(at: str, block: Block) -> ToolCall:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{at}.input must be an object")
    name = check_function_name(f"{at}.name", block.get("name"))
    return ToolCall(text_of(f"{at}.id", block.get("id")), name, arguments)


def _tools(fields: CountTokensFields) -> ToolUse:
    raw = fields.tool_choice or {"type": "auto"}
    kind = raw.get("type")
    is_parallel = raw.get("disable_parallel_tool_use") is not True
    functions = functions_of(fields.tools, _functions)
    if kind == "tool":
        named = check_function_name("tool_choice.name", raw.get("name"))
        return ToolUse.checked(functions, Choice.NAMED, named, is_parallel)
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequest("tool_choice.type must be auto, any, none or tool")
    return ToolUse.checked(functions, _CHOICES[kind], is_parallel=is_parallel)


def _functions(at: str, tool: object) -> list[Function]:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{at} must be an object")
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(f"{at}.type must be custom: the server runs no tools itself")
    return [checked_function(at, tool, "input_schema")]


def messages_of(turns: Sequence[Turn]) -> tuple[str, list[Block]]:
    """Return the system prompt and the messages of turns: the inverse of ``conversation_of``.

    Consecutive turns of the roles ``user`` and ``tool`` become one message.
    """
    system = "\n".join(turn.text for turn in turns if turn.role in ("system", "developer"))
    messages: list[Block] = []
    for turn in turns:
        if turn.role in ("system", "developer"):
            continue
        role = "assistant" if turn.role == "assistant" else "user"
        if role == "assistant" or not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
        messages[-1]["content"] += _blocks_of(turn)
    return system, messages


def _blocks_of(turn: Turn) -> list[Block]:
    texts = [_block_of(part) for part in turn.parts]
    if turn.role == "tool":
        return [{"type": "tool_result", "tool_use_id": turn.call_id, "content": texts}]
    thinking = {"type": "thinking", "thinking": turn.reasoning, "signature": ""}
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in turn.calls
    ]
    return [*([thinking] if turn.reasoning else []), *texts, *calls]


def _block_of(part: Part) -> Block:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    data = b64encode(part.data).decode()
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": part.media_type, "data": data},
    }
