"""Complete result of a prompt: its choices with text, tokens and log probabilities."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from everlift.client.received_output import Chunk
from everlift.client.stream import Stream
from everlift.errors import EverliftError
from everlift.messages import FinishReason
from everlift.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice of a completion, with its text and tokens.

    ``logprobs`` has one item per token; it is empty if not requested. ``finish_reason`` is None if
    the request failed before the choice ended.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """Completion of one prompt.

    ``prompt_logprobs`` has an item for each prompt token from the second one on; it is empty unless
    requested. If ``error`` is set, the request failed, and the choices have the output before that.
    """

    request_id: str
    num_prompt_tokens: int
    choices: tuple[Choice, ...]
    #: empty if a cluster has tokenised the prompt
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: EverliftError | None = None

    @property
    def text(self) -> str:
        """Text of the first choice. Raises ``error`` if it is set."""
        if self.error is not None:
            raise self.error
        return self.choices[0].text

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


async def gather(stream: Stream) -> Completion:
    """Read a cluster's stream to its end, and return its chunks as a completion.

    Cancelling this call does not cancel the request, but only disconnects from it. Raises
    EverliftError if the request fails.
    """
    gathering = Gathering()
    async for chunk in stream:
        gathering.add(chunk)
    return gathering.completion(stream)


class Gathering:
    """Builder of a completion from the chunks of a stream."""

    def __init__(self) -> None:
        self._chunks: dict[int, list[Chunk]] = defaultdict(list)

    def add(self, chunk: Chunk) -> None:
        """Add a chunk; the chunks of one choice must be added in the order of their offsets."""
        self._chunks[chunk.choice].append(chunk)

    def completion(self, stream: Stream) -> Completion:
        """Return the completion; ``stream`` must have ended."""
        assert stream.usage is not None
        return Completion(
            request_id=stream.request_id,
            num_prompt_tokens=stream.usage.prompt_tokens,
            choices=tuple(self._choice(*each) for each in sorted(stream.finish_reasons.items())),
            prompt_logprobs=stream.prompt_logprobs,
        )

    def _choice(self, index: int, reason: FinishReason) -> Choice:
        chunks = self._chunks[index]
        return Choice(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            finish_reason=reason,
            logprobs=tuple(each for chunk in chunks for each in chunk.logprobs),
        )
