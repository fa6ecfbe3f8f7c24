"""Answers of ``/v1/completions`` as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from everlift.text import Vocabulary
from router.api.openai import logprobs
from router.api.openai.envelope import Envelope, UsageBody, usage_body, usage_so_far
from router.api.openai.logprobs import Alignment, CompletionLogprobs
from router.api.openai.streaming import ChunkedAnswer, ChunkOptions
from router.api.openai.token_ids import TokenIds
from router.api.openai.transcript import Collected, NewOutput, Usage
from router.api.openai.writer import around, array, encode


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    #: with return_token_ids; in a stream, the first chunk of the choice has those of the prompt
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """Whole completion, or a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: UsageBody | None


_NO_OPTIONS = ChunkOptions()


class CompletionAnswer(ChunkedAnswer):
    """Writer of completions.

    ``echoes`` has a prompt text for each choice, which precedes the choice's output (OpenAI's
    ``echo``). It is empty if prompts are not returned. ``token_ids`` is None if no token ids are
    returned.
    """

    def __init__(
        self,
        envelope: Envelope,
        vocabulary: Vocabulary,
        *,
        has_logprobs: bool,
        echoes: Sequence[str] = (),
        token_ids: TokenIds | None = None,
        options: ChunkOptions = _NO_OPTIONS,
    ) -> None:
        super().__init__(options)
        self._envelope = envelope
        self._vocabulary = vocabulary
        self._has_logprobs = has_logprobs
        self._echoes = echoes
        self._token_ids = token_ids
        self._alignments: dict[int, Alignment] = {}
        #: by choice, the JSON before and after the text of a chunk that has only text
        self._around: dict[int, tuple[str, str]] = {}

    def data(self, output: NewOutput, usage: Usage | None = None) -> str | None:
        """Return the chunk with the new output as JSON; None if there is nothing to send.

        Most chunks of a choice differ only in their text, so the JSON around it is encoded once.
        """
        has_more = self._has_logprobs or self._echoes or self._token_ids is not None
        if has_more or output.finish_reason or usage is not None:
            chunk = self.chunk(output, usage)
            return None if chunk is None else encode(chunk)
        if not output.text:
            return None
        if (around := self._around.get(output.choice)) is None:
            around = self._around[output.choice] = self._written_around(output.choice)
        begin, end = around
        return begin + encode(output.text) + end

    def _written_around(self, choice: int) -> tuple[str, str]:
        return around(self._completion([_choice(choice, "")], None), "text", "")

    def chunk(self, output: NewOutput, usage: Usage | None = None) -> Completion | None:
        """Return a chunk with the new output as a dict; None if there is nothing to send.

        The chunk has the token counts so far if ``usage`` is given.
        """
        logprobs = self._logprobs(output)
        text = self._echo(output.choice) + output.text if output.is_first else output.text
        ids = self._token_ids.new(output) if self._token_ids else []
        if not (text or output.finish_reason or ids or (logprobs and logprobs["tokens"])):
            return None
        choice = _choice(output.choice, text, logprobs, output.finish_reason, output.stop_reason)
        if self._token_ids:
            choice["token_ids"] = ids
            if output.is_first:
                choice["prompt_token_ids"] = self._token_ids.prompt(output.choice)
        return self._completion([choice], None if usage is None else usage_so_far(usage))

    def usage_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage_body(usage))

    def encode_complete(self, choices: Sequence[Collected], usage: Usage) -> Iterator[str]:
        """Yield the JSON of a complete answer in parts, each of which is encoded quickly."""
        begin, end = around(self._completion([], usage_body(usage)), "choices", [])
        return array(begin, (self._written(*each) for each in enumerate(choices)), end)

    def _written(self, index: int, choice: Collected) -> Iterator[str]:
        text = self._echo(index) + choice.text
        shown = _choice(index, text, None, choice.finish_reason, choice.stop_reason)
        if self._token_ids:
            shown["token_ids"] = choice.tokens
            shown["prompt_token_ids"] = self._token_ids.prompt(index)
        if not self._has_logprobs:
            return iter([encode(shown)])
        begin, end = around(shown, "logprobs", None)
        return logprobs.written_of_completion(self._vocabulary, choice, begin, end)

    def _logprobs(self, output: NewOutput) -> CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        if (alignment := self._alignments.get(output.choice)) is None:
            alignment = self._alignments[output.choice] = Alignment(self._vocabulary)
        return logprobs.of_completion(self._vocabulary, logprobs.placed(alignment, output))

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
    index: int,
    text: str,
    logprobs: CompletionLogprobs | None = None,
    finish_reason: str | None = None,
    stop_reason: str | int | None = None,
) -> CompletionChoice:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
