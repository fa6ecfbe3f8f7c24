"""CPU threads of a rank, and environment variables to set before torch is imported.

A rank is one of the processes of a worker.
"""

from __future__ import annotations

import os
import sys

from cluster.config import Config
from everlift import logs

log = logs.get_logger(__name__)

_WAIT_POLICY = "OMP_WAIT_POLICY"
#: Idle threads poll for work this number of times before they sleep (GCC's OpenMP). This takes some
#: microseconds, about as long as two operations of a step. `make bench-threads` measures what it
#: gains and costs.
WAITING = {_WAIT_POLICY: "PASSIVE", "GOMP_SPINCOUNT": "500"}


def threads_per_rank(config: Config, cores: int) -> int:
    """Return the number of CPU threads of a rank: ``worker.num_threads`` if it is set.

    Otherwise it is ``cores`` divided by the number of ranks when the cluster has its maximum number
    of workers, rounded down, and at least 1.
    """
    ranks = config.most_workers * config.worker.tensor_parallel
    return config.worker.num_threads or max(1, cores // ranks)


def rank_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a rank's process.

    They set the number of OpenMP's threads to ``threads``. They let these threads spin only briefly
    while they wait, because spinning takes cores from all other processes. They keep numpy from
    starting threads of its own, which would prevent forking.
    """
    return {
        **WAITING,
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
    }


def wait_passively() -> None:
    """Set the environment variables ``WAITING`` in this process, which will itself run a rank.

    Variables that are already set keep their values. If OMP_WAIT_POLICY has a value other than
    PASSIVE, no variable is set. OpenMP reads them only once, when torch is imported. If torch has
    been imported and OMP_WAIT_POLICY is not set, they have no effect and a warning is logged.
    """
    policy = os.environ.get(_WAIT_POLICY)
    if policy not in (None, WAITING[_WAIT_POLICY]):
        return
    if policy is None and "torch" in sys.modules:
        log.warning(
            f"torch was imported without {_WAIT_POLICY}=PASSIVE: if other processes use the CPU, "
            "each token may take twice as long"
        )
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)
