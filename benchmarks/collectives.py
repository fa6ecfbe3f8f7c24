"""All-reduce between two ranks on one host: shared memory against gloo, alone and in a model.

    python benchmarks/collectives.py [--rounds 5] [--out build/bench/collectives.json]

Each rank has one thread. Both ranks run one all-reduce after another; the time of a round is rank
0's median. The model is a Llama with 125 million pseudo-random parameters in bf16, of which each
rank holds one half. It is also measured in one rank with two threads. Cases take turns in each
round. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks import report
from benchmarks.child import Child, child
from cluster.threads import WAITING
from tests.support.worker.torch_engine import greedy_jobs, starts
from tests.support.worker.worker_support import run
from worker.config import WorkerConfig
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.sequence import Sequence
from worker.parallel import collectives
from worker.parallel.group import Group, create_store, init_group, join_store
from worker.runner.build import build_runner

BACKENDS = ("shared memory", "gloo")
SIZES = (4 << 10, 64 << 10, 1 << 20)
#: Number of all-reduces in a round, which take some hundred milliseconds.
SUMS = {"shared memory": 1000, "gloo": 200}
NEIGHBOURS = (0, 1)
BATCHES = (1, 16)
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 32
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


# a rank, in a process of its own


def rank(number: int, stores: dict[str, str], model: str, pipe: Connection) -> None:
    """Run rank ``number`` until the pipe is closed.

    A message is ("sum", backend, bytes) or ("serve", backend, batch, round). The answer is the
    seconds of an all-reduce (the median), or of serving the batch.
    """
    torch.set_num_threads(1)
    groups = {way: join(way, address, number) for way, address in stores.items()}
    engines = {way: build_engine(model, 1, group) for way, group in groups.items()}
    pipe.send("ready")
    for task, way, *arguments in requests(pipe):
        if task == "sum":
            pipe.send(time_sums(groups[way], SUMS[way], *arguments))
        else:
            pipe.send(time_serving(engines[way], *arguments))
    for group in groups.values():
        group.close()


def whole_model(model: str, pipe: Connection) -> None:
    """Run one rank with the whole model and two threads; a message is (batch, round)."""
    engine = build_engine(model, 2, Group.single())
    pipe.send("ready")
    for arguments in requests(pipe):
        pipe.send(time_serving(engine, *arguments))


def join(way: str, address: str, number: int) -> Group:
    original = collectives.init_collectives
    if way == "gloo":
        collectives.init_collectives = lambda *_: None
    try:
        return init_group(join_store(address), number, 2, torch.device("cpu"))
    finally:
        collectives.init_collectives = original


def requests(pipe: Connection) -> Iterator[Any]:
    """Yield the messages of the pipe until the other end is closed."""
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def time_sums(group: Group, sums: int, num_bytes: int) -> float:
    tensor = torch.zeros(num_bytes // 2, dtype=torch.bfloat16)
    times = []
    group.barrier()
    for _ in range(sums):
        began = time.perf_counter()
        group.all_reduce(tensor)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def build_engine(model: str, threads: int, group: Group) -> Engine:
    config = WorkerConfig(
        model=model,
        load_format="dummy",
        device="cpu",
        dtype="bfloat16",
        num_threads=threads,
        num_blocks=256,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=512,
        tensor_parallel=group.size,
    )
    runner = build_runner(config, group)
    return Engine(runner, Limits.of(config, runner))


def time_serving(engine: Engine, batch: int, round_: int) -> float:
    """Return the seconds to serve a batch; prompts differ by round, so the cache has no hits."""
    rng = Random(round_)
    prompts = [
        [rng.randrange(MODEL["vocab_size"]) for _ in range(PROMPT_TOKENS)] for _ in range(batch)
    ]
    for message in starts(greedy_jobs(prompts, OUTPUT_TOKENS), []):
        engine.add(Sequence.from_start(message, engine.limits))
    began = time.perf_counter()
    run(engine)
    return time.perf_counter() - began


# parent process


def busy_loop(pipe: Connection) -> None:
    """Keep a core busy until the other end of the pipe is closed."""
    pipe.send("ready")
    while not pipe.poll():
        pass


def ask_ranks(ranks: list[Child], *request: object) -> float:
    """Send the request to all ranks at once; return the answer of the first."""
    for each in ranks:
        each.pipe.send(request)
    answers = [float(each.pipe.recv()) for each in ranks]
    return answers[0]


def measure_sums(ranks: list[Child], neighbours: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of an all-reduce in each round, by case."""
    seconds: dict[str, list[float]] = {}
    with ExitStack() as running:
        for _ in range(neighbours):
            start(running, busy_loop)
        for _ in range(rounds):
            for size in SIZES:
                for way in BACKENDS:
                    name = f"{size >> 10} KiB, {neighbours} busy, {way}"
                    seconds.setdefault(name, []).append(ask_ranks(ranks, "sum", way, size))
    return seconds


