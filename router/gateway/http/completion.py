"""The answers of ``/v1/completions``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from typing_extensions import TypedDict

from everlift.text import Tokenizer
from router.gateway.http import logprobs
from router.gateway.http.encoding import around, array, encode
from router.gateway.http.envelope import Envelope, UsageBody, usage_body
from router.gateway.http.logprobs import CompletionLogprobs
from router.gateway.http.transcript import Collected, News, Usage


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(TypedDict):
    """Whole, or a chunk: then ``usage`` is in the last one at most."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: UsageBody | None


class CompletionAnswer:
    """``echoes`` has the prompt's text of each choice that begins with it."""

    def __init__(
        self,
        envelope: Envelope,
        tokenizer: Tokenizer,
        *,
        has_logprobs: bool,
        echoes: Sequence[str] = (),
    ) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._echoes = echoes
        #: by choice, where the text of its next token begins
        self._begins: dict[int, int] = {}
        #: by choice, what is written before and behind the text of a chunk that has nothing else
        self._around: dict[int, tuple[str, str]] = {}

    def data(self, news: News) -> str | None:
        """A chunk as JSON. Most differ in their text alone, and are written around it."""
        if self._has_logprobs or self._echoes or news.finish_reason:
            chunk = self.chunk(news)
            return None if chunk is None else encode(chunk)
        if not news.text:
            return None
        if (around := self._around.get(news.choice)) is None:
            around = self._around[news.choice] = self._written_around(news.choice)
        begin, end = around
        return begin + encode(news.text) + end

    def _written_around(self, choice: int) -> tuple[str, str]:
        return around(self._completion([_choice(choice, "", None, None)], None), "text", "")

    def chunk(self, news: News) -> Completion | None:
        """None where there is nothing to tell."""
        logprobs = self._logprobs(news)
        text = self._echo(news.choice) + news.text if news.is_begin else news.text
        if not (text or news.finish_reason or (logprobs and logprobs["tokens"])):
            return None
        return self._completion([_choice(news.choice, text, logprobs, news.finish_reason)], None)

    def usage_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage_body(usage))

    def whole(self, choices: Sequence[Collected], usage: Usage) -> Iterator[str]:
        """Its JSON, in parts that each take little time."""
        begin, end = around(self._completion([], usage_body(usage)), "choices", [])
        return array(begin, (self._written(*each) for each in enumerate(choices)), end)

    def _written(self, index: int, choice: Collected) -> Iterator[str]:
        shown = _choice(index, self._echo(index) + choice.text, None, choice.finish_reason)
        if not self._has_logprobs:
            return iter([encode(shown)])
        tokens, each = choice.tokens, choice.logprobs
        begin, end = around(shown, "logprobs", None)
        return logprobs.written_of_completion(self._tokenizer, tokens, each, begin, end)

    def _logprobs(self, news: News) -> CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        known = news.num_known
        begin = self._begins.get(news.choice, 0)
        begin += logprobs.num_characters(self._tokenizer, news.tokens[:known])
        tokens = news.tokens[known:]
        self._begins[news.choice] = begin + logprobs.num_characters(self._tokenizer, tokens)
        return logprobs.of_completion(self._tokenizer, tokens, news.logprobs[known:], begin)

    def _echo(self, choice: int) -> str:
        return self._echoes[choice] if self._echoes else ""

    def _completion(self, choices: list[CompletionChoice], usage: UsageBody | None) -> Completion:
        return {
            "id": self._envelope.id,
            "object": "text_completion",
            "created": self._envelope.created,
            "model": self._envelope.model,
            "system_fingerprint": self._envelope.fingerprint,
            "choices": choices,
            "usage": usage,
        }


def _choice(
    index: int, text: str, logprobs: CompletionLogprobs | None, finish_reason: str | None
) -> CompletionChoice:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
