"""Simulated client: the client library, and a record of all that it received."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from everlift.client.client import AsyncClient
from everlift.client.received_output import Chunk
from everlift.client.stream import Stream
from everlift.errors import EverliftError
from everlift.messages import FinishReason
from everlift.options import GenerateOptions, Prompt
from everlift.sampling import TokenLogprobs


class Repeated(AssertionError):
    """Raised for a token that was repeated, or that follows a gap."""


@dataclass(slots=True)
class Received:
    """Choice as its client received it."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass
class Transcript:
    """Everything that a client received for one request; ``error`` is set if the request failed."""

    request_id: str
    choices: defaultdict[int, Received] = field(default_factory=lambda: defaultdict(Received))
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    usage: tuple[int, int] | None = None
    error: EverliftError | None = None
    epochs: set[int] = field(default_factory=set)
    #: Timing of the last stream of the request
    migrations: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    queued_s: float = 0.0
    total_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        return self.usage is not None

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices.values())

    def received(self) -> list[list[int]]:
        """Return the received tokens by choice."""
        return [self.choices[i].tokens for i in range(max(self.choices, default=-1) + 1)]

    def result(self) -> object:
        """Return all results that faults must not change."""
        choices = [
            (tuple(it.tokens), it.text, tuple(it.logprobs), it.finish_reason)
            for _, it in sorted(self.choices.items())
        ]
        return choices, self.prompt_logprobs, self.usage

    def take(self, chunk: Chunk) -> None:
        """Append a chunk; raise Repeated if its offset is not the next one."""
        choice = self.choices[chunk.choice]
        if chunk.offset != len(choice.tokens):
            raise Repeated(f"offset {chunk.offset} after {len(choice.tokens)} tokens")
        choice.tokens.extend(chunk.token_ids)
        choice.text += chunk.text
        choice.logprobs.extend(chunk.logprobs)
        self.epochs.add(chunk.epoch)

    def end(self, stream: Stream) -> None:
        """Record the results that a stream has at its end."""
        for index, reason in stream.finish_reasons.items():
            self.choices[index].finish_reason = reason
        self.prompt_logprobs = self.prompt_logprobs or stream.prompt_logprobs
        if stream.usage is not None:
            self.usage = (stream.usage.prompt_tokens, stream.usage.output_tokens)
        if (timing := stream.timing) is not None:
            self.migrations, self.preemptions = timing.migrations, timing.preemptions
            self.recomputed_tokens = timing.recomputed_tokens
            self.queued_s, self.total_s = timing.queued_s, timing.total_s


@dataclass(frozen=True, slots=True)
class Manners:
    """Behaviour of a client.

    It reads a piece every ``pause`` seconds. After ``leaves_after`` tokens it disconnects, and
    returns ``away`` seconds later. After ``cancels_after`` tokens it cancels.
    """

    pause: float = 0.0
    leaves_after: int | None = None
    away: float = 0.5
    cancels_after: int | None = None


async def read(
    client: AsyncClient,
    transcript: Transcript,
    prompt: Prompt,
    options: GenerateOptions,
    manners: Manners,
) -> None:
    """Read a request from its submission to its end."""
    options = options | {"request_id": transcript.request_id}
    stream = client.generate(prompt, **options)
    try:
        has_left = await _left(_follow(client, stream, transcript, manners))
        if has_left and stream.usage is None:
            transcript.end(stream)
            await asyncio.sleep(manners.away)
            stream = client.attach(transcript.request_id, received=transcript.received())
            await _follow(client, stream, transcript, replace(manners, leaves_after=None))
    except EverliftError as error:
        transcript.error = error
    transcript.end(stream)


async def _left(reading: Coroutine[Any, Any, None]) -> bool:
    """Return whether the reader was cancelled before the end."""
    task = asyncio.ensure_future(reading)
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return task.cancelled()


async def _follow(
    client: AsyncClient, stream: Stream, transcript: Transcript, manners: Manners
) -> None:
    async for chunk in stream:
        transcript.take(chunk)
        if _has(transcript, manners.cancels_after):
            # If no router answers, it reads on, and tries again after the next chunk.
            with suppress(EverliftError):
                await client.cancel(transcript.request_id)
        if _has(transcript, manners.leaves_after):
            _cancel_reader()
        if manners.pause:
            await asyncio.sleep(manners.pause)


def _cancel_reader() -> None:
    """Cancel the reader, which breaks its stream without a message."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def _has(transcript: Transcript, count: int | None) -> bool:
    return count is not None and transcript.num_tokens >= count


def addresses(routers: Sequence[str], first: int) -> list[str]:
    """Return all addresses, rotated so that the one at ``first`` is the first."""
    at = first % len(routers)
    return [*routers[at:], *routers[:at]]
