"""The engine on one GPU, held against what the GPU can do and against transformers.

    PYTHONPATH=.:proto python benchmarks/gpu/gpu.py [--seconds 580] [--out build/bench/gpu.json]

It takes torch, Triton, transformers, numpy, grpcio and protobuf, and nothing else of what Everlift
depends on. Random weights, bf16, in the shape of Llama-3.1-8B and, where launching takes longer
than computing, of Llama-3.2-1B. Each part is a process of its own (gpu_parts.py): the ceilings (a
large copy, a large product); decoding at batches of 1, 8, 64 and 256 behind 1,024 tokens, prompts
of 1,024 and 8,192, and 192 requests at once with 161 prompt and 338 output tokens in the mean; the
same requests by transformers' continuous batching; the part of a step's time in which the GPU
computes nothing; the small shape; the kernels beside torch's own (gpu_kernels.py); and, last since
it takes longest, 64 of the requests as one static batch.

``ratios``: decode_b* is the time that a step takes at least, by the ceilings of the same run
(gpu_shapes.py), over what it took; prefill_mfu its products over those of the large one, for the
longest prompt (and prefill_mfu_* for each); "bandwidth, *" what a kernel must read and write in the
time it took, over the copy's; idle_share the largest of all batches, while it is watched, and
idle_share_unwatched by what the GPU did then of what a step takes else; tok_s_vs_hf_* compare
output tokens a second.

A part has only so long, and what was found is written after each: one that fails or hangs costs no
other's figures, nor those that it had itself by then. ``failed`` says why something is missing.
Without a GPU all of it runs in small, on a tiny model, to see that it does; the figures mean
nothing then.
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
from benchmarks.gpu.gpu_kernels import shares
from benchmarks.gpu.gpu_shapes import SHAPES, Ceiling, Shape

PACKAGES = ("torch", "triton", "transformers", "numpy")


class Part(NamedTuple):
    """``name`` is a key of the report, ``function`` one of gpu_parts.PARTS, which has so long."""

    name: str
    function: str
    shape: str
    limit_s: float


def parts(shape: str, small: str) -> list[Part]:
    """What the ratios need comes first."""
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
class Found:
    """By a part's name, what it found, how long it took, and why that is not all."""

    raw: dict[str, dict[str, Any]] = field(default_factory=dict)
    took_s: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def main() -> None:
    options = _options()
    shape, small = ("llama-8b", "llama-1b") if torch.cuda.is_available() else ("tiny", "tiny")
    until = time.monotonic() + options.seconds
    for found in run(parts(shape, small), until):
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


def run(planned: Sequence[Part], until: float) -> Iterator[Found]:
    """After each part, all that was found so far."""
    found = Found()
    for part in planned:
        began = time.monotonic()
        said, cause = _run(part, min(part.limit_s, until - began))
        if cause:
            found.failed[part.name] = cause
        if (raw := _last_found(said)) is not None:
            found.raw[part.name] = raw
        found.took_s[part.name] = round(time.monotonic() - began, 1)
        yield found


def _run(part: Part, limit_s: float) -> tuple[str, str]:
    """What it wrote, and why it failed, if it did."""
    if limit_s <= 0:
        return "", "no time was left"
    command = [sys.executable, "-m", "benchmarks.gpu.gpu_parts", part.function, part.shape]
    # Files, and no pipes, which a process of the part's may hold open when the part is killed.
    with TemporaryFile("w+", errors="replace") as out, TemporaryFile("w+", errors="replace") as err:
        try:
            status = subprocess.run(command, stdout=out, stderr=err, timeout=limit_s).returncode
            cause = f"it ended with {status}" if status else ""
        except subprocess.TimeoutExpired:
            cause = f"its {part.limit_s:.0f} s, or all time, were over"
        for file in (out, err):
            file.seek(0)
        return out.read(), cause and f"{cause}\n{err.read()[-2000:]}"


def _last_found(said: str) -> dict[str, Any] | None:
    """Of the last line that is whole, and no library's."""
    for line in reversed(said.splitlines()):
        with suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return None


def ratios(raw: Mapping[str, Any], shape: Shape, small: Shape) -> dict[str, float]:
    """Of what was found."""
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
        found |= {f"decode_b{b}": r for b, r in _decode(raw["engine"], shape, ceiling).items()}
        for length, prefill_s in raw["engine"]["prefill_s"].items():
            mfu = shape.prefill_flops(int(length)) / prefill_s / ceiling.flops
            found |= {f"prefill_mfu_{length}": mfu, "prefill_mfu": mfu}
    if "kernels" in raw:
        found |= shares(raw["kernels"], ceiling.bandwidth)
    if "small_engine" in raw:
        by_batch = _decode(raw["small_engine"], small, ceiling)
        found |= {f"small_decode_b{b}": r for b, r in by_batch.items()}
    return found


def _decode(engine: Mapping[str, Any], shape: Shape, ceiling: Ceiling) -> dict[str, float]:
    """By batch, the share of the bound. Sequences are a little longer than the context by then,
    which the bound leaves out."""
    return {
        batch: shape.decode_bound_s(int(batch), engine["context"], ceiling) / step_s
        for batch, step_s in engine["decode_s"].items()
    }


def _device() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"name": "CPU, in small"}
    facts = torch.cuda.get_device_properties(0)
    return {
        "name": facts.name,
        "multiprocessors": facts.multi_processor_count,
        "memory_gib": round(facts.total_memory / (1 << 30), 1),
        "cuda": torch.version.cuda,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The engine on one GPU.")
    parser.add_argument("--seconds", type=float, default=580.0)
    parser.add_argument("--out", type=Path, default=Path("build/bench/gpu.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
