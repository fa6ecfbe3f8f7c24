"""Benchmark of attention on the CPU: the compiled kernel against torch and vLLM's kernel.

    python benchmarks/attention_kernel.py [--rounds 7] [--dtype bfloat16] [--threads 2]
        [--level avx2] [--out build/bench/attention.json]

Each round runs every case once with each backend: it prepares a step, and then writes keys and
values and computes attention in each layer of a 125M model (12 layers, 12 query heads, 4 KV heads,
head dimension 64). Times are those of a step divided by its layers, as medians over the rounds.
vLLM's kernel is included if its environment is installed (make bench-engine installs it).

``ratios`` CASE are torch's time divided by the kernel's, "CASE vs vllm" vLLM's time divided by the
kernel's. prefill_of_fma_peak is the rate of "prefill 512" divided by the FMA peak of the cores.
decode_of_bandwidth_bound is the time to read the keys and values of "decode 64 x 1024" divided by
the kernel's time. --level avx2 measures the code for older CPUs on a newer one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from benchmarks.engine import LEVELS, LIMITED_VLLM
from cluster.threads import WAITING

os.environ.update(WAITING)  # as in a worker
if "--level" in sys.argv:
    # Read when torch is imported.
    os.environ.update(LEVELS[sys.argv[sys.argv.index("--level") + 1]])

import torch

from benchmarks import bandwidth, peer, report
from benchmarks.prefill_rate import peak_of
from worker.attention.backend import AttentionBackend, AttentionForm
from worker.attention.cpu import CpuAttention, compiled_kernel
from worker.attention.reference import ReferenceAttention
from worker.device.kv_cache import KVCache
from worker.engine.limits import blocks_for
from worker.engine.plan import Row, Rows

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 12, 12, 4, 64
FORM = AttentionForm(HEAD_DIM**-0.5)

#: (position of the first new token, new tokens) of each row
CASES: dict[str, list[tuple[int, int]]] = {
    "decode 1 x 1024": [(1023, 1)],
    "decode 8 x 1024": [(1023, 1)] * 8,
    "decode 64 x 256": [(255, 1)] * 64,
    "decode 64 x 1024": [(1023, 1)] * 64,
    "prefill 512": [(0, 512)],
    "prefill 4 x 128 after 512": [(512, 128)] * 4,
    "16 decode at 512, 256 after 512": [(511, 1)] * 16 + [(512, 256)],
}


class Case:
    """Test case: rows with KV blocks in random order, and random queries, keys and values.

    ``shapes`` has (position of the first new token, number of new tokens) of each row.
    """

    def __init__(self, shapes: list[tuple[int, int]], cache: KVCache) -> None:
        order = iter(torch.randperm(cache.num_blocks).tolist())
        self.rows = Rows.of(
            Row(i, (0,) * new, start, tuple(islice(order, blocks_for(start + new))), True)
            for i, (start, new) in enumerate(shapes)
        )
        tokens = sum(new for _, new in shapes)
        qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).to(cache.tensor.dtype)
        self.query, self.key, self.value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)

    def seconds_a_layer(self, backend: AttentionBackend) -> float:
        start = time.perf_counter()
        step = backend.prepare(self.rows)
        for layer in range(LAYERS):
            step.write(layer, self.key, self.value)
            step.attend(layer, self.query, FORM)
        return (time.perf_counter() - start) / LAYERS


class Vllm:
    """Process with vLLM's kernel, which measures the cases that it gets by name."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        while "ready" not in (line := self._output.readline()):
            assert line, "vLLM's kernel did not start"

    def seconds_a_layer(self, name: str) -> float:
        print(name, file=self._input, flush=True)
        return float(self._output.readline())


