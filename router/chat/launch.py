"""What a renderer is started with. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launch:
    """``tool_use`` is the template for chats with tools. ``cpu_s`` for one chat, ``max_characters``
    of what it becomes, ``memory_mib`` beyond what the process has at its start."""

    default: str
    tool_use: str
    special_tokens: Mapping[str, str]
    cpu_s: float
    memory_mib: int
    max_characters: int
