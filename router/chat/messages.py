"""Messages of OpenAI's chat completions, and those that a chat template reads. Pure.

Templates are written for the form of messages that transformers passes to them. OpenAI's clients
send another form. In the templates' form, content is a single text, or a list of parts if it has
images. The arguments of a call are an object instead of JSON text, and members that are null are
absent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

from everlift.errors import InvalidRequest, OutOfRange, UnsupportedContent
from everlift.images import Image
from router.chat.checks import check_depth, check_function_name, check_json, is_encodable
from router.chat.conversation import Part, Role, ToolCall, Turn, with_function_names
from router.chat.images import OPENAI_IMAGE_PARTS, image_of_part, num_image_characters

Message = dict[str, Any]

MAX_MESSAGES = 8192
#: Maximum size of the messages of a request without its images.
MAX_BYTES = 4 << 20

_ROLES: tuple[Role, ...] = get_args(Role)
#: Members of an assistant's message that hold its reasoning, in clients' and in templates' forms.
_REASONING = ("reasoning_content", "reasoning", "thinking")
#: Members that hold a part of the conversation which a template cannot receive.
_UNSUPPORTED = ("audio", "function_call")
_TEXT_PARTS = ("text", "input_text", "output_text")


def chat_turns(raw: object) -> tuple[Turn, ...]:
    """Return the turns of a chat completion's ``messages``.

    Members that are unknown or null are ignored, because clients send answers back as they received
    them and add members of their own. Raises UnsupportedContent for content other than texts and
    images, OutOfRange for too many or too large messages, NotUtf8 for an unpaired surrogate, and
    InvalidRequest for anything else that is wrong. The error names the faulty member.
    """
    if not isinstance(raw, list) or not raw:
        raise InvalidRequest("messages must be a list of at least one message")
    if len(raw) > MAX_MESSAGES:
        raise OutOfRange(f"messages has {len(raw)} messages; at most {MAX_MESSAGES} are allowed")
    check_json("messages", raw, MAX_BYTES, num_image_characters)
    return tuple(_turn(f"messages[{i}]", message) for i, message in enumerate(raw))


def _turn(at: str, raw: object) -> Turn:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{at} must be an object")
    role = raw.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{at}.role must be one of {', '.join(_ROLES)}")
    message = {key: value for key, value in raw.items() if value is not None}
    for key in _UNSUPPORTED:
        if key in message:
            raise UnsupportedContent(f"{at}.{key} is not supported")
    parts, name = _parts(at, message), text_of(f"{at}.name", message.get("name", ""))
    if role == "assistant":
        # Clients of other APIs add reasoning that is not text, which is ignored.
        texts = (message[key] for key in _REASONING if isinstance(message.get(key), str))
        calls = _tool_calls(at, message.get("tool_calls", []))
        return Turn(role, parts, next(texts, ""), calls, name=name)
    if role == "tool":
        if "tool_call_id" not in message:
            raise InvalidRequest(f"{at}.tool_call_id is missing: a result needs the id of its call")
        call_id = text_of(f"{at}.tool_call_id", message["tool_call_id"])
        return Turn(role, parts, call_id=call_id, name=name)
    return Turn(role, parts, name=name)


def template_messages(turns: Sequence[Turn], *, as_parts: bool = False) -> list[Message]:
    """Return turns as the messages that a chat template reads.

    The content of a message is a list of parts if the message has images or ``as_parts`` is set;
    otherwise it is a text.
    """
    return [_template_message(turn, as_parts) for turn in with_function_names(turns)]


def _template_message(turn: Turn, as_parts: bool) -> Message:
    content = _template_parts(turn) if as_parts or turn.images else turn.text
    message: Message = {"role": turn.role, "content": content}
    if turn.name:
        message["name"] = turn.name
    if turn.call_id:
        message["tool_call_id"] = turn.call_id
    if turn.reasoning:
        # Each template reads one of these names. That of gpt-oss rejects "thinking" beside a text
        # and calls.
        names = _REASONING[:2] if turn.calls and turn.text else _REASONING
        message.update(dict.fromkeys(names, turn.reasoning))
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in turn.calls
        ]
    return message


def _template_parts(turn: Turn) -> list[dict[str, str]]:
    return [
        {"type": "image"} if isinstance(part, Image) else {"type": "text", "text": part}
        for part in turn.parts
    ]


def _parts(at: str, message: Message) -> tuple[Part, ...]:
    """Return the parts of a message's content; errors name the message's position ``at``.

    An assistant's message may have no content, usually because it has tool calls or a refusal. The
    text of the refusal, if there is one, is then returned as the only part.
    """
    content = message.get("content")
    if message["role"] == "assistant" and content in (None, []):
        refusal = text_of(f"{at}.refusal", message.get("refusal", ""))
        return (refusal,) if refusal else ()
    return parts_of(f"{at}.content", content, message["role"])


def parts_of(at: str, content: object, role: Role) -> tuple[Part, ...]:
    """Return the parts of a message's ``content``, a text or a list of parts.

    Errors name the position ``at`` in the request. Refusals become texts. Raises UnsupportedContent
    for a part that is neither text nor image, and for an image in a message of another role than
    user. Raises InvalidRequest for an empty list or another type, and the errors of
    ``image_of_part``.
    """
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{at} must be a string or a list of parts")
    return tuple(_part(f"{at}[{i}]", part, role) for i, part in enumerate(content))


def _part(at: str, part: object, role: Role) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{at} must be an object with a type")
    if kind == "refusal":
        return text_of(f"{at}.refusal", part.get("refusal"))
    if kind in OPENAI_IMAGE_PARTS:
        check_image_role(at, role)
        return image_of_part(at, part)
    if kind not in _TEXT_PARTS:
        raise UnsupportedContent(f"{at}: models read texts and images, not {kind[:64]}", field=at)
    return text_of(f"{at}.text", part.get("text"))


def check_image_role(at: str, role: Role) -> None:
    """Raise UnsupportedContent, naming ``at``, if a message of ``role`` may have no images."""
    if role != "user":
        raise UnsupportedContent(f"{at}: only messages of the user may have images", field=at)


def text_of(at: str, value: object) -> str:
    """Return ``value`` if it is a string. Raises InvalidRequest otherwise, naming ``at``."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{at} must be a string")
    return value


