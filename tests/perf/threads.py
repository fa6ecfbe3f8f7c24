"""What OpenMP's waiting threads cost, alone and beside a busy neighbour.

    python tests/perf/threads.py [--repeats 3] [--threads 1 2] [--out build/bench/threads.json]

An engine decodes eight sequences of the small checkpoint, on one and on two threads, under each
OMP_WAIT_POLICY: PASSIVE, ACTIVE, and none set. It does so alone, and beside a process that computes
all the time. What is told is tokens a second, and the part of a core that the neighbour had.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from subprocess import PIPE

from tests.perf import checkpoints, cores, report

_POLICIES = ("PASSIVE", "ACTIVE", "unset")
_RATE = Path(__file__).with_name("decode_rate.py")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--seconds", type=float, default=2.0)
    arguments.add_argument("--out", type=Path, default=Path("build/bench/threads.json"))
    options = arguments.parse_args()
    model = checkpoints.ensure("small")
    rates: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, list[float]] = defaultdict(list)
    for _, threads, policy in product(range(options.repeats), options.threads, _POLICIES):
        name = f"{policy}_{threads}"
        with _decoder(model, threads, policy) as decoder:
            rates[f"{name}_alone"].append(_rate(decoder, options.seconds))
            with _neighbour() as neighbour:
                before, began = cores.cpu_seconds(neighbour.pid), time.monotonic()
                rates[f"{name}_beside"].append(_rate(decoder, options.seconds))
                passed = time.monotonic() - began
                shares[name].append((cores.cpu_seconds(neighbour.pid) - before) / passed)
        print(name, rates[f"{name}_alone"], rates[f"{name}_beside"], shares[name], flush=True)
    medians = {name: round(statistics.median(each), 1) for name, each in rates.items()}
    report.write(
        options.out,
        packages=("torch",),
        settings={"repeats": options.repeats, "seconds": options.seconds, "sequences": 8},
        raw={
            "tokens_s": medians,
            "neighbour": {name: round(statistics.median(each), 2) for name, each in shares.items()},
        },
        ratios={
            f"{policy}_vs_PASSIVE_{threads}_{where}": round(
                medians[f"{policy}_{threads}_{where}"] / medians[f"PASSIVE_{threads}_{where}"], 3
            )
            for policy in _POLICIES[1:]
            for threads in options.threads
            for where in ("alone", "beside")
        },
    )


@contextmanager
def _decoder(model: Path, threads: int, policy: str) -> Iterator[subprocess.Popen[str]]:
    """It waits to be told to decode."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    if policy != "unset":
        environment["OMP_WAIT_POLICY"] = policy
    command = [sys.executable, str(_RATE), str(model), str(threads)]
    with _running(command, environment) as decoder:
        assert decoder.stdout is not None
        assert decoder.stdout.readline() == "ready\n"
        yield decoder


def _rate(decoder: subprocess.Popen[str], seconds: float) -> float:
    assert decoder.stdin is not None and decoder.stdout is not None
    print(seconds, file=decoder.stdin, flush=True)
    return float(decoder.stdout.readline())


@contextmanager
def _neighbour() -> Iterator[subprocess.Popen[str]]:
    with _running([sys.executable, "-c", "while True: pass"], os.environ) as neighbour:
        yield neighbour


@contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


if __name__ == "__main__":
    main()