@contextmanager
def vllm_kernel(dtype: torch.dtype, level: str) -> Iterator[Vllm | None]:
    """Start and yield the process with vLLM's kernel; None if vLLM's environment is missing."""
    if not (peer.VLLM / "bin").exists():
        yield None
        return
    threads = torch.get_num_threads()
    settings = {
        "layers": LAYERS,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "blocks": num_blocks(),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": threads,
        "cases": CASES,
    }
    limited = {"PYTHONPATH": f"{LIMITED_VLLM}:."} if level else {"PYTHONPATH": "."}
    environment = os.environ | peer.vllm_environment(peer.VLLM, threads) | limited
    python = peer.VLLM / "bin" / "python"
    with subprocess.Popen(
        [str(python), "-m", "benchmarks.attention_vllm", json.dumps(settings)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Vllm(process)


def num_blocks() -> int:
    return max(sum(blocks_for(start + new) for start, new in shapes) for shapes in CASES.values())


def operations(name: str) -> float:
    """Return the floating-point operations of a case in a layer: Q·K and weights times V."""
    pairs = sum(
        position + 1 for start, new in CASES[name] for position in range(start, start + new)
    )
    return 4.0 * HEADS * HEAD_DIM * pairs


def bytes_read(name: str, dtype: torch.dtype) -> float:
    """Return the bytes of keys and values that a case reads in a layer, once for each row."""
    return 2.0 * KV_HEADS * HEAD_DIM * dtype.itemsize * sum(map(sum, CASES[name]))


def measure(
    rounds: int, dtype: torch.dtype, vllm: Vllm | None
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds per layer of each round, by case and backend.

    Raises SystemExit if the kernel cannot be compiled.
    """
    blocks = num_blocks()
    cache = KVCache(blocks, LAYERS, KV_HEADS, HEAD_DIM, dtype, torch.device("cpu"))
    cache.tensor.copy_(torch.randn(cache.tensor.shape[1:]))
    compiled = compiled_kernel(HEAD_DIM, dtype)
    if compiled is None:
        raise SystemExit("no kernel could be compiled")
    backends: dict[str, AttentionBackend] = {
        "torch": ReferenceAttention(cache),
        "kernel": CpuAttention(cache, compiled),
    }
    cases = {name: Case(shapes, cache) for name, shapes in CASES.items()}
    seconds: dict[str, dict[str, list[float]]] = {
        name: {backend: [] for backend in (*backends, *(["vllm"] if vllm else []))}
        for name in CASES
    }
    for round_ in range(-1, rounds):
        for name, case in cases.items():
            for which, backend in backends.items():
                taken = case.seconds_a_layer(backend)
                if round_ >= 0:
                    seconds[name][which].append(taken)
            if vllm is not None:
                taken = vllm.seconds_a_layer(name)
                if round_ >= 0:
                    seconds[name]["vllm"].append(taken)
    return seconds


def ratios(
    medians: dict[str, dict[str, float]], dtype: torch.dtype, read_rate: float, peak: float
) -> dict[str, float]:
    kernel = {name: median["kernel"] for name, median in medians.items()}
    compared = {name: median["torch"] / median["kernel"] for name, median in medians.items()}
    compared |= {
        f"{name} vs vllm": median["vllm"] / median["kernel"]
        for name, median in medians.items()
        if "vllm" in median
    }
    prefill, decode = "prefill 512", "decode 64 x 1024"
    compared["prefill_of_fma_peak"] = operations(prefill) / kernel[prefill] / peak
    compared["decode_of_bandwidth_bound"] = bytes_read(decode, dtype) / read_rate / kernel[decode]
    return {name: round(ratio, 3) for name, ratio in compared.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--level", choices=["", *LEVELS], default="")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("build/bench/attention.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    read_rate = bandwidth.measured(options.threads).median
    peak = peak_of(options.threads, pairs=dtype == torch.bfloat16)
    peaks = [peak() for _ in range(options.rounds)]
    with vllm_kernel(dtype, options.level) as vllm:
        seconds = measure(options.rounds, dtype, vllm)
    medians = {
        name: {which: statistics.median(times) for which, times in by_backend.items()}
        for name, by_backend in seconds.items()
    }
    report.write(
        options.out,
        packages=["torch"],
        settings={
            "rounds": options.rounds,
            "layers": LAYERS,
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "dtype": options.dtype,
            "level": options.level,
            "threads": options.threads,
        },
        raw={
            "ms_a_layer": {
                name: {which: 1e3 * median for which, median in by_backend.items()}
                for name, by_backend in medians.items()
            },
            "read_bytes_per_s": read_rate,
            "fma_peak_per_s": peaks,
        },
        ratios=ratios(medians, dtype, read_rate, statistics.median(peaks)),
    )


if __name__ == "__main__":
    main()
