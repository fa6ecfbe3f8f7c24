"""JSON between a router and its renderers: four bytes of length, then so much UTF-8. Pure."""

from __future__ import annotations

import json
from typing import Any

LENGTH_BYTES = 4
Frame = dict[str, Any]


def encode(frame: Frame) -> bytes:
    body = json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode()
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode_length(head: bytes) -> int:
    return int.from_bytes(head, "big")


def decode(body: bytes) -> Frame:
    """Raises ValueError."""
    frame = json.loads(body)
    if not isinstance(frame, dict):
        raise ValueError("no frame")
    return frame
