"""Members that all answers with generated text have in common. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired

from typing_extensions import TypedDict

from router.api.http.transcript import Usage


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class UsageBody(TypedDict):
    """Token counts.

    ``prompt_tokens_details`` is missing until the answer is complete, and
    ``completion_tokens_details`` if the model writes no reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]


@dataclass(frozen=True, slots=True)
class Envelope:
    """Common fields of an answer; ``created`` is a Unix time in seconds."""

    id: str
    created: int
    model: str
    fingerprint: str | None


def usage_body(usage: Usage) -> UsageBody:
    """Return the token counts of a complete answer, including cached and reasoning tokens."""
    return {
        **usage_so_far(usage),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def usage_so_far(usage: Usage) -> UsageBody:
    """Return the token counts of an answer that is not complete yet."""
    body: UsageBody = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body
