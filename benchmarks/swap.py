"""CPU time of swap against recompute with frequent preemptions: a small Llama on the CPU.

    python benchmarks/swap.py [--rounds 7] [--out build/bench/swap.json]

Each round serves the same prompts three times: with enough blocks for all (no preemption), with too
few and recompute, and with too few and swap. Seconds are CPU seconds, with one thread, so that
other processes have little effect. Figures are medians over the rounds; ``ratios`` depend on the
machine least.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import report
from tests.support.worker.llama_support import save_llama
from tests.support.worker.torch_engine import TorchEngine, greedy_jobs

#: About 5 million parameters.
SHAPE = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "eos_token_id": None,
}
SEQUENCES = 10
PROMPT_TOKENS = 300
OUTPUT_TOKENS = 200
#: Numbers of KV blocks. A sequence begins with 10 blocks and grows to 16.
ENOUGH, TOO_FEW = 170, 64
MODES: dict[str, dict[str, Any]] = {
    "enough": {"num_blocks": ENOUGH},
    "recompute": {"num_blocks": TOO_FEW},
    "swap": {"num_blocks": TOO_FEW, "preemption": "swap", "swap_mib": 256},
}


@dataclass(frozen=True)
class Served:
    """Counters of one engine in one round."""

    seconds: float
    preemptions: int
    recomputed_tokens: int
    blocks_swapped_in: int


def serve(engine: TorchEngine, prompts: list[list[int]]) -> Served:
    preemptions, before = engine.preemptions, engine.counters
    start = time.process_time()
    engine.serve(greedy_jobs(prompts, OUTPUT_TOKENS))
    seconds = time.process_time() - start
    counters = engine.counters
    return Served(
        seconds,
        engine.preemptions - preemptions,
        counters.recomputed_tokens - before.recomputed_tokens,
        counters.blocks_swapped_in - before.blocks_swapped_in,
    )


def prompts(round_: int) -> list[list[int]]:
    """Return the prompts of a round, which differ by round, so that the cache has no hits."""
    rng = Random(round_)
    return [
        [rng.randrange(SHAPE["vocab_size"]) for _ in range(PROMPT_TOKENS)] for _ in range(SEQUENCES)
    ]


def measure(directory: Path, rounds: int) -> dict[str, list[Served]]:
    engines = {mode: TorchEngine(directory, **settings) for mode, settings in MODES.items()}
    served: dict[str, list[Served]] = {mode: [] for mode in MODES}
    for round_ in range(-1, rounds):
        for mode, engine in engines.items():
            result = serve(engine, prompts(round_))
            if round_ >= 0:
                served[mode].append(result)
    return served


def medians(served: list[Served]) -> dict[str, float]:
    rows = [asdict(each) for each in served]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def ratios(raw: dict[str, dict[str, float]]) -> dict[str, float]:
    seconds = {mode: figures["seconds"] for mode, figures in raw.items()}
    return {
        "swap_over_recompute": seconds["swap"] / seconds["recompute"],
        "recompute_over_enough": seconds["recompute"] / seconds["enough"],
        "swap_over_enough": seconds["swap"] / seconds["enough"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("build/bench/swap.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        served = measure(save_llama(Path(directory), **SHAPE), options.rounds)
    raw = {mode: medians(rounds) for mode, rounds in served.items()}
    report.write(
        options.out,
        packages=["torch"],
        settings={
            "rounds": options.rounds,
            "sequences": SEQUENCES,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "blocks": TOO_FEW,
            "dtype": "float32",
            "threads": 1,
        },
        raw=raw,
        ratios=ratios(raw),
    )


if __name__ == "__main__":
    main()
