"""How fast this machine's cores read memory together: the bound of a sequence that decodes alone.

    python -m tests.perf.bandwidth THREADS

prints the bytes per second of the best of several passes over 1 GiB.
"""

from __future__ import annotations

import subprocess
import sys
import time

_BYTES = 1 << 30
_PASSES = 20


def measured(threads: int) -> float:
    """Bytes per second, in a process of its own, as torch's threads cannot be had otherwise."""
    command = [sys.executable, "-m", "tests.perf.bandwidth", str(threads)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def _read(threads: int) -> float:
    import torch

    torch.set_num_threads(threads)
    numbers = torch.ones(_BYTES // 4)
    seconds = []
    for _ in range(_PASSES):
        began = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - began)
    return _BYTES / min(seconds)


if __name__ == "__main__":
    print(_read(int(sys.argv[1])))
