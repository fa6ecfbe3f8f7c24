"""Benchmark of the engine on one GPU against the limits of the GPU and against transformers.

    PYTHONPATH=.:proto python benchmarks/gpu/gpu.py [--shape NAME] [--seconds 580] [--out FILE]

It needs torch, Triton, transformers, numpy, grpcio and protobuf, but no other dependency of
Everlift. Models have random weights, in the shape of Llama-3.1-8B in bf16 and in that of
Llama-3.2-1B, whose kernels take less time than their launch. ``--shape`` measures another model of
gpu_shapes.SHAPES in the parts ceilings, engine and idle alone: llama-8b-fp8, qwen3-30b-a3b (128
GiB of memory) or gpt-oss-20b. Each part runs in a process of its own (gpu_parts.py):

    ceilings                 bandwidth of a large copy, FLOP/s of a large matrix product
    engine                   decoding with batches of 1, 8, 64 and 256 after a context of 1,024
                             tokens; prompts of 1,024 and 8,192 tokens; 192 requests at once, with
                             means of 161 prompt and 338 output tokens
    transformers_continuous  the same requests by transformers' continuous batching
    idle                     share of a step's time in which the GPU is idle
    small_engine             the part engine with the small shape
    kernels                  the kernels beside those of torch (gpu_kernels.py)
    transformers_static      64 of the requests as one static batch; it comes last because it takes
                             longest

``ratios``:

    decode_b*                lower bound of a step's time by the ceilings of the same run
                             (gpu_shapes.py), divided by the measured time
    prefill_mfu_*            FLOP/s of a prompt divided by those of the ceiling; prefill_mfu is that
                             of the longest prompt
    "bandwidth, *"           bytes that a kernel must read and write per second of its time, divided
                             by the bandwidth of the copy
    idle_share               largest idle share of all batches, while the profiler runs
    idle_share_unwatched     idle share without the profiler: busy time from the profiler, step time
                             from the part engine
    tok_s_vs_hf_*            output tokens per second, divided by those of transformers

Each part has a time limit, and results are written after each part. A part that fails or hangs
keeps the figures that it had already measured. ``failed`` has the cause. Without a GPU all parts
run with a tiny model, only to test the benchmark; the figures then have no meaning.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch

from benchmarks import report
from benchmarks.gpu.gpu_kernels import bandwidth_shares
from benchmarks.gpu.gpu_shapes import SHAPES, Ceiling, Shape

DEFAULT_SHAPE = "llama-8b"
PACKAGES = ("torch", "triton", "transformers", "numpy")


class Part(NamedTuple):
    """Part of the benchmark: its key in the report, its function in gpu_parts.PARTS, its shape.

    ``limit_s`` is its time limit in seconds.
    """

    name: str
    function: str
    shape: str
    limit_s: float


def parts(shape: str, small: str) -> list[Part]:
    """Return the parts in the order in which they run; those that most ratios need come first."""
    return [
        Part("ceilings", "ceilings", shape, 60),
        Part("engine", "engine", shape, 200),
        Part("transformers_continuous", "transformers_continuous", shape, 240),
        Part("idle", "idle", shape, 90),
        Part("small_engine", "engine", small, 120),
        Part("kernels", "kernels", shape, 75),
        Part("transformers_static", "transformers_static", shape, 180),
    ]


@dataclass
class Results:
    """Results by part: figures, seconds taken and, if the part failed, the cause."""

    raw: dict[str, dict[str, Any]] = field(default_factory=dict)
    took_s: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def engine_parts(shape: str) -> list[Part]:
    """Return the parts that measure the engine alone."""
    return [each for each in parts(shape, shape) if each.name in ("ceilings", "engine", "idle")]


def main() -> None:
    options = _options()
    shape, small = (options.shape, "llama-1b") if torch.cuda.is_available() else ("tiny", "tiny")
    planned = parts(shape, small) if options.shape == DEFAULT_SHAPE else engine_parts(shape)
    until = time.monotonic() + options.seconds
    for found in run_parts(planned, until):
        report.write(
            options.out,
            packages=PACKAGES,
            settings={
                "date": datetime.now(UTC).isoformat(timespec="minutes"),
                "shape": shape,
                "small": small,
                "device": _device(),
                "took_s": found.took_s,
                "failed": found.failed,
            },
            raw=found.raw,
            ratios=ratios(found.raw, SHAPES[shape], SHAPES[small]),
        )


def run_parts(planned: Sequence[Part], until: float) -> Iterator[Results]:
    """Run the parts one after the other; after each, yield the results so far.

    No part runs longer than its limit or beyond ``until``, in seconds of time.monotonic().
    """
    found = Results()
    for part in planned:
        began = time.monotonic()
        output, cause = _run_part(part, min(part.limit_s, until - began))
        if cause:
            found.failed[part.name] = cause
        if (raw := _last_json_object(output)) is not None:
            found.raw[part.name] = raw
        found.took_s[part.name] = round(time.monotonic() - began, 1)
        yield found


def _run_part(part: Part, limit_s: float) -> tuple[str, str]:
    """Run the part in a new process; return its stdout and the cause if it failed, else ""."""
    if limit_s <= 0:
        return "", "no time was left"
    command = [sys.executable, "-m", "benchmarks.gpu.gpu_parts", part.function, part.shape]
    # Files instead of pipes: a child of a killed part could keep a pipe open.
    with TemporaryFile("w+", errors="replace") as out, TemporaryFile("w+", errors="replace") as err:
        try:
            status = subprocess.run(command, stdout=out, stderr=err, timeout=limit_s).returncode
            cause = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            cause = f"time limit of {limit_s:.0f} s exceeded"
        for file in (out, err):
            file.seek(0)
        return out.read(), cause and f"{cause}\n{err.read()[-2000:]}"


def _last_json_object(output: str) -> dict[str, Any] | None:
    """Return the last line of ``output`` that is a JSON object; None if there is none.

    Lines that a library printed, or that a killed part did not finish, are ignored.
    """
    for line in reversed(output.splitlines()):
        with suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return None


def ratios(raw: Mapping[str, Any], shape: Shape, small: Shape) -> dict[str, float]:
    """Return the ratios that the results in ``raw``, by part, suffice for."""
    found: dict[str, float] = {}
    if "idle" in raw:
        found["idle_share"] = max(batch["idle"] for batch in raw["idle"].values())
    if "engine" in raw:
        if "idle" in raw:
            decode_s = raw["engine"]["decode_s"]
            found["idle_share_unwatched"] = max(
                1 - idle["busy_s"] / decode_s[batch]
                for batch, idle in raw["idle"].items()
                if batch in decode_s
            )
        for name in ("continuous", "static"):
            theirs, ours = raw.get(f"transformers_{name}"), raw["engine"].get("mix_tok_s")
            if theirs is not None and ours is not None:
                found[f"tok_s_vs_hf_{name}"] = ours / theirs["tok_s"]
    if "ceilings" not in raw:
        return found
    ceiling = Ceiling(**raw["ceilings"])
    if "engine" in raw:
        found |= {
            f"decode_b{b}": r for b, r in _decode_shares(raw["engine"], shape, ceiling).items()
        }
        for length, prefill_s in raw["engine"]["prefill_s"].items():
            mfu = shape.prefill_flops(int(length)) / prefill_s / ceiling.flops
            found |= {f"prefill_mfu_{length}": mfu, "prefill_mfu": mfu}
    if "kernels" in raw:
        found |= bandwidth_shares(raw["kernels"], ceiling.bandwidth)
    if "small_engine" in raw:
        by_batch = _decode_shares(raw["small_engine"], small, ceiling)
        found |= {f"small_decode_b{b}": r for b, r in by_batch.items()}
    return found


def _decode_shares(engine: Mapping[str, Any], shape: Shape, ceiling: Ceiling) -> dict[str, float]:
    """Return the lower bound of a step's time divided by the measured time, by batch size.

    The bound counts only the initial context, not the few tokens decoded since.
    """
    return {
        batch: shape.decode_bound_s(int(batch), engine["context"], ceiling) / step_s
        for batch, step_s in engine["decode_s"].items()
    }


def _device() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"name": "CPU, tiny model"}
    facts = torch.cuda.get_device_properties(0)
    return {
        "name": facts.name,
        "multiprocessors": facts.multi_processor_count,
        "memory_gib": round(facts.total_memory / (1 << 30), 1),
        "cuda": torch.version.cuda,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The engine on one GPU.")
    parser.add_argument("--shape", choices=SHAPES, default=DEFAULT_SHAPE)
    parser.add_argument("--seconds", type=float, default=580.0, help="time limit of all parts")
    parser.add_argument("--out", type=Path, default=Path("build/bench/gpu.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
