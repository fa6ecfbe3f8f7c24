"""Rate of a model's matrix products with many rows, against the FMA peak of the cores.

    python -m benchmarks.prefill_rate MODEL THREADS

prints JSON: the operations per second of the linear layers for ROWS tokens, in the form that a
worker uses, and the peak of the instructions that they use. Both are medians, measured in turn.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROWS = 512
_ROUNDS = 7
_PEAK_ROUNDS = 2_000_000
_SOURCE = Path(__file__).with_name("fma_peak.cpp")


class Rate(NamedTuple):
    """Operations per second."""

    products: float
    peak: float

    @property
    def of_peak(self) -> float:
        return self.products / self.peak


def measured(model: Path, threads: int) -> Rate:
    """Measure in a new process, because torch's number of threads is set once per process."""
    command = [sys.executable, "-m", "benchmarks.prefill_rate", str(model), str(threads)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return Rate(**json.loads(printed))


def _measure(model: Path, threads: int) -> Rate:
    from cluster.threads import WAITING

    os.environ.update(WAITING)  # as in a worker
    import torch

    from worker.config import WorkerConfig
    from worker.device.device import choose_dtype
    from worker.model.huggingface.families import read_spec
    from worker.model.precompile import choose_packing
    from worker.runner.build import weights_dtype

    torch.set_num_threads(threads)
    spec, cpu = read_spec(model), torch.device("cpu")
    dtype = choose_dtype("auto", cpu)
    held = weights_dtype(WorkerConfig(model=str(model)), model, dtype, cpu)
    width, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    qkv = heads + 2 * spec.num_kv_heads * spec.head_dim
    up, down = (2 * spec.intermediate_size, width), (width, spec.intermediate_size)
    shapes = [(qkv, width), (width, heads), up, down]
    packing = choose_packing(dtype, held)
    forms = [packing.pack(torch.randn(shape).to(held)) for shape in shapes]
    inputs = [torch.randn(ROWS, shape[1]).to(dtype) for shape in shapes]
    operations = 2.0 * ROWS * sum(outputs * inputs for outputs, inputs in shapes)

    def multiply() -> float:
        for form, x in zip(forms, inputs, strict=True):
            assert form is not None
            form.multiply(x, None)
        return operations

    peak = peak_of(threads, pairs=dtype == torch.bfloat16)
    rates = [(_rate(multiply), peak()) for _ in range(_ROUNDS)]
    products, peaks = zip(*rates[1:], strict=True)
    return Rate(statistics.median(products), statistics.median(peaks))


def peak_of(threads: int, *, pairs: bool) -> Callable[[], float]:
    """Return a function that measures the peak operations per second.

    With ``pairs``, it uses products of pairs of bfloat16 if the CPU has them.
    """
    from worker.native import native

    library = native.compiled(_SOURCE, ("-DWITH_PAIRS",) if pairs else ())
    assert library is not None
    library.work.restype = ctypes.c_double
    library.work.argtypes = (ctypes.c_int64, ctypes.c_int)
    return lambda: _rate(lambda: float(library.work(_PEAK_ROUNDS, threads)))


def _rate(work: Callable[[], float]) -> float:
    began = time.perf_counter()
    operations = work()
    return operations / (time.perf_counter() - began)


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]), int(sys.argv[2]))._asdict()))
