"""CPU threads of a rank, and the environment that has to be in force before torch is imported."""

from __future__ import annotations

import os
import sys

from cluster.config import Config
from everlift import logs

log = logs.get_logger(__name__)

_WAIT_POLICY = "OMP_WAIT_POLICY"
#: Threads that wait sleep, but before they do they look for work so often (GCC's OpenMP): for some
#: microseconds, which two operations of a step take. make bench-threads: what that gains and costs.
WAITING = {_WAIT_POLICY: "PASSIVE", "GOMP_SPINCOUNT": "500"}


def threads_per_rank(config: Config, cores: int) -> int:
    """Return the configured threads of a rank, else an equal share of ``cores``."""
    ranks = config.most_workers * config.worker.tensor_parallel
    return config.worker.num_threads or max(1, cores // ranks)


def rank_environment(threads: int) -> dict[str, str]:
    """Return the environment of a rank's process.

    A spinning OpenMP thread would take cores from all other processes, and numpy's own threads
    would prevent forking.
    """
    return {
        **WAITING,
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
    }


def wait_passively() -> None:
    """Let the threads of a rank in this process wait as those of a rank in its own do.

    Who has set something has decided. OpenMP reads it once, when torch is imported: where that is
    done nothing can be changed any more, only said.
    """
    policy = os.environ.get(_WAIT_POLICY)
    if policy not in (None, WAITING[_WAIT_POLICY]):
        return
    if policy is None and "torch" in sys.modules:
        log.warning(
            f"torch was imported without {_WAIT_POLICY}=PASSIVE: on a CPU that others use, too, "
            "every token may take twice as long"
        )
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)
