"""Attention on the CPU: the compiled kernel against torch's, side by side.

    python benchmarks/attention_kernel.py [--rounds 7] [--dtype bfloat16] [--threads 2]
        [--out build/bench/attention.json]

Each round takes every case twice, once with each backend: a step is prepared, and written and
attended in each layer of a 125M model (12 layers, 12 query heads over 4 KV heads, 64 wide). Times
are those of a step, divided by its layers; medians over the rounds. ``ratios`` are torch's time
over the kernel's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from itertools import islice
from pathlib import Path

from cluster.threads import WAITING

os.environ.update(WAITING)  # as in a worker

import torch

from benchmarks import report
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
    """Rows over scattered blocks, and what they write and ask."""

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


def measure(rounds: int, dtype: torch.dtype) -> dict[str, dict[str, list[float]]]:
    """Seconds a layer of each case by backend, round after round."""
    blocks = max(sum(blocks_for(start + new) for start, new in shapes) for shapes in CASES.values())
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
        name: {backend: [] for backend in backends} for name in CASES
    }
    for round_ in range(-1, rounds):
        for name, case in cases.items():
            for which, backend in backends.items():
                taken = case.seconds_a_layer(backend)
                if round_ >= 0:
                    seconds[name][which].append(taken)
    return seconds


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("build/bench/attention.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seconds = measure(options.rounds, getattr(torch, options.dtype))
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
            "threads": options.threads,
        },
        raw={
            "ms_a_layer": {
                name: {which: 1e3 * median for which, median in by_backend.items()}
                for name, by_backend in medians.items()
            }
        },
        ratios={name: median["torch"] / median["kernel"] for name, median in medians.items()},
    )


if __name__ == "__main__":
    main()
