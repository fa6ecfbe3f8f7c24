"""Tokens of the engine on a GPU, if there is one, equal those on a CPU.

Decoding is replayed or launched kernel by kernel, and unwritten blocks have any content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from everlift.sampling import SamplingParams
from tests.support.worker.llama_support import SIZES, load_llama, save_llama
from tests.support.worker.no_waits import no_waits
from tests.support.worker.torch_engine import Job, TorchEngine, greedy_jobs, served_ahead
from worker.config import WorkerConfig
from worker.device.upload import Parcel
from worker.engine.plan import Row, Rows
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.runner import TorchRunner

DEVICE = "cuda"
DEMO_MODEL = Path(__file__).parents[3] / "cluster" / "demo_model"
PLENTY, FEW = 200, 18
DRAWN = SamplingParams(top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, min_tokens=3)
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    # This includes the compilation of kernels.
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    rng = Random(4)
    lengths = (33, 2, 20, 64, 7, 100)
    prompts = [[rng.randrange(6, SIZES["vocab_size"]) for _ in range(n)] for n in lengths]
    return greedy_jobs(prompts, max_tokens=60)


@pytest.fixture(scope="module")
def expected(directory: Path, jobs: list[Job]) -> list[list[int]]:
    return TorchEngine(directory, PLENTY).serve(jobs)


def runner_on_gpu(directory: Path, dtype: str, num_blocks: int = PLENTY) -> TorchRunner:
    return build_runner(config(directory, dtype, num_blocks), Group.single())


def config(directory: Path, dtype: str, num_blocks: int) -> WorkerConfig:
    return WorkerConfig(
        model=str(directory),
        device=DEVICE,
        dtype=dtype,
        num_blocks=num_blocks,
        max_num_seqs=16,
        max_num_batched_tokens=48,
    )


def serve(runner: TorchRunner, directory: Path, jobs: Sequence[Job]) -> list[list[int]]:
    same = config(directory, "float32", runner.num_blocks)
    return served_ahead(runner, same, jobs, [SIZES["eos_token_id"]])


@pytest.mark.parametrize("num_blocks", [PLENTY, FEW])
@pytest.mark.parametrize("replays", [True, False])
def test_gpu_tokens_equal_cpu_tokens(
    directory: Path,
    jobs: list[Job],
    expected: list[list[int]],
    replays: bool,
    num_blocks: int,
) -> None:
    runner = runner_on_gpu(directory, "float32", num_blocks)
    if not replays:
        runner._graphs = None
    assert serve(runner, directory, jobs) == expected


def test_unwritten_cache_blocks_do_not_affect_tokens(
    directory: Path, jobs: list[Job], expected: list[list[int]]
) -> None:
    runner = runner_on_gpu(directory, "float32", FEW)
    runner._cache.tensor.fill_(torch.nan)
    assert serve(runner, directory, jobs) == expected


def test_gpu_steps_never_synchronise_with_the_device(directory: Path, jobs: list[Job]) -> None:
    """The tokens of the previous step are awaited by an event, which torch does not count."""
    runner = runner_on_gpu(directory, "float32", FEW)
    with no_waits():
        serve(runner, directory, [*jobs[:3], *(replace(job, sampling=DRAWN) for job in jobs[3:])])


def test_gpu_bfloat16_logits_are_near_float32() -> None:
    """The reference is transformers on a CPU, with the same trained weights."""
    runner = runner_on_gpu(DEMO_MODEL, "bfloat16")
    model = load_llama(DEMO_MODEL).bfloat16().float()
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    for count in (1, 20, 60):
        prompt = tokenizer.encode(f"count from {count} to {2 * count}:" + " 17" * count).ids
        logits = last_logits(runner, prompt)
        with torch.inference_mode():
            right = model(torch.tensor([prompt])).logits[0, -1]
        # A NaN fails this comparison.
        assert (logits - right).norm() <= 0.02 * right.norm()


@torch.inference_mode()
def last_logits(runner: TorchRunner, prompt: Sequence[int]) -> Tensor:
    """Return the logits after ``prompt``, [vocab]."""
    rows = Rows.of([Row(0, tuple(prompt), 0, tuple(range(9, 0, -1)), True)])
    logits = runner._model.logits(
        runner._forward(rows, np.array([len(prompt) - 1]), Parcel(runner.device))
    )
    assert logits is not None
    return logits[0].cpu()
