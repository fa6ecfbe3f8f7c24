"""How long it takes until a worker that is asked for takes requests, and where that time goes.

    python tests/perf/worker_start.py [--repeats 3] [--out build/bench/worker_start.json]

Three ways, in turn, each with the demo model while one worker is there already: plain processes
with a rank that starts by itself; the same out of a process that has loaded what it needs
(nursery); and another replica under Ray Serve. From the moment of asking to the moment at which the
router says that the worker is up; the parts are the rank's own ("rank ready" in its log), and what
is left is what comes before its process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster.config import Config
from cluster.processes import ProcessCluster
from cluster.ray_cluster import RayCluster
from everlift import AsyncClient
from router.config import RouterConfig
from tests.free_port import free_port
from tests.perf import report
from worker.config import WorkerConfig

_PARTS = ("process_s", "fetch_s", "meet_s", "import_s", "load_s", "serve_s")
_LOOK_S = 0.02


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--out", type=Path, default=Path("build/bench/worker_start.json"))
    options = arguments.parse_args()
    ways = {"process": _process, "nursery": _nursery, "ray": _ray}
    raw: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, way in ways.items():
            with TemporaryDirectory(prefix="everlift-start-") as directory:
                raw[name].append(asyncio.run(way(Path(directory))))
            print(name, json.dumps(raw[name][-1]), flush=True)
    medians = {name: _medians(runs) for name, runs in raw.items()}
    report.write(
        options.out,
        packages=("torch", "ray"),
        settings={"repeats": options.repeats},
        raw={"runs": raw, "medians": medians},
        ratios={
            f"{name}_vs_process": round(medians[name]["total_s"] / medians["process"]["total_s"], 3)
            for name in ("nursery", "ray")
        },
    )


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}


def _config(directory: Path) -> Config:
    return Config(
        state_dir=directory,
        router=RouterConfig(port=free_port()),
        worker=WorkerConfig(kv_cache_mib=64, num_threads=1),
        num_workers=2,
    )


async def _process(directory: Path) -> dict[str, float]:
    async with ProcessCluster(_config(directory)) as cluster:
        await cluster.kill_worker(1)
        return await _timed(directory, cluster.addresses, cluster.restart_worker(1))


async def _nursery(directory: Path) -> dict[str, float]:
    """Killed, it comes back by itself."""
    async with ProcessCluster(_config(directory), revive=True) as cluster:
        return await _timed(directory, cluster.addresses, cluster.kill_worker(1))


async def _ray(directory: Path) -> dict[str, float]:
    from ray import serve

    config = replace(_config(directory), num_workers=1)
    async with RayCluster(config) as cluster:
        more = cluster.application(replace(cluster.config, num_workers=2))
        asking = asyncio.to_thread(serve.run, more, name="everlift", route_prefix=None)
        return await _timed(directory, cluster.addresses, asking)


async def _timed(
    directory: Path, routers: Sequence[str], asking: Coroutine[Any, Any, Any]
) -> dict[str, float]:
    """Until a worker that was not there before is."""
    async with AsyncClient(routers) as client:
        before = {worker.worker_id for worker in (await client.status()).workers}
        began, task = time.monotonic(), asyncio.create_task(asking)
        while not (new := await _others(client, before)):
            await asyncio.sleep(_LOOK_S)
        total_s = time.monotonic() - began
        await task
    parts = _parts(directory, new.pop())
    rest_s = total_s - sum(parts.values())
    return {"total_s": round(total_s, 3)} | parts | {"before_s": round(max(0.0, rest_s), 3)}


async def _others(client: AsyncClient, before: set[str]) -> set[str]:
    workers = (await client.status()).workers
    return {worker.worker_id for worker in workers if worker.alive} - before


def _parts(directory: Path, worker_id: str) -> dict[str, float]:
    for path in (directory / "logs").glob("worker*.log"):
        for line in path.read_text().splitlines():
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "rank ready" and event["worker_id"] == worker_id:
                return {name: float(event.get(name, 0.0)) for name in _PARTS}
    raise AssertionError(f"nothing was written down about the start of {worker_id}")


if __name__ == "__main__":
    main()
