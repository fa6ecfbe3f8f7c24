"""Log probabilities as OpenAI's API writes them. Pure.

Tokens that are no text, such as the one that ends it, are left out there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from typing_extensions import TypedDict

from everlift.text import Tokenizer
from everlift.v1 import inference_pb2 as pb
from router.gateway.http.encoding import around, array, encode

#: JSON has no infinity; as in OpenAI's API this stands for it.
_LEAST = -9999.0
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: Log probabilities, alternatives counted in, that are written as one part: 5 to 10 ms.
_AT_ONCE = 1024


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


def of_chat(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]
) -> ChatLogprobs:
    content: list[TokenLogprob] = [
        {
            **_top(tokenizer, token, each.logprob),
            "top_logprobs": [_top(tokenizer, *top) for top in _alternatives(each)],
        }
        for token, each in _of_text(tokenizer, tokens, logprobs)
    ]
    return {"content": content, "refusal": None}


def written_of_chat(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[pb.TokenLogprobs],
    begin: str,
    end: str,
) -> Iterator[str]:
    """As ``of_chat``, as JSON between ``begin`` and ``end``, in parts."""
    before, behind = around(of_chat(tokenizer, (), ()), "content", [])
    written = (
        [text]
        for part in _parts(tokens, logprobs)
        if (text := _members(of_chat(tokenizer, *part)["content"]))
    )
    return array(begin + before, written, behind + end)


def of_completion(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[pb.TokenLogprobs],
    begin: int = 0,
) -> CompletionLogprobs:
    """``begin`` is where the first token's text begins in that of the choice."""
    shown: CompletionLogprobs = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [] if any(each.top_ids for each in logprobs) else None,
        "text_offset": [],
    }
    for token, each in _of_text(tokenizer, tokens, logprobs):
        text = tokenizer.decode([token])
        shown["tokens"].append(text)
        shown["token_logprobs"].append(_finite(each.logprob))
        shown["text_offset"].append(begin)
        if shown["top_logprobs"] is not None:
            shown["top_logprobs"].append(_by_text(tokenizer, each))
        begin += len(text)
    return shown


def written_of_completion(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[pb.TokenLogprobs],
    begin: str,
    end: str,
) -> Iterator[str]:
    """As ``of_completion``, as JSON between ``begin`` and ``end``, in parts."""
    scores: list[str] = []
    tops: list[str] = []
    offsets: list[str] = []
    has_tops = bool(logprobs and logprobs[0].top_ids)

    def texts() -> Iterator[list[str]]:
        """Of the tokens; the rest comes behind them."""
        offset = 0
        for part in _parts(tokens, logprobs):
            shown = of_completion(tokenizer, *part, offset)
            if not shown["tokens"]:
                continue
            offset += sum(map(len, shown["tokens"]))
            scores.append(_members(shown["token_logprobs"]))
            tops.append(_members(shown["top_logprobs"] or ()))
            offsets.append(_members(shown["text_offset"]))
            yield [_members(shown["tokens"])]

    yield from array(f'{begin}{{"tokens":', texts(), "")
    yield f',"token_logprobs":[{",".join(scores)}]'
    yield f',"top_logprobs":[{",".join(tops)}]' if has_tops else ',"top_logprobs":null'
    yield f',"text_offset":[{",".join(offsets)}]}}{end}'


def _parts(
    tokens: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]
) -> Iterator[tuple[Sequence[int], Sequence[pb.TokenLogprobs]]]:
    """Of few log probabilities each. A request's tokens have as many alternatives each."""
    if not logprobs:
        return
    step = max(1, _AT_ONCE // (1 + len(logprobs[0].top_ids)))
    for start in range(0, len(tokens), step):
        yield tokens[start : start + step], logprobs[start : start + step]


def _members(values: Sequence[object]) -> str:
    """Of an array, as JSON without its brackets."""
    return encode(values)[1:-1]


def num_characters(tokenizer: Tokenizer, tokens: Iterable[int]) -> int:
    """By which ``of_completion`` counts on."""
    return sum(len(tokenizer.decode([token])) for token in tokens if tokenizer.is_text(token))


def _of_text(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]
) -> Iterator[tuple[int, pb.TokenLogprobs]]:
    for token, each in zip(tokens, logprobs, strict=True):
        if tokenizer.is_text(token):
            yield token, each


def _alternatives(each: pb.TokenLogprobs) -> Iterator[tuple[int, float]]:
    return zip(each.top_ids, each.top_logprobs, strict=True)


def _by_text(tokenizer: Tokenizer, each: pb.TokenLogprobs) -> dict[str, float]:
    """Of tokens that have the same text, the most probable."""
    shown: dict[str, float] = {}
    for token, logprob in _alternatives(each):
        shown.setdefault(tokenizer.decode([token]), _finite(logprob))
    return shown


def _top(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    text = tokenizer.decode([token])
    # Of a part of a character its bytes are not known here.
    data = None if _REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
