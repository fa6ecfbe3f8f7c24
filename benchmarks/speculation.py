"""Speed-up by n-gram drafts: the demo model on repetitive and other text.

    python benchmarks/speculation.py [--rounds 5] [--out build/bench/speculation.json]

Each round serves every workload without and with drafts, in turn; SystemExit is raised if their
tokens differ. Seconds are CPU seconds, with one thread, as medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from benchmarks import report
from cluster.config import DEMO_MODEL
from cluster.demo import tasks
from everlift.sampling import SamplingParams
from tests.support.worker.torch_engine import Job, TorchEngine
from worker.config import Speculation

DRAFT_TOKENS = 4
MAX_TOKENS = 120
#: Prompts of a workload. They are served one by one, so that drafts cost little, and all at once.
PROMPTS = 12

Workload = Callable[[Random], str]


def repeats(rng: Random) -> str:
    """Return a prompt whose answer repeats a word of the prompt."""
    return _task("repeat", rng)


def copies(rng: Random) -> str:
    """Return a prompt that already contains its answer."""
    example = next(tasks.stream("count", rng))
    return f"{example.prompt}{example.answer}\n{example.prompt}"


def counts(rng: Random) -> str:
    """Return a prompt whose answer has few repeated n-grams."""
    return _task("long_count", rng)


def _task(kind: str, rng: Random) -> str:
    return next(tasks.stream(kind, rng)).prompt


WORKLOADS: dict[str, tuple[Workload, float]] = {
    "repeats": (repeats, 0.0),
    "copies": (copies, 0.0),
    "counts": (counts, 0.0),
    "copies, temperature 1": (copies, 1.0),
}


@dataclass(frozen=True)
class Served:
    """Counters of one engine for one workload in one round."""

    seconds: float
    tokens: int
    steps: int
    draft_tokens: int
    accepted_tokens: int


def jobs(workload: Workload, temperature: float, round_: int) -> list[Job]:
    tokenizer, rng = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")), Random(round_)
    return [
        Job(
            tokenizer.encode(workload(rng)).ids,
            MAX_TOKENS,
            SamplingParams(temperature, seed=rng.getrandbits(32)),
        )
        for _ in range(PROMPTS)
    ]


def serve(engine: TorchEngine, work: list[Job], one_by_one: bool) -> tuple[Served, list[list[int]]]:
    before, steps = engine.counters, engine.steps
    start = time.process_time()
    batches = [[job] for job in work] if one_by_one else [work]
    outputs = [output for batch in batches for output in engine.serve(batch)]
    seconds = time.process_time() - start
    after = engine.counters
    served = Served(
        seconds,
        sum(map(len, outputs)),
        engine.steps - steps,
        after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )
    return served, outputs


def measure(rounds: int, one_by_one: bool) -> dict[str, dict[str, list[Served]]]:
    engines = {
        "plain": TorchEngine(DEMO_MODEL, 400),
        "drafts": TorchEngine(
            DEMO_MODEL, 400, speculation=Speculation(num_draft_tokens=DRAFT_TOKENS)
        ),
    }
    found: dict[str, dict[str, list[Served]]] = {
        name: {mode: [] for mode in engines} for name in WORKLOADS
    }
    for round_ in range(-1, rounds):
        for name, (workload, temperature) in WORKLOADS.items():
            work = jobs(workload, temperature, round_)
            results = {mode: serve(engine, work, one_by_one) for mode, engine in engines.items()}
            if results["plain"][1] != results["drafts"][1]:
                raise SystemExit(f"{name}: drafts changed a token")
            for mode, (served, _) in results.items():
                if round_ >= 0:
                    found[name][mode].append(served)
    return found


def medians(rounds: list[Served]) -> dict[str, float]:
    rows = [asdict(each) for each in rounds]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def ratios(raw: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    found = {}
    for name, modes in raw.items():
        plain, drafts = modes["plain"], modes["drafts"]
        key = name.replace(", ", "_").replace(" ", "_")
        found[f"{key}_acceptance"] = drafts["accepted_tokens"] / max(1, drafts["draft_tokens"])
        found[f"{key}_steps"] = drafts["steps"] / plain["steps"]
        found[f"{key}_cpu_time"] = drafts["seconds"] / plain["seconds"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/bench/speculation.json"))
    options = parser.parse_args()
    raw = {
        f"{name}{suffix}": {mode: medians(rounds) for mode, rounds in modes.items()}
        for one_by_one, suffix in ((True, ", alone"), (False, ", together"))
        for name, modes in measure(options.rounds, one_by_one).items()
    }
    report.write(
        options.out,
        packages=["torch"],
        settings={
            "model": "demo",
            "rounds": options.rounds,
            "prompts": PROMPTS,
            "draft_tokens": DRAFT_TOKENS,
            "dtype": "float32",
            "threads": 1,
        },
        raw=raw,
        ratios=ratios(raw),
    )


if __name__ == "__main__":
    main()
