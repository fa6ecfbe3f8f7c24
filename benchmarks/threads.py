"""Decode rate by wait policy of idle OpenMP threads, alone and beside a busy process.

    python benchmarks/threads.py [--repeats 3] [--threads 1 2] [--out build/bench/threads.json]

An engine decodes eight sequences of the small checkpoint, with one and with two threads. Idle
threads sleep at once (PASSIVE), spin N times before they sleep (spin_N: PASSIVE with GOMP_SPINCOUNT
N), or never sleep (ACTIVE). The engine runs alone, beside a process that computes all the time
("busy"), and beside one that computes for 0.2 ms of every 0.5 ms, as a router does ("waking").
Figures are tokens per second, and the share of a core that the other process got.
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

from benchmarks import checkpoints, cores, report

_SPINS = (200, 500, 1000, 2000)
_POLICIES = {
    "PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    **{f"spin_{n}": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(n)} for n in _SPINS},
    "ACTIVE": {"OMP_WAIT_POLICY": "ACTIVE"},
}
_NEIGHBOURS = {
    "busy": "while True: pass",
    "waking": """
import time
while True:
    end = time.perf_counter() + 0.0002
    while time.perf_counter() < end: pass
    time.sleep(0.0003)
""",
}
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
            for kind, program in _NEIGHBOURS.items():
                with _running([sys.executable, "-c", program], os.environ) as neighbour:
                    before, began = cores.cpu_seconds(neighbour.pid), time.monotonic()
                    rates[f"{name}_{kind}"].append(_rate(decoder, options.seconds))
                    used = cores.cpu_seconds(neighbour.pid) - before
                    shares[f"{name}_{kind}"].append(used / (time.monotonic() - began))
        print(name, {n: each[-1] for n, each in rates.items() if n.startswith(name)}, flush=True)
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
            for policy in _POLICIES
            for threads in options.threads
            for where in ("alone", *_NEIGHBOURS)
        },
    )


@contextmanager
def _decoder(model: Path, threads: int, policy: str) -> Iterator[subprocess.Popen[str]]:
    """Start and yield a process that decodes on request (decode_rate.py), once it is ready."""
    kept = {n: value for n, value in os.environ.items() if not n.startswith(("OMP_", "GOMP_"))}
    environment = kept | _POLICIES[policy]
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
