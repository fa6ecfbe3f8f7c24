"""A chat's messages, from what a client sent to what a template is shown. Pure.

Templates are written for what transformers gives them, which differs from what OpenAI's clients
send: content is one text, the arguments of a call are an object and not its JSON, and what is null
is not there.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from everlift.errors import InvalidRequest, OutOfRange, UnsupportedContent
from router.chat.checks import check_depth, check_function_name, check_json

Message = dict[str, Any]

MAX_MESSAGES = 8192
MAX_BYTES = 4 << 20

_REASONING = ("reasoning_content", "reasoning", "thinking")
_KEYS: Mapping[str, frozenset[str]] = {
    "system": frozenset({"name"}),
    "developer": frozenset({"name"}),
    "user": frozenset({"name"}),
    "assistant": frozenset({"name", "tool_calls", *_REASONING}),
    "tool": frozenset({"name", "tool_call_id"}),
}
_KEYS_OF_ALL = frozenset({"role", "content"})
_TEXT_KEYS = ("name", "tool_call_id", *_REASONING)
#: Clients send an answer back as they got it. These parts of it say nothing to a template, nor does
#: the type that lm-eval gives each of its messages.
_PASSED_OVER = frozenset({"refusal", "annotations", "parsed", "id", "type"})
_UNSUPPORTED = ("audio", "function_call")
#: So much of a name is looked at and told in an error.
_MAX_NAME = 64
_TEXT_PARTS = ("text", "input_text", "output_text")


def shown_messages(given: object) -> list[Message]:
    """What a template is shown of a request's messages. Raises InvalidRequest, OutOfRange, NotUtf8,
    UnsupportedContent, which name the place."""
    if not isinstance(given, list) or not given:
        raise InvalidRequest("messages must be a list of at least one message")
    if len(given) > MAX_MESSAGES:
        raise OutOfRange(f"at most {MAX_MESSAGES} messages, not {len(given)}")
    check_json("messages", given, MAX_BYTES)
    messages = [_message(f"messages[{i}]", message) for i, message in enumerate(given)]
    _name_results(messages)
    return messages


def _message(at: str, given: object) -> Message:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{at} must be an object")
    role = given.get("role")
    if not isinstance(role, str) or role not in _KEYS:
        raise InvalidRequest(f"{at}.role must be one of {', '.join(_KEYS)}")
    message = {key: value for key, value in given.items() if value is not None}
    _check_keys(at, message, _KEYS_OF_ALL | _KEYS[role])
    shown: Message = {"role": role, **_content(f"{at}.content", message)}
    for key in _TEXT_KEYS:
        if key in message:
            shown[key] = _text(f"{at}.{key}", message[key])
    if calls := _tool_calls(f"{at}.tool_calls", message.get("tool_calls", [])):
        shown["tool_calls"] = calls
    if role == "tool" and "tool_call_id" not in shown:
        raise InvalidRequest(f"{at}.tool_call_id must say which call this is the result of")
    return shown


def _check_keys(at: str, message: Message, known: Collection[str]) -> None:
    for key in message.keys() - known - _PASSED_OVER:
        if key in _UNSUPPORTED:
            raise UnsupportedContent(f"{at}.{key} is not supported")
        near = get_close_matches(key[:_MAX_NAME], known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidRequest(f"{at}.{key[:_MAX_NAME]} is unknown in a message of this role{hint}")


def _content(at: str, message: Message) -> Message:
    """The content, if there is any: an answer may consist of calls alone."""
    if "content" in message:
        return {"content": _joined(at, message["content"])}
    if message["role"] != "assistant":
        raise InvalidRequest(f"{at} must be a text or a list of parts")
    return {} if message.get("tool_calls") else {"content": ""}


def _joined(at: str, content: object) -> str:
    """A template for text alone takes no list."""
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
        raise UnsupportedContent(f"{at}: this model takes text, not {kind[:64]}")
    return _text(f"{at}.text", part.get("text"))


def _text(at: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{at} must be a text")
    return value


def _tool_calls(at: str, given: object) -> list[Message]:
    if not isinstance(given, list):
        raise InvalidRequest(f"{at} must be a list")
    return [_tool_call(f"{at}[{i}]", call) for i, call in enumerate(given)]


def _tool_call(at: str, call: object) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequest(f"{at} must be an object with a function")
    if call.get("type", "function") != "function":
        raise InvalidRequest(f"{at}.type must be function")
    return {
        "id": _text(f"{at}.id", call.get("id")),
        "type": "function",
        "function": {
            "name": check_function_name(f"{at}.function.name", function.get("name")),
            "arguments": _arguments(f"{at}.function.arguments", function.get("arguments", {})),
        },
    }


def _arguments(at: str, given: object) -> object:
    """An object, also where it comes as JSON. What a model wrote that is no JSON remains the text
    that it is: the client can only send back what it got."""
    if isinstance(given, dict):
        return given
    text = _text(at, given)
    try:
        value = json.loads(text or "{}", parse_constant=_refuse_constant)
    except RecursionError:
        raise OutOfRange(f"{at} is too deep") from None
    except ValueError:
        return text
    check_depth(at, value)
    return value if isinstance(value, dict) and _can_be_written(value) else text


def _can_be_written(value: object) -> bool:
    """Escapes may stand for half a character, and digits for a number that is too large."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _name_results(messages: list[Message]) -> None:
    """Some templates want to know whose result it is, and clients send the call's id alone."""
    called: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", []):
            called[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in called:
            message.setdefault("name", called[message["tool_call_id"]])
