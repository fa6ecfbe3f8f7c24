"""Many short requests of every kind, as fast as a cluster answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from everlift import AsyncClient
from everlift.options import GenerateOptions, Prompt

_AT_ONCE = 16
#: Share of requests that are cancelled after their first output, and of those with a grammar.
_RARE = 1 / 20
_WORDS = "one two three four five six seven monday tuesday january february".split()
_SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
_GRAMMARS: tuple[GenerateOptions, ...] = (
    {"regex": "[a-z ]{1,20}"},
    {"json_schema": _SCHEMA},
    {"choice": ["one", "two"]},
)


class ShortRequests:
    """Source of requests; ``num_done`` is the number of ended ones."""

    def __init__(self, routers: list[str], seed: int) -> None:
        self.num_done = 0
        self._routers = routers
        self._rng = Random(seed)

    async def warm_up(self, max_tokens: int, vocab_size: int) -> None:
        """Send prompts of 1, 5, 9, ... tokens one by one, so that steps of all sizes run."""
        async with AsyncClient(self._routers) as client:
            for length in range(1, max_tokens, 4):
                prompt = [self._rng.randrange(1, vocab_size) for _ in range(length)]
                await client.generate(prompt, max_tokens=1).text()

    async def run(self, is_over: Callable[[], bool], step: Callable[[], None]) -> None:
        """Send requests until ``is_over`` returns true; call ``step`` after each of them."""

        async def send_in_turn(client: AsyncClient) -> None:
            while not is_over():
                await self._send(client)
                self.num_done += 1
                step()

        async with AsyncClient(self._routers) as client, asyncio.TaskGroup() as senders:
            for _ in range(_AT_ONCE):
                senders.create_task(send_in_turn(client))

    async def _send(self, client: AsyncClient) -> None:
        is_cancelled = self._rng.random() < _RARE
        async with client.generate(self._prompt(), **self._options()) as stream:
            async for _ in stream:
                if is_cancelled:
                    return

    def _prompt(self) -> Prompt:
        return " ".join(self._rng.choices(_WORDS, k=self._rng.choice([1, 2, 4, 8, 12, 20, 40])))

    def _options(self) -> GenerateOptions:
        rng = self._rng
        options: GenerateOptions = {"max_tokens": rng.choice([1, 2, 4, 8, 16, 24])}
        if rng.random() < 0.7:
            options |= {"temperature": 1.0, "seed": rng.getrandbits(60)}
        if rng.random() < 0.1:
            options |= {"n": 2}
        if rng.random() < 0.15:
            options |= {"logprobs": rng.choice([0, 3])}
        if rng.random() < 0.05:
            options |= {"prompt_logprobs": 1}
        if rng.random() < 0.1:
            options |= {"top_k": 20, "top_p": 0.9, "presence_penalty": 0.5}
        if rng.random() < 0.1:
            options |= {"stop": [" 7", "e"]}
        if rng.random() < _RARE:
            options |= rng.choice(_GRAMMARS)
        return options
