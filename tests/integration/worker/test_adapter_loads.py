"""LoRA adapters that a running worker of one or two ranks loads and unloads."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from everlift.sampling import SamplingParams
from everlift.v1 import session_pb2, session_pb2_grpc
from tests.integration.worker.test_tensor_parallel import TIMEOUT_S, WORKER, rank_process
from tests.support.example_counts import long
from tests.support.router.session_support import Router
from tests.support.worker.llama_support import save_llama
from tests.support.worker.lora_files import write_adapter
from tests.support.worker.tensor_parallel_worker import build_ahead, config
from tests.support.worker.torch_engine import Job, TorchEngine, starts
from worker.model.adapters import read_adapters
from worker.serving.rank import Rank

NAMES = ("a", "b", "c", "d")
MAX_TOKENS = 20


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Files:
    """A model, and four adapters of different ranks."""

    def __init__(self, root: Path) -> None:
        self.root, self.model = root, save_llama(root / "model", num_key_value_heads=2)
        for seed, name in enumerate(NAMES):
            self.write(name, seed)

    def write(self, name: str, seed: int) -> None:
        write_adapter(self.root / name, self.model, seed=seed, rank=3 + 5 * (seed % 7), scale=3.0)

    def source(self, name: str) -> str:
        return f"{name}={self.root / name}"

    def digest(self, name: str) -> str:
        return read_adapters([self.source(name)], self.model)[0].digest

    def starts(self, jobs: list[Job], first: int = 1) -> list[session_pb2.Start]:
        messages = starts(jobs, [])
        for epoch, (job, message) in enumerate(zip(jobs, messages, strict=True), first):
            message.epoch = epoch
            if job.adapter:
                message.adapter_source = self.source(job.adapter)
                message.adapter_digest = self.digest(job.adapter)
        return messages

    def expected(self, jobs: list[Job]) -> list[list[int]]:
        """Return the tokens of an engine with all adapters in memory."""
        engine = TorchEngine(self.model, 200, adapters=tuple(map(self.source, NAMES)))
        engine._eos = frozenset()
        return engine.serve(jobs)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def jobs(names: tuple[str, ...] = ("", *NAMES), number: int = 15) -> list[Job]:
    return [
        Job(
            [5, 6, 7, 8 + i % 3] * 12,
            MAX_TOKENS,
            SamplingParams(temperature=float(i % 2), seed=i),
            names[i % len(names)],
        )
        for i in range(number)
    ]


@asynccontextmanager
async def worker(model: Path, ranks: int = 1, **settings: Any) -> AsyncIterator[tuple[Router, str]]:
    rank = Rank(replace(config(str(model)), tensor_parallel=ranks, **settings))
    other: Any = nullcontext()
    if ranks > 1:
        other = rank_process(WORKER, str(model), await rank.open(), str(os.getpid()))
    with other as process:
        try:
            address = (await rank.start()).address
            router = Router(address)
            await router.hello()
            yield router, address
            await router.close()
        finally:
            await rank.stop()
        if process is not None:
            assert await asyncio.to_thread(process.wait, TIMEOUT_S) == 0


def state(router: Router) -> session_pb2.LoadedAdapters:
    reported = [it for it in router.frames if it.HasField("loaded_adapters")]
    return reported[-1].loaded_adapters if reported else session_pb2.LoadedAdapters()


def loaded(router: Router) -> dict[str, int]:
    return {it.name: it.sequences for it in state(router).adapters if not it.loading}


@pytest.mark.parametrize("ranks", [long(1), 2])
async def test_worker_loads_more_adapters_than_it_has_slots(
    ranks: int, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ranks > 1:  # rank 1 launches its steps ahead too
        monkeypatch.setattr("worker.runner.build.build_runner", build_ahead)
    expected = files.expected(jobs())
    async with worker(files.model, ranks) as (router, _):
        await router.start(*files.starts(jobs()))
        await router.until(lambda: len(router.stops) == len(jobs()), TIMEOUT_S)
        await router.until(lambda: {*loaded(router).values()} == {0})
    assert [router.tokens[epoch] for epoch in range(1, len(jobs()) + 1)] == expected
    assert state(router).loads >= len(NAMES) and len(loaded(router)) == 2
    assert state(router).unloads == state(router).loads - 2 and state(router).load_s > 0
    first = {
        progress.epoch: progress
        for frame in router.frames
        for progress in frame.progress
        if progress.HasField("waited_s")
    }
    for epoch, job in enumerate(jobs(), 1):
        assert (first[epoch].adapter_s > 0) == bool(job.adapter)
        assert first[epoch].adapter_s <= first[epoch].waited_s + 0.01


async def test_running_sequence_keeps_its_version(files: Files) -> None:
    """The files of its adapter are replaced, and later sequences use the new ones."""
    old, other = Job([5, 6] * 20, 150, SamplingParams(), "a"), jobs(("a",), 3)
    [before] = files.expected([old])
    [begun] = files.starts([old])
    async with worker(files.model, num_blocks=100) as (router, _):
        await router.start(begun)
        await router.until(lambda: router.tokens.get(1), TIMEOUT_S)
        shutil.rmtree(files.root / "a")
        files.write("a", 77)
        await router.start(*files.starts(other, first=2))
        await router.ended(1, 2, 3, 4)
    assert router.tokens[1] == before
    assert [router.tokens[epoch] for epoch in (2, 3, 4)] == files.expected(other)


async def test_failed_load_ends_only_its_sequences(files: Files) -> None:
    [changed, missing, fine] = files.starts(jobs(("a", "b", "c"), 3))
    changed.adapter_digest = "another"
    shutil.rmtree(files.root / "b")
    async with worker(files.model) as (router, _):
        await router.start(changed, missing, fine)
        await router.ended(1, 2, 3)
        assert (router.stops[1], router.stops[2]) == ("FAILED", "FAILED")
        assert "have changed since the adapter was loaded: load it again" in router.errors[1]
        assert "adapter_config.json is missing" in router.errors[2]
        assert len(router.tokens[3]) == MAX_TOKENS
        assert loaded(router) == {"c": 0}


async def test_worker_preloads_and_unloads_on_command(files: Files) -> None:
    async with worker(files.model) as (router, _):
        load = session_pb2.AdapterLoad(source=files.source("a"), digest=files.digest("a"))
        await router.call.write(session_pb2.RouterFrame(preload_adapters=[load]))
        await router.until(lambda: loaded(router) == {"a": 0})
        await router.call.write(session_pb2.RouterFrame(unload_adapters=[load.digest]))
        await router.until(lambda: not state(router).adapters)
        assert (state(router).loads, state(router).unloads) == (1, 1)


async def check(address: str, source: str) -> session_pb2.CheckAdapterResponse:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = session_pb2_grpc.WorkerSessionStub(channel)
        request = session_pb2.CheckAdapterRequest(source=source)
        answer: session_pb2.CheckAdapterResponse = await stub.CheckAdapter(request)
        return answer


async def test_check_names_the_cause_of_a_refusal(files: Files, tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    allowed.mkdir()
    shutil.move(files.root / "a", allowed / "a")
    shutil.copytree(allowed / "a", outside)
    (allowed / "link").symlink_to(outside)
    other_model = save_llama(tmp_path / "other", hidden_size=40, num_attention_heads=4)
    write_adapter(allowed / "foreign", other_model, seed=1)
    write_adapter(allowed / "large", files.model, seed=1, rank=20)
    settings: dict[str, Any] = {"adapter_dir": str(allowed), "max_adapter_rank": 16}
    async with worker(files.model, **settings) as (_, address):
        fine = await check(address, f"x={allowed}/../allowed/a")
        assert (fine.source, fine.error) == (f"x={allowed / 'a'}", "")
        assert fine.digest == read_adapters([fine.source], files.model)[0].digest
        for source, cause in {
            f"x={outside}": "must be an absolute path below",
            f"x={allowed}/link": "must be an absolute path below",
            f"x={allowed}/../outside": "must be an absolute path below",
            f"x={allowed}/none": "no adapter at",
            f"x={allowed}/foreign": "made for another model",
            f"x={allowed}/large": "rank 20 is above worker.max_adapter_rank 16",
            "x": "must be NAME=DIRECTORY",
        }.items():
            assert cause in (await check(address, source)).error
    async with worker(files.model) as (_, address):
        assert "worker.adapter_dir is not set" in (await check(address, f"x={allowed}/a")).error
    async with worker(files.model, max_loaded_adapters=None) as (_, address):
        error = (await check(address, "x=org/adapter")).error
        assert error == "worker.max_loaded_adapters is not set: workers load no adapters"
