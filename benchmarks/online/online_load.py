"""Streaming requests over HTTP that come when they come: what is sent, when, and what came back.

A request counts from when it was to leave, whether the client was on time or not, so that nothing
waits unseen. Every server is asked the same by the same client, in the process that calls.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from cluster.bench.endpoint import OpenAiEndpoint, first_model, http_session
from cluster.bench.generator import Generator
from cluster.bench.load import Request
from cluster.bench.report import CountedBy, Outcome
from cluster.errors import BenchFailed

#: Token 0 is left to tokenizers that want it for something else.
_FIRST_TOKEN = 1
_TIMEOUT_S = 1200.0


class Incomplete(Exception):
    """An answer that is not what was asked for."""


@dataclass(frozen=True, slots=True)
class Ask:
    """``due`` is in seconds since the load began. What comes back must have ``max_tokens`` tokens,
    unless ``tokens`` says another number. ``fields`` are of the body, before what is usual."""

    prompt: tuple[int, ...] | str
    max_tokens: int
    due: float
    tokens: int = 0
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds since the load began."""

    due: float
    first_token: float
    last_token: float
    tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_token - self.due

    @property
    def e2e_s(self) -> float:
        return self.last_token - self.due

    @property
    def tpot_s(self) -> float | None:
        """Between two tokens, on average. None where there are not two."""
        return (self.last_token - self.first_token) / (self.tokens - 1) if self.tokens > 1 else None


def load(workload: Path, count: int, rate: float, seed: int, vocab_size: int) -> list[Ask]:
    """The first ``count`` requests of ``workload``, from its begin again where it has fewer, at
    random moments, ``rate`` a second on average; 0: all at once. Loads of different seeds have no
    prompt in common, nor the begin of one: caches of prefixes find nothing."""
    chance = random.Random(seed)
    requests = json.loads(workload.read_text())["requests"]
    due, asks = 0.0, []
    for request in itertools.islice(itertools.cycle(requests), count):
        due += chance.expovariate(rate) if rate else 0.0
        shift = chance.randrange(vocab_size)
        prompt = tuple(_shifted(token, shift, vocab_size) for token in request["prompt"])
        asks.append(Ask(prompt, request["max_tokens"], due))
    return asks


def _shifted(token: int, by: int, vocab_size: int) -> int:
    return _FIRST_TOKEN + (token + by) % (vocab_size - _FIRST_TOKEN)


class Client:
    """Of ``/v1/completions`` at ``url``, with the product's own generator: a benchmark is no
    benchmark unless every answer is whole. Use it as a context manager."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1"
        self._stack = AsyncExitStack()
        self._endpoint: OpenAiEndpoint | None = None

    async def __aenter__(self) -> Client:
        self._session = await self._stack.enter_async_context(http_session(self._url, None))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def is_ready(self) -> bool:
        """Whether it answers a request."""
        try:
            model = await first_model(self._session, self._url)
            self._endpoint = self._endpoint_of(model)
            await self.send([Ask((1, 2, 3), 2, 0.0)])
        except (BenchFailed, Incomplete):
            return False
        return True

    async def send(self, asks: Sequence[Ask]) -> list[Answer]:
        """All answers, when the last one is there. Raises Incomplete."""
        endpoint = self._endpoint or self._endpoint_of("")
        requests = [
            Request(ask.due, ask.prompt, len(ask.prompt), ask.max_tokens, ask.fields)
            for ask in asks
        ]
        outcomes = await Generator(endpoint, timeout_s=_TIMEOUT_S).open_loop(requests)
        return [_answer(ask, outcome) for ask, outcome in zip(asks, outcomes, strict=True)]

    def _endpoint_of(self, model: str) -> OpenAiEndpoint:
        return OpenAiEndpoint(self._session, model, ignore_eos=True, temperature=0.0)


def _answer(ask: Ask, outcome: Outcome) -> Answer:
    """Raises Incomplete."""
    if outcome.error:
        raise Incomplete(outcome.error)
    wanted = ask.tokens or ask.max_tokens
    if outcome.counted_by is not CountedBy.USAGE or outcome.output_tokens != wanted:
        raise Incomplete(f"{outcome.output_tokens} of {wanted} tokens")
    return Answer(ask.due, outcome.pieces[0], outcome.pieces[-1], outcome.output_tokens)


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Rates from the begin of the load to its last token; percentiles over the requests."""
    wall = max(answer.last_token for answer in answers)
    found = {
        "tokens_per_s": sum(answer.tokens for answer in answers) / wall,
        "requests_per_s": len(answers) / wall,
    }
    times = {
        "ttft": [answer.ttft_s for answer in answers],
        "tpot": [tpot for answer in answers if (tpot := answer.tpot_s) is not None],
        "e2e": [answer.e2e_s for answer in answers],
    }
    for name, seconds in times.items():
        found[f"{name}_p50_ms"] = statistics.median(seconds) * 1e3
        found[f"{name}_p99_ms"] = percentile(seconds, 99) * 1e3
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that is no less than ``percent`` of all (nearest rank)."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]
