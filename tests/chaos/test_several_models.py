"""Two models with two adapters each, whose processes are killed: their outputs stay separate."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from cluster.config import DEMO_MODEL, Config
from cluster.groups import ModelGroup
from everlift.sampling import SamplingParams
from router.config import RouterConfig
from tests.chaos.support import ROUTER, running
from tests.chaos.test_adapters import BEGINNING, MAX_TOKENS, Run
from tests.support.worker.lora_files import write_adapter
from tests.support.worker.torch_engine import Job, TorchEngine
from worker.config import WorkerConfig

REQUESTS = 48
#: Names that requests use, with the name of the adapter or "", by the model's directory name.
NAMES: Mapping[str, Mapping[str, str]] = {
    DEMO_MODEL.name: {"": "", "a": "a", "b": "b"},
    "other": {"other": "", "c": "c", "d": "d"},
}
ALL = [name for names in NAMES.values() for name in names]


@dataclass(frozen=True)
class Asked:
    """Numbered request; ``adapter`` is its name of the model or adapter."""

    number: int

    @property
    def prompt(self) -> str:
        return f"{BEGINNING}count from {self.number // len(ALL)} to 400:"

    @property
    def adapter(self) -> str:
        return ALL[self.number % len(ALL)]

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=float(self.number % 12 < 6), seed=self.number)


ASKED = [Asked(number) for number in range(REQUESTS)]


def perturbed(directory: Path) -> Path:
    """Write the demo model with perturbed weights, which generates other tokens."""
    shutil.copytree(DEMO_MODEL, directory)
    [path] = directory.glob("*.safetensors")
    tensors, noise = load_file(path), torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        tensor += 0.3 * tensor.std() * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
    save_file(tensors, path, {"format": "pt"})
    return directory


def expected(model: Path, adapters: Iterable[str]) -> dict[int, list[int]]:
    """Return the tokens of one model's requests by number, from an engine in this process."""
    names = NAMES[model.name]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    asked = [it for it in ASKED if it.adapter in names]
    jobs = [
        Job(tokenizer.encode(it.prompt).ids, MAX_TOKENS, it.sampling, names[it.adapter])
        for it in asked
    ]
    engine = TorchEngine(model, 2000, adapters=tuple(adapters))
    engine._eos = frozenset()
    return dict(zip((it.number for it in asked), engine.serve(jobs), strict=True))


@pytest.mark.long
async def test_killed_processes_keep_models_apart(tmp_path: Path) -> None:
    models = {DEMO_MODEL.name: DEMO_MODEL, "other": perturbed(tmp_path / "other")}
    adapters = {
        model: tuple(
            f"{name}={write_adapter(tmp_path / name, models[model], seed=rank, rank=rank)}"
            for rank, name in enumerate(filter(None, names.values()), 7)
        )
        for model, names in NAMES.items()
    }
    threads = torch.get_num_threads()
    tokens = {}
    for model, directory in models.items():
        tokens |= expected(directory, adapters[model])
    wanted = [tokens[it.number] for it in ASKED]
    torch.set_num_threads(threads)
    for first in range(0, REQUESTS, len(ALL)):
        assert len({*map(tuple, wanted[first : first + len(ALL)])}) == len(ALL)
    worker = WorkerConfig(
        dtype="float32",
        max_num_seqs=16,
        # Too few blocks for all sequences of a worker: some are preempted.
        num_blocks=90,
        max_num_batched_tokens=64,
        num_threads=1,
    )
    config = Config(
        model=str(DEMO_MODEL),
        adapters=adapters[DEMO_MODEL.name],
        num_routers=2,
        num_workers=2,
        state_dir=tmp_path / "state",
        router=RouterConfig(**ROUTER),
        worker=worker,
        models={
            "other": ModelGroup(str(models["other"]), adapters=adapters["other"], worker=worker)
        },
    )
    async with running(config) as cluster:
        # First the only worker of the second model, then one of the two of the first.
        for killed in (2, 0):
            run = Run(cluster, ASKED)
            await run.begun()
            await cluster.kill_worker(killed)
            await cluster.restart_worker(killed)
            assert await run.finished() == wanted
            assert run.attempts > REQUESTS
        run = Run(cluster, ASKED)
        await run.begun()
        await cluster.kill_router(0)
        assert await run.finished() == wanted
