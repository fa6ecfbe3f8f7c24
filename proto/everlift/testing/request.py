"""Requests of a fake router, and their outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from everlift.errors import DataLoss, OffsetOutOfRange
from everlift.hashes import token_digest
from everlift.messages import FinishReason, Submission
from everlift.sampling import TokenLogprobs
from everlift.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a choice: token ids, each with the text that it completes.

    ``tail`` is the text that is sent with the end of the output. ``logprobs`` has one entry for
    each token, or is empty.
    """

    tokens: tuple[tuple[int, str], ...]
    tail: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


#: Function that returns the output of a request: one for all choices, or one for each choice.
Answer = Callable[[Submission], Output | Sequence[Output]]


def words(submission: Submission) -> Output:
    """Return an output with the words of the prompt, each as a token.

    If the prompt is token ids, each id is a word.
    """
    prompt = submission.prompt
    text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
    first, *others = text.split(" ")
    return Output(tuple(enumerate([first, *(f" {word}" for word in others)])))


@dataclass(slots=True)
class FakeRequest:
    """Request in the fake router; ``outputs`` has the output of each choice."""

    submission: Submission
    outputs: tuple[Output, ...]
    state: pb.RequestState.ValueType = pb.REQUEST_STATE_RUNNING
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def tokens(self, choice: int) -> tuple[tuple[int, str], ...]:
        return self.outputs[choice].tokens[: self.submission.max_tokens]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all choices."""
        return sum(len(self.tokens(choice)) for choice in range(len(self.outputs)))

    def piece(self, choice: int, start: int, stop: int) -> pb.GenerateResponse:
        output, tokens = self.outputs[choice], self.tokens(choice)[start:stop]
        prompt_logprobs = output.prompt_logprobs if (choice, start) == (0, 0) else ()
        return pb.GenerateResponse(
            request_id=self.submission.request_id,
            choice=choice,
            offset=start,
            epoch=1,
            token_ids=[token for token, _ in tokens],
            text="".join(text for _, text in tokens),
            logprobs=[each.to_proto() for each in output.logprobs[start:stop]],
            prompt_logprobs=[each.to_proto() for each in prompt_logprobs],
        )

    def end(self, choice: int, *, is_last: bool) -> pb.GenerateResponse:
        """Return the piece that ends a choice, with its finish reason.

        With ``is_last``, the piece is also the last one of the stream. It then contains the usage,
        and the state of the request becomes FINISHED.
        """
        output, count = self.outputs[choice], len(self.tokens(choice))
        complete = count == len(output.tokens)
        piece = self.piece(choice, count, count)
        piece.text = output.tail if complete else ""
        piece.finish_reason = (FinishReason.STOP if complete else FinishReason.LENGTH).value
        if is_last:
            self.state = pb.REQUEST_STATE_FINISHED
            piece.usage.prompt_tokens = len(self.submission.prompt)
            piece.usage.output_tokens = self.num_tokens
            piece.timing.attempts = 1
        return piece

    def check(self, offsets: Sequence[int], digests: Sequence[int]) -> None:
        """Check the offsets and digests of an Attach; item i of each list is that of choice i.

        Raises OffsetOutOfRange for a choice that does not exist, a negative offset, or an offset
        beyond the output of a choice without a digest. Raises DataLoss for a wrong digest, or an
        offset beyond the output of a choice with a digest.
        """
        for choice, offset in enumerate(offsets):
            if choice >= len(self.outputs) or offset < 0:
                raise OffsetOutOfRange(f"choice {choice} has no offset {offset}")
            tokens = [token for token, _ in self.tokens(choice)[:offset]]
            if choice < len(digests):
                if offset > len(tokens) or token_digest(tokens) != digests[choice]:
                    raise DataLoss(f"choice {choice} cannot be continued at offset {offset}")
            elif offset > len(tokens):
                raise OffsetOutOfRange(f"choice {choice} has no offset {offset}")

    def positions(self, offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the choice and the offset of each token and of each choice's end.

        The pairs are sorted by offset, and at equal offsets by choice. ``offsets`` has, for each
        choice, the first offset to yield; it is 0 for choices that the list lacks.
        """
        starts = [*offsets, *[0] * (len(self.outputs) - len(offsets))]
        ends = [len(self.tokens(choice)) for choice in range(len(self.outputs))]
        for at in range(max(ends) + 1):
            for choice, (start, end) in enumerate(zip(starts, ends, strict=True)):
                if start <= at <= end:
                    yield choice, at
