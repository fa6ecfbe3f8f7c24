"""How parts of bench-gpu take times, and at which sizes: in small on a CPU, just enough to see that
all of it works."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from worker.device.device import choose_device
from worker.runner.decode_graphs import CudaGraphs

DEVICE = choose_device("auto")
DTYPE = torch.bfloat16
IS_SMALL = DEVICE.type == "cpu"
BATCHES = (1, 4) if IS_SMALL else (1, 8, 64, 256)
CONTEXT = 40 if IS_SMALL else 1024
PREFILLS = (16, 60) if IS_SMALL else (1024, 8192)
ROUNDS = 2 if IS_SMALL else 5
#: Several times what a GPU's own cache holds of what a kernel reads.
COLD_BYTES = 0 if IS_SMALL else 256 << 20


def seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Of one, the median of some rounds, after a first that does not count."""
    times = []
    for _ in range(1 + ROUNDS):
        synchronise()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronise()
        times.append((time.perf_counter() - began) / repeats)
    return statistics.median(times[1:])


def synchronise() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def replayed_s(work: Callable[[], Tensor]) -> float:
    """Seconds, of which none are the host's: to launch a kernel takes it longer than some take."""
    return seconds(work if IS_SMALL else CudaGraphs()(work))
