"""Conversion between the items of Responses and the internal form of a conversation. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

from everlift.errors import InvalidRequest, OutOfRange, UnsupportedContent
from router.api.openai.responses.fields import InputTokensFields, Reasoning
from router.api.openai.responses.namespaces import joined_name
from router.chat.checks import check_function_name, check_json
from router.chat.conversation import Part, Role, ToolCall, Turn
from router.chat.images import data_url, num_image_characters
from router.chat.messages import MAX_BYTES, MAX_MESSAGES, call_arguments, parts_of, text_of
from router.chat.tools import (
    Choice,
    Function,
    ToolUse,
    allowed_tools,
    checked_function,
    functions_of,
)

Item = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
#: Tools that are left out, because only OpenAI's server or its models can use them. Coding agents
#: send some of them with every request.
_IGNORED_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "shell",
        "tool_search",
        "web_search",
        "web_search_preview",
    }
)


def input_turns(raw: str | Sequence[Item], at: str = "input") -> list[Turn]:
    """Return the turns of items; ``at`` is the name of the field that contains them.

    A reasoning, a text and calls that follow each other in this order are one turn of the
    assistant; each may be missing. Raises UnsupportedContent for content other than texts and
    images, OutOfRange for too many or too large items, NotUtf8 for an unpaired surrogate, and
    InvalidRequest for other faults. The error names the faulty member.
    """
    if isinstance(raw, str):
        return [Turn("user", (raw,))]
    if not raw:
        raise InvalidRequest(f"{at} must be a string or a list of at least one item", field=at)
    if len(raw) > MAX_MESSAGES:
        raise OutOfRange(f"{at} has {len(raw)} items; at most {MAX_MESSAGES} are allowed")
    check_json(at, raw, MAX_BYTES, num_image_characters)
    turns: list[Turn] = []
    for i, item in enumerate(raw):
        turn = _turn(f"{at}[{i}]", item)
        joined = _joined(turns[-1], turn) if turns else None
        if joined is None:
            turns.append(turn)
        else:
            turns[-1] = joined
    return turns


def _joined(before: Turn, turn: Turn) -> Turn | None:
    """Return one turn of the assistant with the parts of both; None if they are separate turns."""
    if before.role != "assistant" or turn.role != "assistant":
        return None
    if turn.calls:
        return Turn("assistant", before.parts, before.reasoning, before.calls + turn.calls)
    if before.parts or before.calls or turn.reasoning:
        return None
    return Turn("assistant", turn.parts, before.reasoning)


def _turn(at: str, item: Item) -> Turn:
    kind = item.get("type", "message")
    match kind:
        case "message":
            return _message(at, item)
        case "function_call":
            return Turn("assistant", calls=(_call(at, item),))
        case "function_call_output":
            call_id = text_of(f"{at}.call_id", item.get("call_id"))
            output = parts_of(f"{at}.output", item.get("output"), "tool")
            return Turn("tool", output, call_id=call_id)
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            return Turn("assistant", reasoning=_reasoning_text(at, parts))
    raise UnsupportedContent(f"{at}: items of the type {str(kind)[:64]} are not supported")


def _message(at: str, item: Item) -> Turn:
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{at}.role must be one of {', '.join(_ROLES)}")
    content = item.get("content")
    if role == "assistant" and content == []:
        return Turn("assistant")
    role = cast(Role, role)
    return Turn(role, parts_of(f"{at}.content", content, role))


def _call(at: str, item: Item) -> ToolCall:
    return ToolCall(
        text_of(f"{at}.call_id", item.get("call_id")),
        joined_name(at, item),
        call_arguments(f"{at}.arguments", item.get("arguments")),
    )


def _reasoning_text(at: str, parts: object) -> str:
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise InvalidRequest(f"{at}.content must be a list of parts")
    return "\n".join(text_of(f"{at}.content[{i}].text", p.get("text")) for i, p in enumerate(parts))


def items_of(turns: Sequence[Turn]) -> list[Item]:
    """Return the input items of turns: the inverse of ``input_turns``."""
    return [item for turn in turns for item in _items_of(turn)]


def _items_of(turn: Turn) -> list[Item]:
    if turn.role == "tool":
        output = [_content_part(part, "input_text") for part in turn.parts]
        return [{"type": "function_call_output", "call_id": turn.call_id, "output": output}]
    kind = "output_text" if turn.role == "assistant" else "input_text"
    content = [_content_part(part, kind) for part in turn.parts]
    items: list[Item] = []
    if turn.reasoning:
        text = {"type": "reasoning_text", "text": turn.reasoning}
        items.append({"type": "reasoning", "summary": [], "content": [text]})
    if content or not (turn.calls or turn.reasoning):
        items.append({"type": "message", "role": turn.role, "content": content})
    items += [
        {
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": _arguments_text(call.arguments),
        }
        for call in turn.calls
    ]
    return items


def _content_part(part: Part, kind: str) -> Item:
    if isinstance(part, str):
        return {"type": kind, "text": part}
    return {"type": "input_image", "detail": "auto", "image_url": data_url(part)}


def _arguments_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def with_ids(items: Sequence[Item], name: str) -> list[Item]:
    """Return copies of ``items`` in which a missing id or type is filled in.

    The id is derived from ``name`` and the item's index; the type is message.
    """
    return [
        {"id": item_id("item", name, index), **item, "type": item.get("type", "message")}
        for index, item in enumerate(items)
    ]


def item_id(prefix: str, name: str, index: int) -> str:
    """Return the id of item number ``index`` of the response ``name``.

    It depends only on the arguments, because a response that is read again must have the same ids.
    """
    return f"{prefix}_{blake2b(f'{name} {index}'.encode(), digest_size=16).hexdigest()}"


def tool_use(fields: InputTokensFields) -> ToolUse:
    """Return the tools of a request. Raises the same errors as ``ToolUse.of``."""
    functions = functions_of(fields.tools, _functions)
    is_parallel = fields.parallel_tool_calls is not False
    choice, named, allowed = _choice(fields.tool_choice)
    return ToolUse.checked(functions, choice, named, is_parallel, allowed)


def _functions(at: str, tool: object, namespace: str | None = None) -> list[Function]:
    """Return the functions of a tool, which is itself in ``namespace`` unless that is None."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{at} must be an object with a type")
    if kind in _IGNORED_TOOLS:
        return []
    if kind == "namespace" and namespace is None:
        return _functions_in_namespace(at, tool)
    if kind != "function":
        raise InvalidRequest(f"{at}: unknown type {kind[:64]!r}; use function")
    name = joined_name(at, {"name": tool.get("name"), "namespace": namespace})
    return [checked_function(at, {**tool, "name": name})]


