"""Time per token of one sequence that decodes, with quantised weights and with bf16 ones.

    python benchmarks/quantised_decode.py [--rounds 5] [--steps 40] [--out FILE]

The model has random weights, 0.5 billion parameters and an unquantised head. Weights are bf16, int8
with a scale for each output (W8A8), FP8 in blocks of 128 x 128, or int4 in groups of 128 (W4A16).
The models take turns in one process. ``ratios`` are medians over the rounds of a format's time per
token, divided by that of bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import report
from everlift.sampling import SamplingParams
from everlift.v1 import session_pb2
from worker.config import WorkerConfig
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.sequence import Sequence
from worker.parallel.group import Group
from worker.runner.build import build_runner

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}
_PROMPT_TOKENS, _MAX_TOKENS = 8, 900


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": groups,
    }


FORMATS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "w8": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "w4": compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
}


def engine(directory: Path, quantization: dict[str, Any] | None) -> Engine:
    """Return an engine with one sequence, whose prompt is computed."""
    directory.mkdir()
    changes = {} if quantization is None else {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(MODEL | changes))
    config = WorkerConfig(model=str(directory), load_format="dummy", kv_cache_mib=128)
    runner = build_runner(config, Group.single())
    limits = Limits.of(config, runner)
    made = Engine(runner, limits)
    start = session_pb2.Start(
        epoch=1,
        prompt_ids=range(1, 1 + _PROMPT_TOKENS),
        max_tokens=_MAX_TOKENS,
        sampling=SamplingParams(temperature=0.0).to_proto(),
    )
    made.add(Sequence.from_start(start, limits))
    made.step()
    return made


def seconds_per_token(measured: Engine, steps: int) -> float:
    measured.step()
    began = time.perf_counter()
    for _ in range(steps):
        measured.step()
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("build/bench/quantised.json"))
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        engines = {name: engine(Path(scratch, name), form) for name, form in FORMATS.items()}
    raw: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.rounds):
        for name, measured in engines.items():
            raw[name].append(seconds_per_token(measured, options.steps))
    medians = {name: statistics.median(times) for name, times in raw.items()}
    report.write(
        options.out,
        packages=["torch"],
        settings={
            "rounds": options.rounds,
            "steps": options.steps,
            "threads": torch.get_num_threads(),
        },
        raw=raw,
        ratios={
            f"{name}_alone_vs_bf16": round(medians[name] / medians["bf16"], 3)
            for name in engines
            if name != "bf16"
        },
    )


if __name__ == "__main__":
    main()
