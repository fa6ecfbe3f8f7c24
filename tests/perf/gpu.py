"""The engine on one GPU, held against what the GPU can do and against transformers.

    python tests/perf/gpu.py [--seconds 580] [--out build/bench/gpu.json]

Random weights, bf16, in the shape of Llama-3.1-8B and, where launching takes longer than computing,
of Llama-3.2-1B. Each part is a process of its own (gpu_parts.py): the ceilings (a large copy, a
large product); decoding at batches of 1, 8, 64 and 256 behind 1,024 tokens, and the part of each
step in which the GPU computes nothing; prompts of 1,024 and 8,192; 192 requests at once with 161
prompt and 338 output tokens in the mean; the same by transformers, continuous and in static batches
of 64; a layer's attention beside torch's own.

``ratios``: decode_b* is the time that a step takes at least, by the ceilings of the same run
(gpu_shapes.py), over what it took; prefill_mfu its products over those of the large one, for the
longest prompt; idle_share the largest of all batches; tok_s_vs_hf_* compare output tokens a second.
What there was no time for, or has failed, is missing, and ``failed`` says why. Without a GPU all of
it runs in small, on a tiny model, to see that it does; the figures mean nothing then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.perf import report
from tests.perf.gpu_shapes import SHAPES, Ceiling, Shape

PACKAGES = ("torch", "triton", "transformers", "numpy")


def main() -> None:
    options = _options()
    shape, small = ("llama-8b", "llama-1b") if torch.cuda.is_available() else ("tiny", "tiny")
    parts = [
        *(("ceilings", shape), ("engine", shape), ("transformers_continuous", shape)),
        *(("transformers_static", shape), ("kernels", shape), ("engine", small)),
    ]
    raw, failed = run(parts, time.monotonic() + options.seconds)
    report.write(
        options.out,
        packages=PACKAGES,
        settings={"shape": shape, "small": small, "device": _device(), "failed": failed},
        raw=raw,
        ratios=ratios(raw, SHAPES[shape], SHAPES[small]),
    )


def run(
    parts: Sequence[tuple[str, str]], until: float
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What each part found, and why it found nothing. The last one of a name is that of the small
    shape."""
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for part, shape in parts:
        name = f"small_{part}" if part in found or part in failed else part
        command = [sys.executable, "-m", "tests.perf.gpu_parts", part, shape]
        left_s = max(0.0, until - time.monotonic())
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left_s)
        except subprocess.TimeoutExpired:
            failed[name] = "no time was left"
            continue
        if done.returncode:
            failed[name] = done.stderr[-2000:]
        else:
            found[name] = json.loads(done.stdout.splitlines()[-1])
    return found, failed


def ratios(raw: Mapping[str, Any], shape: Shape, small: Shape) -> dict[str, float]:
    """Of what was found."""
    if "ceilings" not in raw:
        return {}
    ceiling = Ceiling(**raw["ceilings"])
    found: dict[str, float] = {}
    if "engine" in raw:
        engine = raw["engine"]
        found |= {f"decode_b{b}": r for b, r in _decode(engine, shape, ceiling).items()}
        length, prefill_s = list(engine["prefill_s"].items())[-1]
        found["prefill_mfu"] = shape.prefill_flops(int(length)) / prefill_s / ceiling.flops
        idle = [batch["idle"] for batch in engine["decode"].values() if "idle" in batch]
        found |= {"idle_share": max(idle)} if idle else {}
        for name in ("continuous", "static"):
            if (theirs := raw.get(f"transformers_{name}")) is not None:
                found[f"tok_s_vs_hf_{name}"] = engine["mix_tok_s"] / theirs["tok_s"]
    if "small_engine" in raw:
        by_batch = _decode(raw["small_engine"], small, ceiling)
        found |= {f"small_decode_b{b}": r for b, r in by_batch.items()}
    return found


def _decode(engine: Mapping[str, Any], shape: Shape, ceiling: Ceiling) -> dict[str, float]:
    """By batch, the share of the bound. Sequences are a little longer than the context by then,
    which the bound leaves out."""
    return {
        batch: shape.decode_bound_s(int(batch), engine["context"], ceiling) / found["step_s"]
        for batch, found in engine["decode"].items()
    }


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, in small"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The engine on one GPU.")
    parser.add_argument("--seconds", type=float, default=580.0)
    parser.add_argument("--out", type=Path, default=Path("build/bench/gpu.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
