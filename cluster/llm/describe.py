"""Completions as JSON, for ``everlift generate --json`` and ``everlift batch``."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.llm.completion import Choice, Completion
from everlift.sampling import TokenLogprobs

Json = dict[str, object]

#: Decimal places of log probabilities, which are computed in single precision.
_DIGITS = 6


def choice(described: Choice) -> Json:
    reason = described.finish_reason
    fields: Json = {
        "text": described.text,
        "finish_reason": reason.name.lower() if reason else None,
    }
    if described.logprobs:
        fields["logprobs"] = [
            {"token": token} | each
            for token, each in zip(described.token_ids, logprobs(described.logprobs), strict=True)
        ]
    return fields


def logprobs(described: Iterable[TokenLogprobs]) -> list[Json]:
    return [
        {
            "logprob": round(each.logprob, _DIGITS),
            "rank": each.rank,
            "top": [[token, round(logprob, _DIGITS)] for token, logprob in each.top],
        }
        for each in described
    ]


def usage(completion: Completion) -> Json:
    return {
        "prompt_tokens": completion.num_prompt_tokens,
        "output_tokens": completion.num_output_tokens,
    }
