"""One request of a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Request:
    """``due`` is in seconds since the load begins. ``prompt`` is text, or token ids, of about
    ``prompt_tokens``; an endpoint may count others. ``fields`` are of an OpenAI body, and win over
    what is usual."""

    due: float
    prompt: str | tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    fields: Mapping[str, object] = field(default_factory=dict)
