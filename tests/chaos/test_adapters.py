"""LoRA adapters of real workers that die: no token is lost, repeated or another adapter's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from cluster.config import DEMO_MODEL, Config
from everlift.client.client import AsyncClient
from everlift.sampling import SamplingParams
from router.config import RouterConfig
from tests.chaos.support import ROUTER, Cluster, running, until
from tests.support.router import patient
from tests.support.worker.lora_files import write_adapter
from tests.support.worker.torch_engine import Job, TorchEngine
from worker.config import WorkerConfig

REQUESTS, KILLS, MAX_TOKENS = 48, 2, 160
NAMES = ("", "a", "b", "c")
#: All prompts begin alike and fill blocks, which only requests with the same adapter may share.
BEGINNING = "count from 1 to 12: 1 2 3 4 5 6 7 8 9 10 11 12\n" * 3


@dataclass(frozen=True)
class Asked:
    number: int

    @property
    def prompt(self) -> str:
        return f"{BEGINNING}count from {self.number // len(NAMES)} to 400:"

    @property
    def adapter(self) -> str:
        return NAMES[self.number % len(NAMES)]

    @property
    def sampling(self) -> SamplingParams:
        """Half of the requests are greedy."""
        return SamplingParams(temperature=float(self.number % 8 < 4), seed=self.number)


ASKED = [Asked(number) for number in range(REQUESTS)]


def config(tmp_path: Path, adapters: tuple[str, ...]) -> Config:
    return Config(
        model=str(DEMO_MODEL),
        adapters=adapters,
        num_routers=2,
        num_workers=2,
        state_dir=tmp_path / "state",
        router=RouterConfig(**ROUTER | {"model": str(DEMO_MODEL)}),
        worker=WorkerConfig(
            model=str(DEMO_MODEL),
            dtype="float32",
            max_num_seqs=16,
            # Too few for all sequences of a worker: some are preempted.
            num_blocks=90,
            max_num_batched_tokens=64,
            num_threads=1,
        ),
    )


class Run:
    """All requests at the same time, their tokens so far, and how many attempts they took."""

    def __init__(self, cluster: Cluster) -> None:
        self.tokens: list[list[int]] = [[] for _ in ASKED]
        self.attempts = 0
        self._task = asyncio.create_task(self._follow(cluster))

    async def begun(self) -> None:
        await until(lambda: sum(len(tokens) > 20 for tokens in self.tokens) > REQUESTS // 4)
        assert not self._task.done()

    async def finished(self) -> list[list[int]]:
        await self._task
        return self.tokens

    async def _follow(self, cluster: Cluster) -> None:
        async with patient.client(cluster.addresses) as client:
            pairs = zip(ASKED, self.tokens, strict=True)
            await asyncio.gather(*(self._ask(client, asked, tokens) for asked, tokens in pairs))

    async def _ask(self, client: AsyncClient, asked: Asked, tokens: list[int]) -> None:
        temperature, seed = asked.sampling.temperature, asked.sampling.seed
        stream = client.generate(
            asked.prompt,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            model=asked.adapter,
            temperature=temperature,
            seed=seed,
        )
        async for chunk in stream:
            if chunk.token_ids:
                assert chunk.offset == len(tokens), "lost or repeated"
                tokens += chunk.token_ids
        assert stream.timing is not None
        self.attempts += stream.timing.attempts


def expected(adapters: Sequence[str]) -> list[list[int]]:
    """Tokens of an engine in this process, of which each request has the whole batch's blocks."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    jobs = [
        Job(tokenizer.encode(it.prompt).ids, MAX_TOKENS, it.sampling, it.adapter) for it in ASKED
    ]
    engine = TorchEngine(DEMO_MODEL, 2000, adapters=tuple(adapters))
    engine._eos = frozenset()
    return engine.serve(jobs)


async def test_killed_processes_keep_adapters_apart(tmp_path: Path) -> None:
    adapters = tuple(
        f"{name}={write_adapter(tmp_path / name, DEMO_MODEL, seed=rank, rank=rank)}"
        for rank, name in enumerate(NAMES[1:], 7)
    )
    threads = torch.get_num_threads()
    wanted = expected(adapters)
    torch.set_num_threads(threads)
    for first in range(0, REQUESTS, len(NAMES)):
        assert len({*map(tuple, wanted[first : first + len(NAMES)])}) == len(NAMES)
    async with running(config(tmp_path, adapters)) as cluster:
        for kill in range(KILLS):
            run = Run(cluster)
            await run.begun()
            await cluster.kill_worker(kill % 2)
            assert await run.finished() == wanted
            assert run.attempts > REQUESTS
            await cluster.restart_worker(kill % 2)
        assert (await cluster.status()).preempted > 0
        run = Run(cluster)
        await run.begun()
        await cluster.kill_router(0)
        assert await run.finished() == wanted
