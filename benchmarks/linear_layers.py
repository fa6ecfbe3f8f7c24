"""Time of all linear layers of a forward pass, plain against packed, by number of rows.

    python benchmarks/linear_layers.py [--rounds 7] [--threads N] [--out build/bench/linear.json]

The models are "small" (Llama, 125 million parameters) and "medium" (Qwen2, 387 million). A forward
pass multiplies with the weights of every layer and of the LM head, which do not fit into the CPU's
caches. The forms take turns: "plain" is torch's, "packed" the form that a rank uses
(worker/model/precompile.py), "onednn" the one that it uses without a compiler. ``read_once_ms`` is
the lower bound for few rows: the time to read all weights at the measured memory bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from worker.device.device import use_threads
from worker.model.matrix import Form, Plain
from worker.model.onednn import OneDnnPacking
from worker.model.precompile import choose_packing

ROWS = (1, 4, 8, 16, 32, 64, 256)
_READ_BYTES = 256 << 20


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    #: outputs and inputs of a layer's linears
    linears: tuple[tuple[int, int], ...]
    vocab: int = 32_000

    def weights(self, dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(shape).mul_(shape[1] ** -0.5).to(dtype) for shape in self._shapes()]

    @property
    def multiplied(self) -> int:
        """Number of parameters that each token is multiplied with."""
        return sum(outputs * inputs for outputs, inputs in self._shapes())

    def _shapes(self) -> list[tuple[int, int]]:
        return [*self.linears * self.layers, (self.vocab, self.hidden)]


MODELS = {
    "small": Shape(768, 12, ((1280, 768), (768, 768), (4096, 768), (768, 2048))),
    "medium": Shape(896, 24, ((1152, 896), (896, 896), (9728, 896), (896, 4864))),
}
CASES = {
    "small_bf16": ("small", torch.bfloat16),
    "medium_bf16": ("medium", torch.bfloat16),
    "small_fp32": ("small", torch.float32),
}


def forms(weights: list[Tensor], dtype: torch.dtype) -> dict[str, list[Form]]:
    """Return all weights in each form that this machine supports.

    Weights are cloned before packing, which may free the memory of a weight.
    """
    packings = {"packed": choose_packing(dtype, dtype)}
    if not isinstance(packings["packed"], OneDnnPacking):
        packings["onednn"] = OneDnnPacking()
    plain: dict[str, list[Form]] = {"plain": [Plain(weight) for weight in weights]}
    packed = {
        name: [form for weight in weights if (form := packing.pack(weight.clone())) is not None]
        for name, packing in packings.items()
    }
    return plain | {name: each for name, each in packed.items() if len(each) == len(weights)}


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def forward(weights: list[Form], inputs: list[Tensor]) -> None:
    for weight, x in zip(weights, inputs, strict=True):
        weight.multiply(x, None)


def read_rate(rounds: int) -> float:
    """Return the memory bandwidth in bytes per second: the best of ``rounds`` sums."""
    memory = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    return _READ_BYTES / min(seconds(memory.sum) for _ in range(rounds))


def measure(model: str, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of a forward pass, by number of rows and form."""
    weights = MODELS[model].weights(dtype)
    by_form = forms(weights, dtype)
    medians = {}
    for count in ROWS:
        x = {width: torch.randn(count, width).to(dtype) for width in {w.shape[1] for w in weights}}
        inputs = [x[weight.shape[1]] for weight in weights]
        for form in by_form.values():
            forward(form, inputs)
        taken: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            for name, form in by_form.items():
                taken[name].append(seconds(partial(forward, form, inputs)))
        medians[str(count)] = {
            name: round(1e3 * statistics.median(each), 2) for name, each in taken.items()
        }
        print(model, dtype, count, medians[str(count)], flush=True)
    return medians


def ratios(forward_ms: dict[str, Any], read_once_ms: dict[str, float]) -> dict[str, float]:
    """Return ratios of times; ``packed_over_plain`` is below 1 if packing is faster."""
    over_plain = {
        f"{name}_over_plain_{case}_{count}": taken[name] / taken["plain"]
        for case, by_count in forward_ms.items()
        for count, taken in by_count.items()
        for name in taken
        if name != "plain"
    }
    of_bound = {
        f"read_once_over_packed_{case}_1": read_once_ms[case] / by_count["1"]["packed"]
        for case, by_count in forward_ms.items()
    }
    return {name: round(ratio, 3) for name, ratio in (over_plain | of_bound).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="threads (default: one per core)")
    parser.add_argument("--case", choices=CASES, action="append", help="case (default: all)")
    parser.add_argument("--out", type=Path, default=Path("build/bench/linear.json"))
    options = parser.parse_args()
    use_threads(options.threads)
    torch.manual_seed(0)
    cases = {name: CASES[name] for name in options.case or CASES}
    with torch.inference_mode():
        rate = read_rate(options.rounds)
        forward_ms = {name: measure(*case, options.rounds) for name, case in cases.items()}
    read_once_ms = {
        name: round(1e3 * MODELS[model].multiplied * dtype.itemsize / rate, 2)
        for name, (model, dtype) in cases.items()
    }
    report.write(
        options.out,
        packages=["torch"],
        settings={"rounds": options.rounds, "threads": torch.get_num_threads()},
        raw={
            "read_gb_s": round(rate / 1e9, 1),
            "read_once_ms": read_once_ms,
            "forward_ms": forward_ms,
        },
        ratios=ratios(forward_ms, read_once_ms),
    )


if __name__ == "__main__":
    main()
