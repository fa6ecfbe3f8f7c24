"""Log probabilities of a prompt's tokens in vLLM's format. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from typing_extensions import TypedDict

from everlift.text import Vocabulary
from everlift.v1 import inference_pb2 as pb
from router.api.http.writer import array
from router.api.openai.logprobs import (
    LOGPROBS_PER_PART,
    NO_SCORES,
    Placed,
    alternatives,
    finite,
    members,
    placed_in_prompt,
)


class PromptLogprob(TypedDict):
    """Log probability of a token at a position of a prompt; the most probable one has rank 1."""

    logprob: float
    rank: int
    decoded_token: str | None


#: For each token of a prompt, the log probabilities of this token and of its alternatives by token
#: id, written as a string; None for the first token.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Tokens of a prompt whose log probabilities are returned.

    ``num_top`` is the number of alternatives that are listed besides each token.
    """

    tokens: Sequence[int]
    num_top: int


def of_prompt(
    vocabulary: Vocabulary, prompt: ScoredPrompt, scores: Sequence[pb.TokenLogprobs]
) -> PromptLogprobs:
    """Return the log probabilities of a prompt.

    ``scores`` are those of the tokens from the second one on.
    """
    return [entry for part in _parts(vocabulary, prompt, scores) for entry in part]


def written_of_prompt(
    vocabulary: Vocabulary,
    prompt: ScoredPrompt,
    scores: Sequence[pb.TokenLogprobs],
    begin: str,
    end: str,
) -> Iterator[str]:
    """Yield, in parts, ``begin``, then the log probabilities of a prompt as JSON, then ``end``."""
    parts = _parts(vocabulary, prompt, scores)
    return array(begin, ([members(part)] for part in parts if part), end)


def _parts(
    vocabulary: Vocabulary, prompt: ScoredPrompt, scores: Sequence[pb.TokenLogprobs]
) -> Iterator[PromptLogprobs]:
    step = max(1, LOGPROBS_PER_PART // (1 + prompt.num_top))
    placed = placed_in_prompt(vocabulary, prompt.tokens, scores, "")
    while part := [_entry(vocabulary, each, prompt.num_top) for each in islice(placed, step)]:
        yield part


def _entry(vocabulary: Vocabulary, placed: Placed, num_top: int) -> dict[str, PromptLogprob] | None:
    scores = placed.scores
    if scores is NO_SCORES:
        return None
    ranked = {placed.token: (scores.logprob, scores.rank)}
    for rank, (token, logprob) in enumerate(islice(alternatives(scores), num_top), start=1):
        ranked.setdefault(token, (logprob, rank))
    return {
        str(token): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": _decoded(vocabulary, token, placed.is_first),
        }
        for token, (logprob, rank) in ranked.items()
    }


def _decoded(vocabulary: Vocabulary, token: int, is_first: bool) -> str | None:
    data = vocabulary.token_bytes(token, is_first=is_first)
    return vocabulary.token_string(token) if data is None else data.decode(errors="replace")
