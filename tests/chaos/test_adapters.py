"""LoRA adapters of real workers that die: no token is lost, repeated or another adapter's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from cluster.config import DEMO_MODEL, Config
from everlift.client.client import AsyncClient
from everlift.errors import NoWorker, UnknownWorker
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
    names: Sequence[str] = NAMES

    @property
    def prompt(self) -> str:
        return f"{BEGINNING}count from {self.number // len(self.names)} to 400:"

    @property
    def adapter(self) -> str:
        return self.names[self.number % len(self.names)]

    @property
    def sampling(self) -> SamplingParams:
        """Half of the requests are greedy."""
        return SamplingParams(temperature=float(self.number % 8 < 4), seed=self.number)


ASKED = [Asked(number) for number in range(REQUESTS)]
#: More adapters than fit into a worker's memory.
LOADED = ("", "a", "b", "c", "d")
ASKED_OF_LOADED = [Asked(number, LOADED) for number in range(45)]


def config(tmp_path: Path, adapters: tuple[str, ...], **settings: Any) -> Config:
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
            **settings,
        ),
    )


class Run:
    """All requests at the same time, their tokens so far, and how many attempts they took."""

    def __init__(self, cluster: Cluster, asked: Sequence[Asked] = ASKED) -> None:
        self._asked = asked
        self.tokens: list[list[int]] = [[] for _ in asked]
        self.attempts = 0
        self._task = asyncio.create_task(self._follow(cluster))

    async def begun(self) -> None:
        await until(lambda: sum(len(tokens) > 20 for tokens in self.tokens) > len(self._asked) // 4)
        assert not self._task.done()

    async def finished(self) -> list[list[int]]:
        await self._task
        return self.tokens

    async def _follow(self, cluster: Cluster) -> None:
        async with patient.client(cluster.addresses) as client:
            pairs = zip(self._asked, self.tokens, strict=True)
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


def expected(
    adapters: Sequence[str], asked: Sequence[Asked] = ASKED, **other: str
) -> list[list[int]]:
    """Tokens of an engine in this process, of which each request has the whole batch's blocks.

    ``other`` has adapters that take the place of those of the requests.
    """
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    jobs = [
        Job(
            tokenizer.encode(it.prompt).ids,
            MAX_TOKENS,
            it.sampling,
            other.get(it.adapter, it.adapter),
        )
        for it in asked
    ]
    engine = TorchEngine(DEMO_MODEL, 2000, adapters=tuple(adapters))
    engine._eos = frozenset()
    return engine.serve(jobs)


@pytest.mark.long
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


class Churn:
    """Loads and unloads of an adapter that no request names, until ``end``."""

    def __init__(self, addresses: Sequence[str], directories: Sequence[Path]) -> None:
        self.loads = 0
        self._task = asyncio.create_task(self._run(addresses, directories))

    async def _run(self, addresses: Sequence[str], directories: Sequence[Path]) -> None:
        async with patient.client(addresses) as client:
            while True:
                with suppress(NoWorker, UnknownWorker):
                    await client.load_adapter("x", str(directories[self.loads % 2]))
                    self.loads += 1
                    if self.loads % 3 == 0:
                        await client.unload_adapter("x")
                await asyncio.sleep(0.2)

    async def end(self) -> None:
        assert not self._task.done() and self.loads > 3
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.mark.long
async def test_loads_and_kills_keep_versions_apart(tmp_path: Path) -> None:
    """Two slots a worker for five versions, of which one replaces another in the middle."""
    directories = {
        name: write_adapter(tmp_path / name, DEMO_MODEL, seed=rank, rank=rank)
        for rank, name in enumerate(("a", "b", "c", "d", "e", "f"), 7)
    }
    texts = [f"{name}={directory}" for name, directory in directories.items()]
    threads = torch.get_num_threads()
    wanted = expected(texts, ASKED_OF_LOADED)
    newer = expected(texts, ASKED_OF_LOADED, d="e")
    torch.set_num_threads(threads)
    settings = {"max_loaded_adapters": 2, "adapter_dir": str(tmp_path)}
    async with running(config(tmp_path, (), **settings)) as cluster:
        async with patient.client(cluster.addresses) as client:
            for name in LOADED[1:]:
                await client.load_adapter(name, str(directories[name]))
            churn = Churn(cluster.addresses, [directories["e"], directories["f"]])
            for kill in range(KILLS):
                run = Run(cluster, ASKED_OF_LOADED)
                await run.begun()
                begun = [len(tokens) > 0 for tokens in run.tokens]
                await client.load_adapter("d", str(directories["e"]))
                await cluster.kill_worker(kill % 2)
                for got, old, new, has_begun in zip(
                    await run.finished(), wanted, newer, begun, strict=True
                ):
                    assert got == old or (got == new and not has_begun)
                assert run.attempts > len(ASKED_OF_LOADED)
                await cluster.restart_worker(kill % 2)
                again = Run(cluster, ASKED_OF_LOADED)
                assert await again.finished() == newer
                await client.load_adapter("d", str(directories["d"]))
            await churn.end()
