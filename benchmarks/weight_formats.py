"""Time per token of one sequence that decodes, with several formats of weights, and with experts.

    python benchmarks/weight_formats.py [--rounds 5] [--steps 40] [--out FILE]

The models have random weights. A dense one has 0.5 billion parameters and an unquantised head; its
weights are bf16, int8 with a scale for each output (W8A8), FP8 in blocks of 128 x 128, or int4 in
groups of 128 (W4A16). A Qwen3-MoE has 8 of 64 experts in bf16, a gpt-oss 4 of 32 in bf16 or MXFP4.
The models take turns in one process. ``ratios`` are medians over the rounds: *_alone_vs_bf16 is the
time per token divided by that of the same model in bf16, and moe_batch1_of_bandwidth_bound the time
to read the active weights, at the measured bandwidth, divided by the time per token.
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
from benchmarks.bandwidth import measured
from everlift.sampling import SamplingParams
from everlift.v1 import session_pb2
from worker.config import WorkerConfig
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.sequence import Sequence
from worker.parallel.group import Group
from worker.runner.build import build_runner

DENSE: dict[str, Any] = {
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
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 16_000,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 16_000,
    "hidden_size": 1440,
    "intermediate_size": 1440,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
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


def quantised(model: dict[str, Any], quantization: dict[str, Any]) -> dict[str, Any]:
    return model | {"quantization_config": quantization}


#: Configs of the models, and the name of the one in bf16 that each is compared with.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "bf16": (DENSE, ""),
    "w8": (
        quantised(DENSE, compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
        "bf16",
    ),
    "fp8": (
        quantised(DENSE, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        "bf16",
    ),
    "w4": (
        quantised(
            DENSE,
            compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
        ),
        "bf16",
    ),
    "moe": (MOE, ""),
    "gpt_oss": (GPT_OSS, ""),
    "mxfp4": (quantised(GPT_OSS, {"quant_method": "mxfp4"}), "gpt_oss"),
}


def active_bytes(model: dict[str, Any]) -> int:
    """Return the bytes of the bf16 matrices of a mixture of experts that one token needs."""
    width, head_dim = model["hidden_size"], model["head_dim"]
    heads = 2 * (model["num_attention_heads"] + model["num_key_value_heads"]) * head_dim
    experts = (
        model["num_experts"] + 3 * model["num_experts_per_tok"] * model["moe_intermediate_size"]
    )
    rows = model["num_hidden_layers"] * (heads + experts) + model["vocab_size"]
    return 2 * width * int(rows)


def engine(directory: Path, model: dict[str, Any]) -> Engine:
    """Return an engine with one sequence, whose prompt is computed."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model))
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


def seconds_per_token(engine: Engine, steps: int) -> float:
    engine.step()
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("build/bench/weight_formats.json"))
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        engines = {name: engine(Path(scratch, name), model) for name, (model, _) in MODELS.items()}
    raw: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.rounds):
        for name, each in engines.items():
            raw[name].append(seconds_per_token(each, options.steps))
    medians = {name: statistics.median(times) for name, times in raw.items()}
    ratios = {
        f"{name}_alone_vs_bf16": medians[name] / medians[plain]
        for name, (_, plain) in MODELS.items()
        if plain
    }
    floor_s = active_bytes(MOE) / measured(torch.get_num_threads()).median
    ratios["moe_batch1_of_bandwidth_bound"] = floor_s / medians["moe"]
    report.write(
        options.out,
        packages=["torch"],
        settings={
            "rounds": options.rounds,
            "steps": options.steps,
            "threads": torch.get_num_threads(),
        },
        raw=raw,
        ratios={name: round(ratio, 3) for name, ratio in ratios.items()},
    )


if __name__ == "__main__":
    main()
