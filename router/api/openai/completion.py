"""Answers of ``/v1/completions`` as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NotRequired

from typing_extensions import TypedDict

from everlift.text import Vocabulary
from router.api.http.transcript import Collected, NewOutput, Usage
from router.api.http.writer import around, array, encode
from router.api.openai import logprobs, prompt_logprobs
from router.api.openai.chunks import ChunkedAnswer, ChunkOptions
from router.api.openai.envelope import Envelope, UsageBody, usage_body, usage_so_far
from router.api.openai.logprobs import Alignment, CompletionLogprobs, Echo
from router.api.openai.prompt_logprobs import PromptLogprobs, ScoredPrompt
from router.api.openai.token_ids import TokenIds


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: NotRequired[PromptLogprobs]
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

    ``echoes`` has one prompt for each choice, written before the choice's output (OpenAI's
    ``echo``). Each prompt is a text, or an Echo if the log probabilities of its tokens precede
    those of the output. ``echoes`` is empty if prompts are not returned. ``prompts`` also has one
    prompt for each choice, for vLLM's ``prompt_logprobs``: the log probabilities of the prompt's
    tokens. ``prompts`` is empty if these are not requested. ``token_ids`` is None if no token ids
    are returned.
    """

    def __init__(
        self,
        envelope: Envelope,
        vocabulary: Vocabulary,
        *,
        has_logprobs: bool,
        echoes: Sequence[str | Echo] = (),
        prompts: Sequence[ScoredPrompt] = (),
        token_ids: TokenIds | None = None,
        options: ChunkOptions = _NO_OPTIONS,
    ) -> None:
        super().__init__(options)
        self._envelope = envelope
        self._vocabulary = vocabulary
        self._has_logprobs = has_logprobs
        self._echoes = echoes
        self._prompts = prompts
        self._token_ids = token_ids
        self._alignments: dict[int, Alignment] = {}
        #: by choice, the JSON before and after the text of a chunk that has only text
        self._around: dict[int, tuple[str, str]] = {}

    def data(self, output: NewOutput, usage: Usage | None = None) -> str | None:
        """Return the chunk with the new output as JSON; None if there is nothing to send.

        Most chunks of a choice differ only in their text, so the JSON around it is encoded once.
        """
        has_more = self._has_logprobs or self._echoes or self._prompts or self._token_ids
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
        is_scored = output.is_first and bool(self._prompts)
        ids = self._token_ids.new(output) if self._token_ids else []
        has_more = bool(ids or is_scored or (logprobs and logprobs["tokens"]))
        if not (text or output.finish_reason or has_more):
            return None
        choice = _choice(output.choice, text, logprobs, output.finish_reason, output.stop_reason)
        if is_scored:
            prompt = self._prompts[output.choice]
            choice["prompt_logprobs"] = prompt_logprobs.of_prompt(
                self._vocabulary, prompt, output.prompt_logprobs
            )
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
        if not (self._has_logprobs or self._prompts):
            return iter([encode(shown)])
        begin, end = around(shown, "logprobs", None)
        if self._has_logprobs:
            echo = self._scored_echo(index)
            scored = logprobs.written_of_completion(self._vocabulary, choice, begin, "", echo)
        else:
            scored = iter([f"{begin}null"])
        if not self._prompts:
            return chain(scored, [end])
        before = f'{end.removesuffix("}")},"prompt_logprobs":'
        prompt, scores = self._prompts[index], choice.prompt_logprobs
        return chain(
            scored,
            prompt_logprobs.written_of_prompt(self._vocabulary, prompt, scores, before, "}"),
        )

    def _logprobs(self, output: NewOutput) -> CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        echo = self._scored_echo(output.choice)
        if (alignment := self._alignments.get(output.choice)) is None:
            alignment = Alignment(self._vocabulary, lists_all=echo is not None)
            self._alignments[output.choice] = alignment
        placed = logprobs.placed(alignment, output)
        shown = logprobs.of_completion(self._vocabulary, placed, echo)
        if echo is None or not output.is_first:
            return shown
        echoed = logprobs.of_echo(self._vocabulary, echo, output.prompt_logprobs)
        return logprobs.joined((*echoed, shown))

    def _echo(self, choice: int) -> str:
        if not self._echoes:
            return ""
        echo = self._echoes[choice]
        return echo.text if isinstance(echo, Echo) else echo

    def _scored_echo(self, choice: int) -> Echo | None:
        echo = self._echoes[choice] if self._echoes else None
        return echo if isinstance(echo, Echo) else None

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
