"""Timers and sizes of bench-gpu. On a CPU the sizes are tiny, only to test the benchmark."""

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
#: Bytes of data that exceed a GPU's L2 cache several times.
COLD_BYTES = 0 if IS_SMALL else 256 << 20


def seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the seconds of one call of ``work``, including the wait for the device.

    It is the median over ROUNDS rounds of the mean of ``repeats`` calls, after a round of warm-up.
    """
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
    """Return the seconds of one call of ``work``, replayed as a CUDA graph.

    A graph excludes the host's time to launch kernels, which may exceed that of a kernel. On a CPU
    the call is timed directly.
    """
    return seconds(work if IS_SMALL else CudaGraphs()(work))
