"""Termination of vLLM's processes when their rank ends, without leaving shared memory behind."""

from __future__ import annotations

import os
from multiprocessing import parent_process
from pathlib import Path

from worker.child_process import die_with_parent

_SHARED_MEMORY = "/dev/shm"
#: Beginning of the names of segments for collective operations on CPUs.
_SEGMENT = "vllm_dist_"
#: Beginning of the name of the segment by which Intel's OpenMP finds a second copy of itself.
_OPENMP_SEGMENT = "__KMP_REGISTERED_LIB_"


def end_with_rank() -> None:
    """Have the kernel kill this process when the rank's process or its engine thread ends.

    vLLM's own processes notice the end of a pipe, but only once the model is loaded, and not in the
    middle of a collective operation. Does nothing in the rank's process.
    """
    parent = parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)


def unlink_segments() -> None:
    """Remove the names of the shared-memory segments that vLLM and OpenMP opened in this process.

    Call this function only after all processes that share the segments have opened them. A segment
    that keeps its name would remain after all these processes have been killed.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, found, name = line.partition(f"{_SHARED_MEMORY}/{_SEGMENT}")
        if found:
            Path(found + name).unlink(missing_ok=True)
    own = f"{_OPENMP_SEGMENT}{os.getpid()}_{os.getuid()}"
    Path(_SHARED_MEMORY, own).unlink(missing_ok=True)
