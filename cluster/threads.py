"""CPU threads of a rank, and the environment that has to be in force before torch is imported."""

from __future__ import annotations

import os

from cluster.config import Config

_WAIT_POLICY = "OMP_WAIT_POLICY"


def threads_per_rank(config: Config, cores: int) -> int:
    """What is configured, else an equal share of ``cores`` for every rank that there may be."""
    ranks = config.most_workers * config.worker.tensor_parallel
    return config.worker.num_threads or max(1, cores // ranks)


def rank_environment(threads: int) -> dict[str, str]:
    """A waiting OpenMP thread that spins would take the cores of everybody else there. numpy's own
    threads, which begin with its import, would do nothing but be in the way of a fork."""
    return {
        _WAIT_POLICY: "PASSIVE",
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
    }


def wait_passively() -> None:
    """The same for a rank in this process. Who has set it, or imported torch, has decided."""
    os.environ.setdefault(_WAIT_POLICY, "PASSIVE")
