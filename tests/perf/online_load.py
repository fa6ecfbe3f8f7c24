"""Streaming requests over HTTP that come when they come: what is sent, when, and what came back.

A request counts from when it was to leave, whether the client was on time or not, so that nothing
waits unseen. Every server is asked the same by the same client, in the process that calls.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

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
    """Of ``/v1/completions`` at ``url``. Use it as a context manager."""

    def __init__(self, url: str) -> None:
        self._session = aiohttp.ClientSession(
            url,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        )
        self._model = ""

    async def __aenter__(self) -> Client:
        await self._session.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def is_ready(self) -> bool:
        """Whether it answers a request."""
        try:
            async with self._session.get("/v1/models") as response:
                if response.status != 200:
                    return False
                self._model = (await response.json())["data"][0]["id"]
            await self._ask(Ask((1, 2, 3), 2, 0.0), time.perf_counter())
        except (aiohttp.ClientError, Incomplete):
            return False
        return True

    async def send(self, asks: Sequence[Ask]) -> list[Answer]:
        """All answers, when the last one is there. Raises Incomplete."""
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for ask in asks:
                if (early := begin + ask.due - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                tasks.append(group.create_task(self._ask(ask, begin)))
        return [task.result() for task in tasks]

    async def _ask(self, ask: Ask, begin: float) -> Answer:
        first = last = 0.0
        tokens = None
        async with self._session.post("/v1/completions", json=self._body(ask)) as response:
            if response.status != 200:
                raise Incomplete(f"{response.status}: {(await response.text())[:300]}")
            async for event in _events(response):
                chunk = json.loads(event)
                if "error" in chunk:
                    raise Incomplete(str(chunk["error"]))
                if chunk["choices"]:
                    last = time.perf_counter()
                    first = first or last
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
        if tokens != (wanted := ask.tokens or ask.max_tokens):
            raise Incomplete(f"{tokens} of {wanted} tokens")
        return Answer(ask.due, first - begin, last - begin, tokens)

    def _body(self, ask: Ask) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **ask.fields,
        }


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each event up to [DONE]. Raises Incomplete."""
    rest = b""
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                event = line[5:].strip()
                if event == b"[DONE]":
                    return
                yield event
    raise Incomplete("a stream that broke off")


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
