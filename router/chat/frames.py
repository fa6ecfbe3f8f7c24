"""Start parameters and messages of a renderer process, which renders chats. Pure.

A message is the number of a request in 8 bytes, the length in bytes of a frame, as a big-endian
integer of 4 bytes, and the frame, a JSON object in UTF-8. The frame of a rendered text is a zero
byte and the text in UTF-8. An answer repeats the number of its request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json


@dataclass(frozen=True, slots=True)
class Launch:
    """Start parameters of a renderer process.

    ``default`` is the chat template, and ``tool_use`` the template for chats with tools.
    ``special_tokens`` are given to the templates by name. ``cpu_s`` limits the CPU time of one chat
    in seconds, and ``max_characters`` the length of its rendered text. ``memory_mib`` limits the
    memory in MiB that the process uses in addition to its memory at the start.
    """

    default: str
    tool_use: str
    special_tokens: Mapping[str, str]
    cpu_s: float
    memory_mib: int
    max_characters: int


NUMBER_BYTES = 8
LENGTH_BYTES = 4
#: Number of the first request, which is a Launch, and of the message of each new child.
START = bytes(NUMBER_BYTES)
_TEXT = b"\0"
Frame = dict[str, Any]


def encode(frame: Frame) -> bytes:
    """Return the message of a frame, without its number."""
    return _with_length(to_json(frame))


def encode_text(text: str) -> bytes:
    """Return the message of a rendered text, without its number. Raises UnicodeEncodeError."""
    return _with_length(_TEXT + text.encode())


def _with_length(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode_length(head: bytes) -> int:
    return int.from_bytes(head, "big")


def decode(body: bytes) -> Frame:
    """Return the frame in ``body``, which is a message without its number and length.

    The frame of a rendered text is returned as {"text": text}. Raises ValueError if the body is
    neither a text nor a JSON object.
    """
    if body.startswith(_TEXT):
        return {"text": body[len(_TEXT) :].decode()}
    frame = json.loads(body)
    if not isinstance(frame, dict):
        raise ValueError("the frame is not a JSON object")
    return frame