def _functions_in_namespace(at: str, tool: Item) -> list[Function]:
    namespace, tools = _name(at, tool), tool.get("tools")
    if not isinstance(tools, list):
        raise InvalidRequest(f"{at}.tools must be a list")
    found = (_functions(f"{at}.tools[{i}]", each, namespace) for i, each in enumerate(tools))
    return [function for functions in found for function in functions]


def _choice(raw: str | Item | None) -> tuple[Choice, str, frozenset[str] | None]:
    if raw is None:
        return Choice.AUTO, "", None
    if raw in ("none", "auto", "required"):
        return Choice(raw), "", None
    kind = raw.get("type") if isinstance(raw, dict) else None
    if isinstance(raw, dict) and kind == "function":
        return Choice.NAMED, joined_name("tool_choice", raw), None
    if kind == "allowed_tools":
        return allowed_tools("tool_choice", raw, joined_name)
    raise InvalidRequest(
        "tool_choice must be none, auto, required, or an object of type function or allowed_tools"
    )


def _name(at: str, tool: Mapping[str, object]) -> str:
    return check_function_name(f"{at}.name", tool.get("name"))


def template_variables(reasoning: Reasoning | None) -> dict[str, object]:
    """Return the variables that the chat template receives for the requested reasoning."""
    if reasoning is None or reasoning.effort is None:
        return {}
    if reasoning.effort == "none":
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": reasoning.effort}
