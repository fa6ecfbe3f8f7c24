"""Start messages and output of a request to an ``LLM``, which is a model in this process.

A Generation corresponds to the router's LiveRequest, but has a single attempt, no ledger and one
reader.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.llm.completion import Choice, Completion
from everlift.client.received_output import Chunk
from everlift.errors import EngineFailed, EverliftError, from_slug
from everlift.messages import FinishReason, Request
from everlift.sampling import SamplingParams, TokenLogprobs
from everlift.text import Tokenizer
from everlift.v1 import session_pb2
from router.requests.messages import first_start
from router.requests.request import Output

_FINISHED_BY = {
    session_pb2.STOP_CAUSE_EOS: FinishReason.STOP,
    session_pb2.STOP_CAUSE_LENGTH: FinishReason.LENGTH,
}


class Generation:
    """Request with its output so far; the worker identifies it by ``epoch``."""

    def __init__(self, epoch: int, request: Request, tokenizer: Tokenizer) -> None:
        self.epoch = epoch
        self.request = request
        self.error: EverliftError | None = None
        self._outputs = [Output.of(request, tokenizer) for _ in range(request.n)]
        self._reasons: list[FinishReason | None] = [None] * request.n
        self._prompt_logprobs: list[TokenLogprobs] = []

    @property
    def is_over(self) -> bool:
        return self.error is not None or None not in self._reasons

    def is_finished(self, choice: int) -> bool:
        return self._reasons[choice] is not None

    def starts(self) -> list[session_pb2.Start]:
        """Return the messages that start the request at the worker, one for each choice."""
        request = self.request
        return [
            first_start(
                request,
                self.epoch,
                choice,
                request.prompt_field or request.prompt_ids,
                self._sampling(choice),
                has_images=choice == 0,
            )
            for choice in range(request.n)
        ]

    def _sampling(self, choice: int) -> SamplingParams:
        sampling = self.request.sampling
        return replace(sampling, prompt_logprobs=None) if choice else sampling

    def num_tokens(self, choice: int) -> int:
        return len(self._outputs[choice])

    def add(self, progress: session_pb2.Progress) -> None:
        """Add new output tokens, or the end, of the choice that ``progress`` names."""
        self._prompt_logprobs += map(TokenLogprobs.from_proto, progress.prompt_logprobs)
        output = self._outputs[progress.choice]
        logprobs = [TokenLogprobs.from_proto(each) for each in progress.logprobs]
        output.extend(progress.token_ids, logprobs)
        reason = FinishReason.STOP if output.stopped else _FINISHED_BY.get(progress.stop)
        if reason is not None:
            output.finish()
            self._reasons[progress.choice] = reason
        elif progress.stop:
            self.error = _error(progress)

    def chunk(self, choice: int, offset: int) -> Chunk | None:
        """Return the output of a choice from token ``offset`` on; None if there is none yet."""
        output = self._outputs[choice]
        text = output.text(offset, len(output)) + output.tail
        if offset == len(output) and not text:
            return None
        return Chunk(
            choice=choice,
            offset=offset,
            token_ids=tuple(output.tokens[offset:]),
            text=text,
            epoch=self.epoch,
            unledgered=False,
            logprobs=tuple(output.logprobs[offset:]),
        )

    def completion(self) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            num_prompt_tokens=len(self.request.prompt_ids),
            choices=tuple(map(_choice, self._outputs, self._reasons)),
            prompt_ids=self.request.prompt_ids,
            prompt_logprobs=tuple(self._prompt_logprobs),
            error=self.error,
        )


def _choice(output: Output, reason: FinishReason | None) -> Choice:
    return Choice(
        text=output.text(0, len(output)) + output.tail,
        token_ids=tuple(output.tokens),
        finish_reason=reason,
        logprobs=tuple(output.logprobs),
    )


def _error(progress: session_pb2.Progress) -> EverliftError:
    if progress.error_slug:
        return from_slug(progress.error_slug, progress.error)
    return EngineFailed(progress.error)
