"""Benchmark of the autoscaler: the load doubles in one step, and later halves again.

    python benchmarks/autoscale.py [--phase 75] [--out build/bench/autoscale.json]

Ray runs on one machine with four nodes, of which three have a fake GPU. A worker with the fake
model generates 240 tokens, or ends 30 requests, per second. Arrivals are Poisson at the rate that
0.65 workers can serve, then 1.3, then 0.65 for twice as long, because the autoscaler removes
workers only after a delay.

    decision_s                      from the step up to the decision for more workers; some tens of
                                    requests must come before the step differs from chance
    first_work_after_ready_ms       from the router's log that a new worker is up to the first
                                    dispatch to it
    worker_seconds_vs_clairvoyant   seconds of all requested workers, divided by those of a plan
                                    that knows the load and has each worker ready in time
    reversals_per_10_min            changes between scaling up and scaling down, except the one that
                                    the load requires

A picture of load, queue and workers is written beside the JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from math import ceil
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report
from cluster.autoscale.config import AutoscaleConfig
from cluster.config import Config
from cluster.ray import local_ray
from cluster.ray.ray_cluster import RayCluster
from everlift import AsyncClient
from router.config import RouterConfig
from tests.support.free_port import free_port
from worker.config import FakeModel, WorkerConfig
from worker.runner.fake_runner import expected_tokens

MODEL = FakeModel(step_time=0.05)
SLOTS = 12
#: Output tokens per second of a worker whose slots are all taken.
RATE = SLOTS / MODEL.step_time
LOADS = (0.65, 1.3, 0.65)
_PHASES = (1, 1, 2)
SCALING = AutoscaleConfig(min_workers=1, max_workers=3, down_delay=30.0)
_TOKENS = (4, 12)
_MEAN_TOKENS = sum(_TOKENS) / 2
_PROMPT = 8
_SAMPLE_S = 0.1
_GPU_NODES = 3


@dataclass(frozen=True, slots=True)
class LogLine:
    """Line of a log; ``at`` is in seconds since 1970."""

    at: float
    event: str
    fields: dict[str, Any]


@dataclass
class Run:
    """Times of a run's events, in seconds since 1970.

    ``steps`` are the starts of the phases. ``decisions`` have the number of workers. ``ready`` and
    ``first_work`` are by worker id.
    """

    steps: list[float] = field(default_factory=list)
    ended: float = 0.0
    requests: int = 0
    #: time, number of queued requests, number of workers that are up
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    decisions: list[tuple[float, int]] = field(default_factory=list)
    ready: dict[str, float] = field(default_factory=dict)
    first_work: dict[str, float] = field(default_factory=dict)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--phase", type=float, default=75.0, help="seconds of a phase")
    arguments.add_argument("--out", type=Path, default=Path("build/bench/autoscale.json"))
    options = arguments.parse_args()
    with TemporaryDirectory(prefix="everlift-autoscale-") as directory:
        run = asyncio.run(play(Path(directory), options.phase))
    picture = options.out.with_suffix(".png")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(run, picture)
    report.write(
        options.out,
        packages=("ray",),
        settings={"loads": LOADS, "phase_s": options.phase, "worker_tokens_per_s": RATE},
        raw=_raw(run) | {"picture": str(picture)},
        ratios=ratios(run),
    )


async def play(directory: Path, phase_s: float) -> Run:
    local_ray.prepare()
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for _ in range(_GPU_NODES):
            nodes.add_node(num_cpus=1, num_gpus=1)
        config = Config(
            model="fake",
            state_dir=directory,
            ray_address=nodes.address,
            router=RouterConfig(port=free_port(), http_host=""),
            worker=WorkerConfig(
                max_num_seqs=SLOTS, num_blocks=512, num_threads=1, device="cuda", fake=MODEL
            ),
            autoscale=SCALING,
        )
        async with RayCluster(config) as cluster:
            return await _loaded(cluster, phase_s)
    finally:
        nodes.shutdown()


async def _loaded(cluster: RayCluster, phase_s: float) -> Run:
    run = Run()
    async with AsyncClient(cluster.addresses) as client:
        sampling = asyncio.create_task(_sample_status(client, run))
        sent: list[asyncio.Task[None]] = []
        rng = Random(5)
        for load, phases in zip(LOADS, _PHASES, strict=True):
            run.steps.append(time.time())
            end = run.steps[-1] + phases * phase_s
            while time.time() < end:
                await asyncio.sleep(rng.expovariate(load * RATE / _MEAN_TOKENS))
                sent.append(
                    asyncio.create_task(_send_request(client, rng.randint(*_TOKENS), rng.random()))
                )
        run.ended = time.time()
        await asyncio.gather(*sent)
        sampling.cancel()
    run.requests = len(sent)
    _read_logs(cluster.config.state_dir / "logs", run)
    return run


async def _send_request(client: AsyncClient, tokens: int, seed: float) -> None:
    rng = Random(seed)
    prompt = [rng.randrange(256) for _ in range(_PROMPT)]
    stream = client.generate(prompt, max_tokens=tokens, temperature=0.0)
    received = [token async for chunk in stream for token in chunk.token_ids]
    assert received == expected_tokens(prompt, tokens, MODEL)


async def _sample_status(client: AsyncClient, run: Run) -> None:
    while True:
        status = await client.status()
        alive = sum(worker.alive for worker in status.workers)
        run.samples.append((time.time(), status.queued, alive))
        await asyncio.sleep(_SAMPLE_S)


def _read_logs(log_dir: Path, run: Run) -> None:
    for line in _lines(log_dir.glob("autoscaler*.log")):
        if line.event == "target number of workers changed":
            run.decisions.append((line.at, line.fields["now"]))
    for line in _lines(log_dir.glob("router-*.log")):
        if line.event == "worker up":
            run.ready[line.fields["worker_id"]] = line.at
        elif line.event == "dispatched":
            run.first_work.setdefault(line.fields["worker_id"], line.at)


def _lines(paths: Iterator[Path]) -> list[LogLine]:
    lines = []
    for path in paths:
        for text in path.read_text().splitlines():
            if text.startswith("{"):
                fields = json.loads(text)
                at = datetime.fromisoformat(fields["ts"]).timestamp()
                lines.append(LogLine(at, fields["event"], fields))
    return sorted(lines, key=lambda line: line.at)


# results


def ratios(run: Run) -> dict[str, float]:
    up_at = run.steps[1]
    decided = next(at for at, count in run.decisions if at > up_at and count > 1)
    added = [worker for worker, at in run.ready.items() if at > decided]
    waits = [run.first_work[w] - run.ready[w] for w in added if w in run.first_work]
    minutes = (run.ended - run.steps[0]) / 60
    return {
        "decision_s": round(decided - up_at, 2),
        "first_work_after_ready_ms": round(1000 * max(waits), 1),
        "worker_seconds_vs_clairvoyant": round(worker_seconds(run) / clairvoyant_seconds(run), 3),
        "reversals_per_10_min": round(10 * max(0, _reversals(run) - 1) / minutes, 2),
    }


def worker_seconds(run: Run) -> float:
    """Return the seconds of all requested workers, each counted from the decision."""
    changes = [(run.steps[0], 1), *run.decisions, (run.ended, 0)]
    return sum(
        count * (min(later, run.ended) - max(at, run.steps[0]))
        for (at, count), (later, _) in pairwise(changes)
        if later > run.steps[0]
    )


def clairvoyant_seconds(run: Run) -> float:
    needs = [ceil(load / SCALING.utilisation) for load in LOADS]
    ends = [*run.steps[1:], run.ended]
    seconds = sum(n * (end - at) for n, at, end in zip(needs, run.steps, ends, strict=True))
    # A worker that is ready at the step must be requested earlier by its start time.
    return seconds + (needs[1] - needs[0]) * _start_s(run)


def _start_s(run: Run) -> float:
    """Return the seconds from the decision to scale up to the first worker that is ready."""
    decided = next(at for at, count in run.decisions if at > run.steps[1] and count > 1)
    return min((at for at in run.ready.values() if at > decided), default=decided) - decided


def _reversals(run: Run) -> int:
    counts = [1, *(count for _, count in run.decisions)]
    turns = [after > before for before, after in pairwise(counts) if after != before]
    return sum(one != other for one, other in pairwise(turns))


def _raw(run: Run) -> dict[str, Any]:
    begin = run.steps[0]
    return {
        "requests": run.requests,
        "steps_s": [round(at - begin, 2) for at in run.steps],
        "decisions": [[round(at - begin, 2), count] for at, count in run.decisions],
        "worker_ready_s": sorted(round(at - begin, 2) for at in run.ready.values()),
        "worker_start_s": round(_start_s(run), 2),
        "worker_seconds": round(worker_seconds(run), 1),
        "clairvoyant_worker_seconds": round(clairvoyant_seconds(run), 1),
        "longest_queue": max((queued for _, queued, _ in run.samples), default=0),
    }


def draw(run: Run, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    begin = run.steps[0]
    times = [at - begin for at, _, _ in run.samples]
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 5))
    ends = [*run.steps[1:], run.ended]
    for load, at, end in zip(LOADS, run.steps, ends, strict=True):
        above.hlines(load, at - begin, end - begin, colors="tab:red")
    above.plot([], [], color="tab:red", label="load, in workers")
    above.step(times, [up for _, _, up in run.samples], where="post", label="workers up")
    requested = [(0.0, 1), *((at - begin, count) for at, count in run.decisions)]
    requested.append((run.ended - begin, requested[-1][1]))
    above.step(
        *zip(*requested, strict=True), where="post", linestyle=":", label="workers requested"
    )
    above.set_ylim(0, SCALING.max_workers + 0.5 if SCALING.max_workers else None)
    above.legend(loc="upper right")
    below.fill_between(times, [queued for _, queued, _ in run.samples], step="post", alpha=0.5)
    below.set_ylabel("waiting requests")
    below.set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