def measure_serving(ranks: list[Child], whole: Child, rounds: int) -> dict[str, list[float]]:
    """Return the output tokens per second of each round, by case; the warm-up is left out."""
    speeds: dict[str, list[float]] = {}
    for round_ in range(rounds + 1):
        for batch in BATCHES:
            seconds = {
                f"2 ranks, {way}": ask_ranks(ranks, "serve", way, batch, round_) for way in BACKENDS
            }
            seconds["1 rank, 2 threads"] = ask_ranks([whole], batch, round_)
            for name, each in seconds.items():
                speed = output_tokens(batch) / each
                speeds.setdefault(f"batch {batch}, {name}", []).append(speed)
    return {name: rest for name, (_, *rest) in speeds.items()}


def output_tokens(batch: int) -> int:
    return sum(job.max_tokens for job in greedy_jobs([[0]] * batch, OUTPUT_TOKENS))


def start(running: ExitStack, serve: Callable[..., None], *arguments: Any) -> Child:
    started = running.enter_context(child(serve, *arguments))
    started.pipe.recv()
    return started


def start_ranks(running: ExitStack, model: str) -> list[Child]:
    stores = {way: create_store() for way in BACKENDS}
    running.callback(stores.clear)  # a store listens as long as it is held
    addresses = {way: address for way, (_, address) in stores.items()}
    ranks = [running.enter_context(child(rank, number, addresses, model)) for number in range(2)]
    for each in ranks:
        each.pipe.recv()
    return ranks


def ratios(raw: dict[str, float]) -> dict[str, float]:
    """Return gloo's time of an all-reduce divided by that of shared memory, by size.

    Return also the tokens per second with shared memory divided by those of the other cases.
    """
    found = {
        f"gloo_over_shared_memory_{size >> 10}_kib_{neighbours}_busy": (
            raw[f"{size >> 10} KiB, {neighbours} busy, gloo"]
            / raw[f"{size >> 10} KiB, {neighbours} busy, shared memory"]
        )
        for neighbours in NEIGHBOURS
        for size in SIZES
    }
    for batch in BATCHES:
        ours = raw[f"batch {batch}, 2 ranks, shared memory"]
        found[f"tokens_s_vs_gloo_batch_{batch}"] = ours / raw[f"batch {batch}, 2 ranks, gloo"]
        found[f"tokens_s_vs_1_rank_batch_{batch}"] = ours / raw[f"batch {batch}, 1 rank, 2 threads"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/bench/collectives.json"))
    options = parser.parse_args()
    # Otherwise, idle threads of one rank would spin on the core of the other.
    os.environ.update(WAITING)
    with tempfile.TemporaryDirectory() as model, ExitStack() as running:
        Path(model, "config.json").write_text(json.dumps(MODEL))
        ranks, whole = start_ranks(running, model), start(running, whole_model, model)
        rounds = measure_serving(ranks, whole, options.rounds)
        for neighbours in NEIGHBOURS:
            rounds |= measure_sums(ranks, neighbours, options.rounds)
    medians = {name: statistics.median(figures) for name, figures in rounds.items()}
    report.write(
        options.out,
        packages=["torch"],
        settings={
            "rounds": options.rounds,
            "threads_per_rank": 1,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "model": MODEL,
        },
        raw={"sums_s_and_tokens_per_s": medians, "by_round": rounds},
        ratios=ratios(medians),
    )


if __name__ == "__main__":
    main()
