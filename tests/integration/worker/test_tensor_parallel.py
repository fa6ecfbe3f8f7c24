"""Tensor-parallel ranks in processes: tokens and logits of one rank, with a share of the model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.example_counts import long
from tests.support.router.session_support import Router
from tests.support.worker.decoder_steps import SteppedDecoder
from tests.support.worker.families import CHECKPOINTS, save_family
from tests.support.worker.llama_support import SIZES, save_llama
from tests.support.worker.peft_adapters import save_adapters
from tests.support.worker.tensor_parallel_rank import (
    MAX_POSITION,
    adapted_logits,
    parameter_bytes,
    steps,
)
from tests.support.worker.tensor_parallel_worker import NUM_BLOCKS, build_ahead, config
from tests.support.worker.torch_engine import TorchEngine, greedy_jobs, starts
from worker.parallel.group import Group, create_store
from worker.serving.rank import Rank, RankFailed

ROOT = Path(__file__).parents[3]
#: Time limit of the ranks in seconds, including the start of Python.
TIMEOUT_S = 120
RANK, WORKER = (
    "tests.support.worker.tensor_parallel_rank",
    "tests.support.worker.tensor_parallel_worker",
)

MODELS: dict[str, dict[str, Any]] = {
    "as many KV heads as ranks": {"num_key_value_heads": 2},
    "more KV heads than ranks, biases": {
        "num_key_value_heads": 6,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "fewer KV heads than ranks, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
}
#: Families that are also tested in an engine.
SERVED = ("qwen2_moe, a dense layer", "olmoe, one KV head, clip, biases, normalised")


#: Families with adapters: biases, fused layers, norms after a branch, a mixture of experts.
ADAPTED = (
    "llama, biases, llama3 rope",
    "phi3, part of a head, long longrope",
    "gemma2, softcaps",
    "qwen2_moe, a dense layer",
)


@dataclass(frozen=True)
class Ranks:
    """Results of all ranks for all models, and rank 0's logits of all families."""

    models: dict[str, str]
    families: dict[str, str]
    adapters: dict[str, list[str]]
    results: list[dict[str, Any]]
    logits: Path

    @property
    def size(self) -> int:
        return len(self.results)


def prompts() -> list[list[int]]:
    rng = Random(2)
    lengths = (1, 2, 31, 32, 33, 64, 90, 120, 15, 70)
    return [[rng.randrange(6, SIZES["vocab_size"]) for _ in range(n)] for n in lengths]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, True), id="2 ranks"),
        pytest.param((2, False), id="2 ranks over gloo", marks=pytest.mark.long),
        pytest.param((4, True), id="4 ranks", marks=pytest.mark.long),
    ],
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    root, logits = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("logits")
    models = {
        name: str(save_llama(root / f"model {i}", **overrides))
        for i, (name, overrides) in enumerate(MODELS.items())
    }
    families = {
        name: str(save_family(root / f"family {i}", checkpoint))
        for i, (name, checkpoint) in enumerate(CHECKPOINTS.items())
    }
    models |= {name: families[name] for name in SERVED}
    adapters = {
        name: save_adapters(root / "adapters" / name, Path(families[name]), CHECKPOINTS[name])
        for name in ADAPTED
    }
    size, shares_memory = request.param
    task = {
        "models": [*models.values()],
        "families": [*families.values()],
        "adapted": {families[name]: texts for name, texts in adapters.items()},
        "logits": str(logits),
        "shares_memory": shares_memory,
    }
    return Ranks(models, families, adapters, run_ranks(task, size), logits)


