"""Time from the request for a new worker until it is up, by part.

    python benchmarks/worker_start.py [--repeats 3] [--out build/bench/worker_start.json]

There are four modes, which take turns, each with the demo model and one running worker:

    process       plain processes; the rank starts in a new interpreter
    fork server   plain processes; the rank is forked from a process with loaded modules
    model change  a running worker of another model changes to this one on command
    ray           a replica that the autoscaler adds under Ray Serve, because requests are queued

The time is from the request, under Ray from the autoscaler's decision, until the router's status
has the new worker. The parts are those that the rank logs ("rank ready"). ``before_s`` is the rest,
which passes before the rank's process starts.

A checkpoint of 1.0 GB, which is not in the page cache, is loaded by one to eight readers in turn:
from this machine's disk, and from a simulated storage that takes 10 ms more for each read of at
most 4 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import report
from cluster.autoscale.config import AutoscaleConfig
from cluster.config import DEMO_MODEL, Config
from cluster.groups import ModelGroup
from cluster.local.processes import ProcessCluster
from cluster.ray.ray_cluster import RayCluster
from everlift import AsyncClient
from router.config import RouterConfig
from tests.support.free_port import free_port
from tests.support.worker.weights_support import Rank
from worker.config import WorkerConfig
from worker.model import weights
from worker.model.decoder import Decoder
from worker.model.huggingface.families import read_spec
from worker.model.layers import Placement

_PARTS = ("process_s", "fetch_s", "meet_s", "import_s", "load_s", "serve_s")
_POLL_S = 0.02
_READERS = (1, 2, 4, 8)
_LATENCY_S = 0.01
#: 0.5 billion parameters.
_SHAPE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
#: Number of requests, more than a worker can serve within the drain target.
_REQUESTS = 64


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--out", type=Path, default=Path("build/bench/worker_start.json"))
    options = arguments.parse_args()
    ways = {
        "process": _process,
        "fork server": _fork_server,
        "model change": _model_change,
        "ray": _ray,
    }
    raw: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, way in ways.items():
            with TemporaryDirectory(prefix="everlift-start-") as directory:
                raw[name].append(asyncio.run(way(Path(directory))))
            print(name, json.dumps(raw[name][-1]), flush=True)
    medians = {name: _medians(runs) for name, runs in raw.items()}
    reading = {
        name: load_weights(options.repeats, latency_s)
        for name, latency_s in (("disk", 0.0), ("distant", _LATENCY_S))
    }
    report.write(
        options.out,
        packages=("torch", "ray"),
        settings={"repeats": options.repeats},
        raw={"runs": raw, "medians": medians, "weights_s": reading},
        ratios={
            f"{name}_vs_process": round(medians[name]["total_s"] / medians["process"]["total_s"], 3)
            for name in ("fork server", "model change", "ray")
        }
        | {
            f"weights_{name}_{count}_readers_vs_1": round(
                statistics.median(seconds) / statistics.median(by_count[1]), 3
            )
            for name, by_count in reading.items()
            for count, seconds in by_count.items()
            if count > 1
        },
    )


def load_weights(repeats: int, latency_s: float) -> dict[int, list[float]]:
    """Return the seconds of each load, by number of readers.

    Each read takes ``latency_s`` longer than this machine's disk needs.
    """
    seconds: dict[int, list[float]] = {count: [] for count in _READERS}
    with TemporaryDirectory(prefix="everlift-weights-") as directory:
        _save(Path(directory))
        decoder = Decoder(
            read_spec(directory),
            64,
            Placement(Rank(0, 1), torch.bfloat16, torch.device("cpu")),
        )
        # The first load also allocates the parameters' memory, so it is not measured.
        weights.load(decoder, directory)
        with _delayed_reads(latency_s):
            for _ in range(repeats):
                for count in _READERS:
                    _drop_pages(Path(directory))
                    began = time.monotonic()
                    weights.load(decoder, directory, num_readers=count)
                    seconds[count].append(round(time.monotonic() - began, 3))
                last = {count: each[-1] for count, each in seconds.items()}
                print("weights", latency_s, last, flush=True)
    return seconds


@contextmanager
def _delayed_reads(latency_s: float) -> Iterator[None]:
    read = os.preadv

    def late(descriptor: int, buffers: list[memoryview], place: int) -> int:
        time.sleep(latency_s)
        return read(descriptor, buffers, place)

    with patch.object(os, "preadv", late if latency_s else read):
        yield


def _save(directory: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(LlamaConfig(**_SHAPE)).save_pretrained(directory, max_shard_size="250MB")
    torch.set_default_dtype(torch.float32)


def _drop_pages(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}


def _config(directory: Path) -> Config:
    return Config(
        state_dir=directory,
        router=RouterConfig(port=free_port(), http_host=""),
        worker=WorkerConfig(kv_cache_mib=64, num_threads=1),
        num_workers=2,
    )


async def _process(directory: Path) -> dict[str, float]:
    async with ProcessCluster(_config(directory)) as cluster:
        await cluster.kill_worker(1)
        return await _measure_start(directory, cluster.addresses, cluster.restart_worker(1))


async def _fork_server(directory: Path) -> dict[str, float]:
    """Kill a worker, which the cluster then restarts, and measure its start."""
    async with ProcessCluster(_config(directory), revive=True) as cluster:
        return await _measure_start(directory, cluster.addresses, cluster.kill_worker(1))


async def _model_change(directory: Path) -> dict[str, float]:
    other = shutil.copytree(DEMO_MODEL, directory / "other")
    config = replace(
        _config(directory),
        num_workers=1,
        models={"other": ModelGroup(str(other), worker=_config(directory).worker)},
    )
    async with ProcessCluster(config) as cluster, AsyncClient(cluster.addresses) as client:
        workers = (await client.status()).workers
        [worker_id] = [it.worker_id for it in workers if it.model == "other"]
        change = client.change_model(worker_id, DEMO_MODEL.name)
        return await _measure_start(directory, cluster.addresses, change)


async def _ray(directory: Path) -> dict[str, float]:
    config = replace(
        _config(directory),
        num_workers=1,
        autoscale=AutoscaleConfig(min_workers=1, max_workers=2, drain_target=1.0),
        worker=WorkerConfig(kv_cache_mib=64, num_threads=1, max_num_seqs=2),
    )
    async with RayCluster(config) as cluster, AsyncClient(cluster.addresses) as client:
        asked = [asyncio.create_task(_send_request(client)) for _ in range(_REQUESTS)]
        try:
            await _wait_for_decision(directory)
            return await _measure_start(directory, cluster.addresses, asyncio.sleep(0))
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


async def _send_request(client: AsyncClient) -> None:
    await client.generate("Once", max_tokens=400, ignore_eos=True).text()


async def _wait_for_decision(directory: Path) -> None:
    """Wait until the autoscaler has logged its decision for another worker."""
    while not any(
        '"event": "target number of workers changed"' in path.read_text()
        for path in (directory / "logs").glob("autoscaler*.log")
    ):
        await asyncio.sleep(_POLL_S)


async def _measure_start(
    directory: Path, routers: Sequence[str], asking: Coroutine[Any, Any, Any]
) -> dict[str, float]:
    """Await ``asking``, which requests a worker, and measure until a new worker is up.

    Return the seconds in total, by part of the rank's log, and before the rank's process.
    """
    async with AsyncClient(routers) as client:
        before = {worker.worker_id for worker in (await client.status()).workers}
        began = time.monotonic()
        await asking
        while not (new := await _new_workers(client, before)):
            await asyncio.sleep(_POLL_S)
        total_s = time.monotonic() - began
    parts = _parts(directory, new.pop())
    rest_s = total_s - sum(parts.values())
    return {"total_s": round(total_s, 3)} | parts | {"before_s": round(max(0.0, rest_s), 3)}


async def _new_workers(client: AsyncClient, before: set[str]) -> set[str]:
    workers = (await client.status()).workers
    return {worker.worker_id for worker in workers if worker.alive} - before


def _parts(directory: Path, worker_id: str) -> dict[str, float]:
    for path in (directory / "logs").glob("worker*.log"):
        for line in path.read_text().splitlines():
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "rank ready" and event["worker_id"] == worker_id:
                return {name: float(event.get(name, 0.0)) for name in _PARTS}
    raise AssertionError(f'no log has the event "rank ready" of worker {worker_id}')


if __name__ == "__main__":
    main()
