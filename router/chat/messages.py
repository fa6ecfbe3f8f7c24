"""Conversion of a chat's messages from a client's form to a template's form. Pure.

Templates are written for the form that transformers gives them, which differs from what OpenAI's
clients send. In the templates' form, content is a single text, the arguments of a call are an
object instead of JSON text, and members that are null are absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from everlift.errors import InvalidRequest, OutOfRange, UnsupportedContent
from router.chat.checks import check_depth, check_function_name, check_json

Message = dict[str, Any]

MAX_MESSAGES = 8192
MAX_BYTES = 4 << 20

_REASONING = ("reasoning_content", "reasoning", "thinking")
#: Text members that a template receives besides the content, by role. Other members are ignored,
#: because clients send answers back as they received them and add members of their own.
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "system": ("name",),
    "developer": ("name",),
    "user": ("name",),
    "assistant": ("name", *_REASONING),
    "tool": ("name", "tool_call_id"),
}
#: Members that hold a part of the conversation which a template cannot receive.
_UNSUPPORTED = ("audio", "function_call")
_TEXT_PARTS = ("text", "input_text", "output_text")


def shown_messages(raw: object) -> list[Message]:
    """Return a request's messages in the form that a chat template reads.

    Raises UnsupportedContent for content other than text, OutOfRange for too many or too large
    messages, NotUtf8 for an unpaired surrogate, and InvalidRequest for other faults. The error
    names the faulty member.
    """
    if not isinstance(raw, list) or not raw:
        raise InvalidRequest("messages must be a list of at least one message")
    if len(raw) > MAX_MESSAGES:
        raise OutOfRange(f"messages has {len(raw)} messages; at most {MAX_MESSAGES} are allowed")
    check_json("messages", raw, MAX_BYTES)
    messages = [_message(f"messages[{i}]", message) for i, message in enumerate(raw)]
    _name_results(messages)
    return messages


def _message(at: str, raw: object) -> Message:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{at} must be an object")
    role = raw.get("role")
    if not isinstance(role, str) or role not in _TEXTS:
        raise InvalidRequest(f"{at}.role must be one of {', '.join(_TEXTS)}")
    message = {key: value for key, value in raw.items() if value is not None}
    for key in _UNSUPPORTED:
        if key in message:
            raise UnsupportedContent(f"{at}.{key} is not supported")
    shown: Message = {"role": role, "content": _content(at, message)}
    for key in _TEXTS[role]:
        # Clients of other APIs add reasoning that is not text, which is ignored.
        if key in message and (isinstance(message[key], str) or key not in _REASONING):
            shown[key] = _text(f"{at}.{key}", message[key])
    if role == "assistant" and (calls := _tool_calls(at, message.get("tool_calls", []))):
        shown["tool_calls"] = calls
    if role == "tool" and "tool_call_id" not in shown:
        raise InvalidRequest(f"{at}.tool_call_id is missing: a result needs the id of its call")
    return shown


def _content(at: str, message: Message) -> str:
    """Return a message's content as one text; errors name the message's position ``at``.

    An assistant's message may have no content; usually it then has tool calls or a refusal.
    Templates read the content of every message, so the refusal or an empty text takes its place.
    """
    content = message.get("content")
    if message["role"] == "assistant" and content in (None, []):
        return _text(f"{at}.refusal", message.get("refusal", ""))
    return _joined(f"{at}.content", content)


def _joined(at: str, content: object) -> str:
    """Return the text of a message's ``content``, a text or a list of parts.

    The texts of parts are joined by line breaks. Errors name the position ``at`` in the request.
    Raises UnsupportedContent for a part other than text, and InvalidRequest for an empty list or
    another type.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{at} must be a text or a list of parts")
    return "\n".join(_part(f"{at}[{i}]", part) for i, part in enumerate(content))


def _part(at: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{at} must be an object with a type")
    if kind == "refusal":
        return _text(f"{at}.refusal", part.get("refusal"))
    if kind not in _TEXT_PARTS:
        raise UnsupportedContent(f"{at}: this model accepts only text, not {kind[:64]}")
    return _text(f"{at}.text", part.get("text"))


def _text(at: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{at} must be a text")
    return value


def _tool_calls(at: str, raw: object) -> list[Message]:
    if not isinstance(raw, list):
        raise InvalidRequest(f"{at}.tool_calls must be a list")
    return [_tool_call(f"{at}.tool_calls[{i}]", call) for i, call in enumerate(raw)]


def _tool_call(at: str, call: object) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequest(f"{at} must be an object with a function")
    if call.get("type") not in (None, "function"):
        raise InvalidRequest(f"{at}.type must be function")
    return {
        "id": _text(f"{at}.id", call.get("id")),
        "type": "function",
        "function": {
            "name": check_function_name(f"{at}.function.name", function.get("name")),
            "arguments": _arguments(f"{at}.function.arguments", function.get("arguments")),
        },
    }


def _arguments(at: str, raw: object) -> object:
    """Return the arguments of a tool call as an object, or as text if they are not a JSON object.

    An invalid text is accepted, because the model may have written it, and clients send back what
    they received. Missing arguments and an empty text become an empty object. Raises
    InvalidRequest for another type, and OutOfRange for more than MAX_DEPTH levels.
    """
    if raw is None or isinstance(raw, dict):
        return raw or {}
    text = _text(at, raw)
    try:
        value = json.loads(text or "{}", parse_constant=_refuse_constant)
    except RecursionError:
        raise OutOfRange(f"{at} is too deep") from None
    except ValueError:
        return text
    check_depth(at, value)
    return value if isinstance(value, dict) and _is_encodable(value) else text


def _is_encodable(value: object) -> bool:
    """Return whether ``value`` has neither infinite numbers nor unpaired surrogates."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _name_results(messages: list[Message]) -> None:
    """Set the name of each tool's result to that of the called function, unless it has a name."""
    called: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", []):
            called[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in called:
            message.setdefault("name", called[message["tool_call_id"]])
