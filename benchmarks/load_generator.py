"""Accuracy of `everlift bench serve` and guidellm on an endpoint with known latencies.

    python benchmarks/load_generator.py [--rounds 3] [--rate 10] [--requests 100]

The endpoint (tests/support/router/timed_server.py, in a process of its own) sends the first token
of a stream --ttft-ms after its request, and each further one --gap-ms later. In each round both
generators send it the same number of requests, one generator after the other, at constant
intervals. Figures are medians over the rounds. "by guidellm" is Everlift's figure divided by
guidellm's, and "by the endpoint" Everlift's figure divided by the endpoint's time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report
from benchmarks.peer import ROOT

GUIDELLM = ROOT / "guidellm"
_SOURCES = Path(__file__).parents[1]
_MODEL = _SOURCES / "cluster" / "demo_model"
_INPUT_TOKENS = 64

Figures = dict[str, float]

#: Quantiles by name; values are their names in Everlift's report and in guidellm's.
QUANTILES = {"p50": ("median", "p50"), "p99": ("p99", "p99")}
#: guidellm's metric and its unit in ms, by name of the figure. Its inter-token latency is the TPOT
#: of vLLM and Everlift; guidellm's own TPOT includes the first token.
_GUIDELLMS = {
    "ttft": ("time_to_first_token_ms", 1.0),
    "tpot": ("inter_token_latency_ms", 1.0),
    "e2el": ("request_latency", 1e3),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Load and endpoint: ``ttft`` and ``gap`` in ms, output tokens, requests per second, number."""

    ttft: float
    gap: float
    tokens: int
    rate: float
    requests: int

    def truth(self) -> Figures:
        e2el = self.ttft + (self.tokens - 1) * self.gap
        known = {"ttft": self.ttft, "tpot": self.gap, "e2el": e2el}
        return {f"{name}_{of}_ms": ms for name, ms in known.items() for of in QUANTILES}


@contextmanager
def endpoint(plan: Plan) -> Iterator[str]:
    """Start the endpoint, and yield its URL without /v1."""
    command = [sys.executable, "-m", "tests.support.router.timed_server"]
    command += ["--ttft-ms", str(plan.ttft), "--gap-ms", str(plan.gap)]
    with subprocess.Popen(command, cwd=_SOURCES, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip().removesuffix("/v1")
        finally:
            process.terminate()


def everlift(url: str, plan: Plan, directory: Path) -> Figures:
    file = directory / "everlift.json"
    _run(
        *(sys.executable, "-m", "cluster.cli", "bench", "serve", "--url", url, "--json", str(file)),
        *("--rate", str(plan.rate), "--burstiness", "inf", "--requests", str(plan.requests)),
        *("--input-tokens", str(_INPUT_TOKENS), "--output-tokens", str(plan.tokens)),
    )
    return of_everlift(json.loads(file.read_text()))


def of_everlift(found: Any) -> Figures:
    return {
        **{
            f"{name}_{of}_ms": found[f"{ours}_{name}_ms"]
            for name in _GUIDELLMS
            for of, (ours, _) in QUANTILES.items()
        },
        "lag_p99_ms": 1e3 * found["everlift"]["lag"]["p99"],
    }


def guidellm(url: str, plan: Plan, directory: Path) -> Figures:
    file = directory / "guidellm.json"
    _run(
        *(str(GUIDELLM / "bin/guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={url},model=timed,request_format=/v1/completions"),
        *("--profile", f"kind=constant,rate={plan.rate}"),
        *("--constraint", f"kind=max_requests,count={plan.requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={_MODEL}"),
        *("--data", _synthetic(plan), "--output", f"kind=json,path={file}"),
    )
    return of_guidellm(json.loads(file.read_text()))


def of_guidellm(found: Any) -> Figures:
    (benchmark,) = found["benchmarks"]
    return {
        f"{name}_{of}_ms": ms * benchmark["metrics"][metric]["successful"]["percentiles"][theirs]
        for name, (metric, ms) in _GUIDELLMS.items()
        for of, (_, theirs) in QUANTILES.items()
    }


def _synthetic(plan: Plan) -> str:
    return f"kind=synthetic_text,prompt_tokens={_INPUT_TOKENS},output_tokens={plan.tokens}"


def _run(*command: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)


def measure(plan: Plan, rounds: int) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {"everlift": [], "guidellm": []}
    with endpoint(plan) as url, TemporaryDirectory(prefix="everlift-load-") as directory:
        for _ in range(rounds):
            found["everlift"].append(everlift(url, plan, Path(directory)))
            found["guidellm"].append(guidellm(url, plan, Path(directory)))
    return found


def medians(rounds: list[Figures]) -> Figures:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def ratios(found: dict[str, Figures], truth: Figures) -> Figures:
    ours, theirs = found["everlift"], found["guidellm"]
    by_theirs = {f"{name} by guidellm": ours[name] / theirs[name] for name in truth}
    return by_theirs | {f"{name} by the endpoint": ours[name] / truth[name] for name in truth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--ttft-ms", type=float, default=150.0)
    parser.add_argument("--gap-ms", type=float, default=15.0)
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of a request")
    parser.add_argument("--out", type=Path, default=Path("build/bench/load_generator.json"))
    options = parser.parse_args()
    plan = Plan(options.ttft_ms, options.gap_ms, options.tokens, options.rate, options.requests)
    raw = measure(plan, options.rounds)
    found = {name: medians(rounds) for name, rounds in raw.items()}
    report.write(
        options.out,
        packages=["aiohttp", "uvloop"],
        settings={"rounds": options.rounds, "rate": plan.rate, "requests": plan.requests},
        raw={"medians": found, "rounds": raw, "endpoint": plan.truth()},
        ratios=ratios(found, plan.truth()),
    )


if __name__ == "__main__":
    main()
