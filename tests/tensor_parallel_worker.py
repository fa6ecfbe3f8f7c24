"""Rank 1 of a worker of two over a real model: MODEL, RENDEZVOUS and the starter's process id."""

from __future__ import annotations

import asyncio
import sys

from worker.config import WorkerConfig
from worker.parent import die_with_parent
from worker.rank import Rank

#: Fewer than the test's sequences grow into, enough for each alone.
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
    )


async def main(model: str, rendezvous: str) -> None:
    rank = Rank(config(model), 1, rendezvous)
    await rank.start()
    await rank.wait()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    asyncio.run(main(*sys.argv[1:3]))
