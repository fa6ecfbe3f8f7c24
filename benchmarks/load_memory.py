"""Cost of loading a checkpoint: peak memory relative to its parameters, and seconds.

    python benchmarks/load_memory.py [--repeats 5] [--out build/bench/load.json]

Each load runs in a new process with one thread, and the files are in the page cache. Memory is the
growth of resident memory since before the model was made, including pages of mapped files.
Quantised checkpoints keep their codes. The weights are packed as a rank packs them; ``seconds``
includes ``pack_seconds``. ``ratios`` compare the memory with the bytes of the parameters, and the
seconds with the time to read the same part of the files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import report
from tests.support.worker.weights_support import Rank
from worker.model import weights
from worker.model.decoder import Decoder
from worker.model.huggingface.families import read_spec
from worker.model.layers import Placement
from worker.model.precompile import choose_packing

#: 62 million parameters.
SHAPE: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
SHARD_SIZE = "60MB"
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Formats of quantised checkpoints, by their names in tests.
QUANTISED = {"int4": "packed int4, group", "fp8": "fp8, channel", "awq": "awq"}
HELD = torch.bfloat16
#: rank and ranks
PLACES = ((0, 1), (0, 2), (1, 2))
_CHUNK = 16 << 20


def save(directory: Path, dtype: torch.dtype, shard_size: str = SHARD_SIZE) -> dict[str, int]:
    """Write a random checkpoint; return its number of files and bytes."""
    # Imported here, because the measured processes do not need it.
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(dtype)
    model.save_pretrained(directory, max_shard_size=shard_size)
    files = list(directory.glob("*.safetensors"))
    return {"files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def save_in_format(directory: Path, name: str) -> dict[str, int]:
    """Write a random checkpoint in the format ``name``; return its number of files and bytes."""
    from tests.support.worker.quantised_files import FORMATS, save_quantised

    plain = directory.with_name(f"{directory.name}-plain")
    save(plain, torch.bfloat16, shard_size="5GB")
    save_quantised(plain, directory, FORMATS[name])
    return {"files": 1, "bytes": (directory / "model.safetensors").stat().st_size}


def resident(field: str) -> int:
    """Return the resident bytes of this process: current (VmRSS) or peak (VmHWM)."""
    (line,) = (s for s in Path("/proc/self/status").read_text().splitlines() if field in s)
    return int(line.split()[1]) << 10


def load(directory: Path, rank: int, ranks: int) -> dict[str, float]:
    """Load the checkpoint in this process, and return bytes and seconds.

    The process must not have loaded a model before, because the peak memory is that of its life.
    """
    spec = weights.with_stored_scales(read_spec(directory), directory)
    codes = None if spec.weight_format is None else spec.weight_format.codes
    place = Placement(Rank(rank, ranks), HELD, torch.device("cpu"))
    packing = choose_packing(HELD, HELD, codes)
    baseline = resident("VmRSS")
    decoder = Decoder(spec, 64, place)
    start = time.perf_counter()
    held = weights.load(decoder, directory)
    loaded = time.perf_counter()
    decoder.pack(packing)
    packed = time.perf_counter()
    peak = resident("VmHWM") - baseline
    return {
        "held_bytes": held,
        "peak_bytes": peak,
        "seconds": packed - start,
        "pack_seconds": packed - loaded,
        "read_seconds": read_seconds(directory, ranks),
    }


def read_seconds(directory: Path, ranks: int) -> float:
    """Return the seconds to read one of ``ranks`` equal parts of each file."""
    buffer = bytearray(_CHUNK)
    start = time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        left = path.stat().st_size // ranks
        with path.open("rb", buffering=0) as file:
            while left > 0 and (count := file.readinto(buffer)):
                left -= count
    return time.perf_counter() - start


def in_fresh_process(directory: Path, rank: int, ranks: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--load", str(directory), str(rank), str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    result: dict[str, float] = json.loads(output)
    return result


def measure(directories: dict[str, Path], repeats: int) -> dict[str, Any]:
    """Return the medians by case; the cases take turns."""
    cases = {
        f"{stored}_to_bf16_rank{rank}_of_{ranks}": (directories[stored], rank, ranks)
        for stored, (rank, ranks) in product(directories, PLACES)
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            runs[name].append(in_fresh_process(*case))
    return {
        name: {key: statistics.median(run[key] for run in several) for key in several[0]}
        for name, several in runs.items()
    }


def ratios(raw: dict[str, Any]) -> dict[str, float]:
    return {
        f"{what}_{name}": case[over] / case[under]
        for name, case in raw.items()
        for what, over, under in (
            ("peak_over_held", "peak_bytes", "held_bytes"),
            ("load_over_read", "seconds", "read_seconds"),
        )
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/bench/load.json"))
    parser.add_argument("--load", nargs=3, metavar=("DIR", "RANK", "RANKS"), help="internal")
    options = parser.parse_args()
    if options.load:
        directory, rank, ranks = options.load
        print(json.dumps(load(Path(directory), int(rank), int(ranks))))
        return
    with TemporaryDirectory() as scratch:
        directories = {name: Path(scratch, name) for name in (*STORED, *QUANTISED)}
        sizes = {name: save(directories[name], dtype) for name, dtype in STORED.items()}
        sizes |= {n: save_in_format(directories[n], form) for n, form in QUANTISED.items()}
        raw = measure(directories, options.repeats)
    report.write(
        options.out,
        packages=["torch", "transformers", "safetensors"],
        settings={"checkpoints": sizes, "repeats": options.repeats},
        raw=raw,
        ratios=ratios(raw),
    )


if __name__ == "__main__":
    main()
