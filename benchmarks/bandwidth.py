"""Memory bandwidth of this machine's cores, which bounds the decoding of a single sequence.

    python -m benchmarks.bandwidth THREADS

prints the bytes per second of several passes over 1 GiB: the median, and the best. If others use
the same machine, the best may briefly be twice the median.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import NamedTuple

_BYTES = 1 << 30
_PASSES = 20


class Bandwidth(NamedTuple):
    """Bytes per second."""

    median: float
    best: float


def measured(threads: int) -> Bandwidth:
    """Measure in a new process, because torch's number of threads is set once per process."""
    command = [sys.executable, "-m", "benchmarks.bandwidth", str(threads)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return Bandwidth(*map(float, printed.split()))


def _read(threads: int) -> Bandwidth:
    import torch

    torch.set_num_threads(threads)
    numbers = torch.ones(_BYTES // 4)
    seconds = []
    for _ in range(_PASSES):
        began = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - began)
    return Bandwidth(_BYTES / statistics.median(seconds), _BYTES / min(seconds))


if __name__ == "__main__":
    print(*_read(int(sys.argv[1])))
