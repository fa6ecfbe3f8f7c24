"""Rank 1 of a two-rank worker over a real model, which launches steps ahead as on a GPU.

Arguments: MODEL, RENDEZVOUS, the launcher's process id, and optionally the period of sums that run
out of memory.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import count
from typing import Any

import torch
from torch import Tensor

from worker.child_process import die_with_parent
from worker.config import WorkerConfig
from worker.engine.step_times import Stopwatch
from worker.model.layers import RowLinear
from worker.parallel.group import Group
from worker.runner import build
from worker.runner.runner import TorchRunner
from worker.runner.sampled_tokens import LastTokens
from worker.serving.rank import Rank

#: Fewer blocks than the test's sequences grow into, but enough for each alone.
NUM_BLOCKS = 9


def config(model: str) -> WorkerConfig:
    return WorkerConfig(
        model=model,
        device="cpu",
        dtype="float32",
        num_threads=1,
        num_blocks=NUM_BLOCKS,
        tensor_parallel=2,
        max_num_seqs=16,
        max_num_batched_tokens=48,
        max_loaded_adapters=2,
        # On a busy machine a rank may lack a core for seconds.
        rank_silence=20.0,
    )


def build_ahead(config: WorkerConfig, group: Group, stopwatch: Stopwatch) -> TorchRunner:
    """Replacement of build_runner whose steps are launched ahead."""
    runner = BUILD_RUNNER(config, group, stopwatch)
    runner._last_tokens = LastTokens(config.max_num_seqs, runner.device)
    return runner


BUILD_RUNNER = build.build_runner


def lack_memory(every: int) -> None:
    """Let every ``every``-th sum of more than one token run out of memory.

    Layers run one by one, as on a GPU.
    """
    compute, sums = RowLinear.__call__, count(1)

    def computed(linear: RowLinear, x: Tensor, *adapters: Any) -> Tensor:
        if len(x) > 1 and next(sums) % every == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(linear, x, *adapters)

    build.choose_stack = lambda plain, *_: plain
    RowLinear.__call__ = computed  # type: ignore[assignment, method-assign]


async def main(model: str, rendezvous: str) -> None:
    build.build_runner = build_ahead
    rank = Rank(config(model), 1, rendezvous)
    await rank.start()
    await rank.wait()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    if len(sys.argv) > 4:
        lack_memory(int(sys.argv[4]))
    asyncio.run(main(*sys.argv[1:3]))
