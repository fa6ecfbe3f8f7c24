"""Two ranks in processes of their own, over gloo: the tokens of one, half of the model each."""

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

from tests.llama_support import SIZES, save_llama
from tests.session_support import Router
from tests.tensor_parallel_rank import LOOPBACK, parameter_bytes
from tests.tensor_parallel_worker import NUM_BLOCKS, config
from tests.torch_engine import TorchEngine, greedy_jobs, starts
from worker.parallel import Group, create_store
from worker.rank import Rank

ROOT = Path(__file__).parents[2]
#: How long two ranks may take for everything, starting python included.
PATIENCE_S = 120
RANK, WORKER = "tests.tensor_parallel_rank", "tests.tensor_parallel_worker"

MODELS: dict[str, dict[str, Any]] = {
    "as many KV heads as ranks": {"num_key_value_heads": 2},
    "more KV heads than ranks, biases": {
        "num_key_value_heads": 6,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "fewer KV heads than ranks, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
}
#: 127.0.0.2 as /proc/net/tcp writes it.
SECOND = "0200007F"


@dataclass(frozen=True)
class Ranks:
    """What both ranks said about all models."""

    directories: dict[str, str]
    results: list[dict[str, Any]]


def prompts() -> list[list[int]]:
    rng = Random(2)
    lengths = (1, 2, 31, 32, 33, 64, 90, 120, 15, 70)
    return [[rng.randrange(6, SIZES["vocab_size"]) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    root = tmp_path_factory.mktemp("models")
    directories = {
        name: str(save_llama(root / str(i), **overrides))
        for i, (name, overrides) in enumerate(MODELS.items())
    }
    return Ranks(directories, run_ranks([*directories.values()], ["127.0.0.1", "127.0.0.2"]))


def run_ranks(models: list[str], hosts: list[str]) -> list[dict[str, Any]]:
    """One process for each of ``hosts``, to its end."""
    _store, address = create_store()
    with ExitStack() as running:
        processes = []
        for rank, host in enumerate(hosts):
            task = {
                "store": address,
                "rank": rank,
                "size": len(hosts),
                "host": host,
                "models": models,
                "prompts": prompts(),
            }
            processes.append(running.enter_context(rank_process(RANK, json.dumps(task))))
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return [json.loads(output) for output in outputs]


@contextmanager
def rank_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``python -m`` with ``arguments``; killed at the latest at the end."""
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


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_make_the_tokens_of_one(model: str, ranks: Ranks) -> None:
    directory = ranks.directories[model]
    alone = TorchEngine(Path(directory), NUM_BLOCKS).serve(greedy_jobs(prompts(), 24))
    for result in ranks.results:
        assert result["outputs"][directory] == alone


@pytest.mark.parametrize("model", MODELS)
def test_a_rank_of_two_holds_about_half_of_the_parameters(model: str, ranks: Ranks) -> None:
    directory = ranks.directories[model]
    whole = parameter_bytes(directory, Group.single())
    for result in ranks.results:
        # Norms, and a KV head that both need, are held twice.
        assert whole / 2 <= result["parameter_bytes"][directory] < 0.56 * whole


def test_a_rank_listens_on_its_own_address_only(ranks: Ranks) -> None:
    assert [result["listening"] for result in ranks.results] == [[LOOPBACK], [SECOND]]


async def test_a_worker_of_two_ranks_serves_the_tokens_of_one(tmp_path: Path) -> None:
    model = str(save_llama(tmp_path))
    jobs = greedy_jobs(prompts(), 24)
    alone = TorchEngine(tmp_path, NUM_BLOCKS).serve(jobs)
    rank = Rank(config(model))
    with rank_process(WORKER, model, await rank.open(), str(os.getpid())) as other:
        try:
            router = Router((await rank.start()).address)
            await router.hello(*starts(jobs, stop_token_ids=[SIZES["eos_token_id"]]))
            await router.until(lambda: len(router.stops) == len(jobs), PATIENCE_S)
            await router.close()
        finally:
            await rank.stop()
        assert await asyncio.to_thread(other.wait, PATIENCE_S) == 0
    assert [router.tokens[epoch] for epoch in range(1, len(jobs) + 1)] == alone
    assert router.state.preemptions > 0