def _tool_calls(at: str, raw: object) -> tuple[ToolCall, ...]:
    if not isinstance(raw, list):
        raise InvalidRequest(f"{at}.tool_calls must be a list")
    return tuple(_tool_call(f"{at}.tool_calls[{i}]", call) for i, call in enumerate(raw))


def _tool_call(at: str, call: object) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequest(f"{at} must be an object with a function")
    if call.get("type") not in (None, "function"):
        raise InvalidRequest(f"{at}.type must be function")
    return ToolCall(
        text_of(f"{at}.id", call.get("id")),
        check_function_name(f"{at}.function.name", function.get("name")),
        call_arguments(f"{at}.function.arguments", function.get("arguments")),
    )


def call_arguments(at: str, raw: object) -> object:
    """Return the arguments of a tool call as an object, or as text if they are not a JSON object.

    An invalid text is accepted, because the model may have written it, and clients send back what
    they received. Missing arguments and an empty text become an empty object. Raises
    InvalidRequest for another type, and OutOfRange for more than MAX_DEPTH levels.
    """
    if raw is None or isinstance(raw, dict):
        return raw or {}
    text = text_of(at, raw)
    try:
        value = json.loads(text or "{}", parse_constant=_refuse_constant)
    except RecursionError:
        raise OutOfRange(f"{at} is nested too deeply") from None
    except ValueError:
        return text
    check_depth(at, value)
    return value if isinstance(value, dict) and is_encodable(value) else text


def _refuse_constant(name: str) -> None:
    raise ValueError(name)
