"""Load of streaming completion requests over HTTP, sent in open loop, and its figures.

Latencies count from the due time of a request, even if the client sends it late, so that no wait is
left out. The client runs in the calling process and sends the same requests to every server.
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

#: Prompts do not contain token 0, which some tokenizers reserve.
_FIRST_TOKEN = 1
_TIMEOUT_S = 1200.0


class Incomplete(Exception):
    """Raised if an answer failed or has another number of tokens than requested."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A completion request and the time at which it is sent.

    ``due`` is in seconds since the load began. The answer must have ``tokens`` output tokens or, if
    that is 0, ``max_tokens``. ``fields`` are further fields of the request's JSON body.
    """

    prompt: tuple[int, ...] | str
    max_tokens: int
    due: float
    tokens: int = 0
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """Times of a complete answer, in seconds since the load began, and its output tokens."""

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
        """Mean time between consecutive output tokens; None if there are fewer than two."""
        return (self.last_token - self.first_token) / (self.tokens - 1) if self.tokens > 1 else None


def load(workload: Path, count: int, rate: float, seed: int, vocab_size: int) -> list[TimedRequest]:
    """Return ``count`` requests with the lengths of those in the ``workload`` file.

    If the file has fewer requests, they are repeated. Arrivals are Poisson at ``rate`` requests per
    second; if that is 0, all are due at once. All token ids of a prompt are shifted by a random
    offset, so that hits in a prefix cache are rare, within a load and between seeds.
    """
    chance = random.Random(seed)
    recorded = json.loads(workload.read_text())["requests"]
    due, requests = 0.0, []
    for request in itertools.islice(itertools.cycle(recorded), count):
        due += chance.expovariate(rate) if rate else 0.0
        shift = chance.randrange(vocab_size)
        prompt = tuple(_shifted(token, shift, vocab_size) for token in request["prompt"])
        requests.append(TimedRequest(prompt, request["max_tokens"], due))
    return requests


def _shifted(token: int, by: int, vocab_size: int) -> int:
    return _FIRST_TOKEN + (token + by) % (vocab_size - _FIRST_TOKEN)


class Client:
    """Client of ``/v1/completions`` at ``url``, an async context manager.

    It sends requests with the load generator of the product, but fails if an answer is incomplete.
    """

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
        """Return whether the server answers a short request completely."""
        try:
            model = await first_model(self._session, self._url)
            self._endpoint = self._endpoint_of(model)
            await self.send([TimedRequest((1, 2, 3), 2, 0.0)])
        except (BenchFailed, Incomplete):
            return False
        return True

    async def send(self, requests: Sequence[TimedRequest]) -> list[Answer]:
        """Send each request when it is due; return all answers, in the order of ``requests``.

        Raises Incomplete if any answer failed or has another number of tokens than requested.
        """
        endpoint = self._endpoint or self._endpoint_of("")
        sent = [
            Request(it.due, it.prompt, len(it.prompt), it.max_tokens, it.fields) for it in requests
        ]
        outcomes = await Generator(endpoint, timeout_s=_TIMEOUT_S).open_loop(sent)
        return [_answer(it, outcome) for it, outcome in zip(requests, outcomes, strict=True)]

    def _endpoint_of(self, model: str) -> OpenAiEndpoint:
        return OpenAiEndpoint(self._session, model, ignore_eos=True, temperature=0.0)


def _answer(request: TimedRequest, outcome: Outcome) -> Answer:
    """Return the answer. Raises Incomplete if it failed or lacks tokens."""
    if outcome.error:
        raise Incomplete(outcome.error)
    wanted = request.tokens or request.max_tokens
    if outcome.counted_by is not CountedBy.USAGE or outcome.output_tokens != wanted:
        raise Incomplete(f"{outcome.output_tokens} of {wanted} tokens")
    return Answer(request.due, outcome.pieces[0], outcome.pieces[-1], outcome.output_tokens)


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the rates up to the last token of the load, and percentiles over the answers."""
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
    """Return the smallest value such that ``percent`` % of all are not larger (nearest rank)."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]
