"""What every answer that holds generated text has around it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import TypedDict

from router.gateway.http.transcript import Usage


class UsageBody(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Envelope:
    """``created`` is in seconds since 1970."""

    id: str
    created: int
    model: str
    fingerprint: str | None


def usage_body(usage: Usage) -> UsageBody:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