def run_ranks(work: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Run a process for each rank to its end; return their results."""
    _store, address = create_store()
    with ExitStack() as running:
        processes = []
        for rank in range(size):
            task = work | {
                "store": address,
                "rank": rank,
                "size": size,
                "prompts": prompts(),
            }
            processes.append(running.enter_context(rank_process(RANK, json.dumps(task))))
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return [json.loads(output) for output in outputs]


@contextmanager
def rank_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``python -m`` with ``arguments``, and kill it on exit if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'proto'}:{ROOT}", "OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("model", [*MODELS, *SERVED])
def test_tensor_parallel_tokens_equal_those_of_one_rank(model: str, ranks: Ranks) -> None:
    directory = ranks.models[model]
    alone = TorchEngine(Path(directory), NUM_BLOCKS).serve(greedy_jobs(prompts(), 24))
    for result in ranks.results:
        assert result["outputs"][directory] == alone
        assert result["ahead"][directory] == alone


def test_ranks_agree_on_sampling_launched_ahead(ranks: Ranks) -> None:
    step_by_step, ahead = ranks.results[0]["sampled"]
    assert step_by_step == ahead
    assert all(result["sampled"] == [ahead, ahead] for result in ranks.results)


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_tensor_parallel_logits_match_those_of_one_rank(family: str, ranks: Ranks) -> None:
    directory = Path(ranks.families[family])
    alone = SteppedDecoder(directory, MAX_POSITION).logits(prompts(), steps(prompts()))
    assert_logits_match(load_file(ranks.logits / directory.name), alone)


@pytest.mark.parametrize("family", ADAPTED)
def test_adapted_logits_of_ranks_match_those_of_one(family: str, ranks: Ranks) -> None:
    directory = Path(ranks.families[family])
    texts = ranks.adapters[family]
    alone = adapted_logits(directory, prompts(), Group.single(), texts)
    assert_logits_match(load_file(ranks.logits / f"{directory.name}.adapted"), alone)


def assert_logits_match(together: dict[str, Tensor], alone: list[Tensor] | None) -> None:
    assert alone is not None
    for i, logits in enumerate(alone):
        # Logits of 10 are 1.0e-4 to 1.7e-4 from their fp64 values, here and in transformers.
        atol = max(1e-4, 2e-5 * float(logits.abs().max()))
        torch.testing.assert_close(together[str(i)], logits, atol=atol, rtol=0)


@pytest.mark.parametrize("model", [*MODELS, *CHECKPOINTS])
def test_rank_holds_its_share_of_the_parameters(model: str, ranks: Ranks) -> None:
    directory = (ranks.models | ranks.families)[model]
    whole = parameter_bytes(directory, Group.single())
    held = [result["parameter_bytes"][directory] for result in ranks.results]
    assert sum(held) >= whole
    # Norms and shared KV heads are replicated. If heads do not divide evenly, one rank has more.
    assert max(held) < {2: 0.58, 4: 0.35}[ranks.size] * whole


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank 0 launch its steps ahead, as rank 1 does."""
    monkeypatch.setattr("worker.runner.build.build_runner", build_ahead)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(
    "shortage", [long(()), ("37",)], ids=["", "though one lacks memory at times"]
)
async def test_worker_of_two_ranks_serves_the_tokens_of_one_rank(
    shortage: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(save_llama(tmp_path))
    jobs = greedy_jobs(prompts(), 24)
    alone = TorchEngine(tmp_path, NUM_BLOCKS).serve(jobs)
    rank = Rank(config(model))
    with rank_process(WORKER, model, await rank.open(), str(os.getpid()), *shortage) as other:
        try:
            router = Router((await rank.start()).address)
            await router.hello(*starts(jobs, stop_token_ids=[SIZES["eos_token_id"]]))
            await router.until(lambda: len(router.stops) == len(jobs), TIMEOUT_S)
            await router.close()
        finally:
            await rank.stop()
        assert await asyncio.to_thread(other.wait, TIMEOUT_S) == 0
    assert [router.tokens[epoch] for epoch in range(1, len(jobs) + 1)] == alone
    assert router.state.preemptions > 0
    assert ("out of memory" in caplog.messages) == bool(shortage)


@pytest.mark.usefixtures("ahead")
async def test_rank_killed_in_a_step_fails_the_worker_with_the_cause(tmp_path: Path) -> None:
    model = str(save_llama(tmp_path))
    rank = Rank(config(model))
    with rank_process(WORKER, model, await rank.open(), str(os.getpid())) as other:
        try:
            router = Router((await rank.start()).address)
            await router.hello(*starts(greedy_jobs(prompts(), 90), stop_token_ids=[]))
            await router.until(lambda: router.tokens.get(1), TIMEOUT_S)
            other.kill()
            async with asyncio.timeout(30.0):
                with pytest.raises(RankFailed, match="rank 1 is gone"):
                    await rank.wait()
            await router.close()
        finally:
            await rank.stop()
