"""Servers that `make bench-online` compares: their commands, and the parts of their processes.

    everlift       router, embedded ledger (everysec, before_delivery) and one worker, in plain
                   processes: `everlift up --no-ray`
    everlift_ray   the same under a local Ray: `everlift up`
    everlift_vllm  `everlift up --no-ray` with a worker whose engine is vLLM, in vLLM's environment
    vllm           `vllm serve`, CPU build: OpenMP threads bound to all cores, torch.compile,
                   tcmalloc if it is installed
    vllm_matched   the same with the settings of everlift_vllm's engine: not compiled, equal block
                   size, batch limits and scheduling policy, and an enabled prefix cache
    ray_llm        Ray Serve LLM with its defaults, on the same version of vLLM
    ray_llm_best   the same with direct streaming, HAProxy and RAY_SERVE_THROUGHPUT_OPTIMIZED

Each peer has a Python environment of its own. All servers have 2 GiB of KV cache, the dtype that a
worker chooses on this machine, and at most 1,024 tokens per sequence. The prefix caches of vllm and
ray_llm are disabled; the others are enabled, but the load has almost no hits.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.online.online_load import Client
from benchmarks.online.online_parts import PartsOf, Process, descendants
from benchmarks.peer import KV_CACHE_GIB, RAY_LLM, VLLM, vllm_environment
from everlift.hashes import BLOCK_SIZE
from tests.support.free_port import free_port
from worker.config import WorkerConfig
from worker.device.device import choose_dtype
from worker.device.device_kind import DeviceKind

ROOT = Path(__file__).parents[2]
#: Settings of Everlift's worker that differ from its defaults, to match the peers.
WORKER: Mapping[str, Any] = {
    "kv_cache_mib": KV_CACHE_GIB * 1024,
    "max_model_len": 1024,
    "dtype": str(choose_dtype("auto", torch.device("cpu"))).removeprefix("torch."),
}
#: Limit of a start; the first start of a peer compiles the model.
_START_S = 900.0
_LOOK_S = 0.5
_END_S = 60.0


class NotServing(Exception):
    """Raised if a server ended or did not answer within the time limit of its start."""


@dataclass(frozen=True, slots=True)
class Place:
    """Arguments of a server's start: HTTP port, model, and directory for its files."""

    port: int
    model: Path
    directory: Path


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    command: Callable[[Place], list[str]]
    parts_of: PartsOf
    environment: Mapping[str, str] = field(default_factory=dict)


@asynccontextmanager
async def serving(server: Server, model: Path, logs: Path) -> AsyncIterator[Client]:
    """Start the server, wait until it answers, and yield a client of it.

    At the end, kill the server and all other descendants of this process; only the log in ``logs``
    remains. Raises NotServing if the server ends or does not answer in time.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="everlift-online-") as directory:
        place = Place(free_port(), model, Path(directory))
        async with _started(server, place, logs / f"{server.name}.log") as client:
            yield client


@asynccontextmanager
async def _started(server: Server, place: Place, log_path: Path) -> AsyncIterator[Client]:
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            server.command(place),
            cwd=ROOT,
            env=os.environ | dict(server.environment),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        async with Client(f"http://127.0.0.1:{place.port}") as client:
            await _answering(client, process, log_path)
            yield client
    finally:
        await asyncio.to_thread(_end, process)


async def _answering(client: Client, process: subprocess.Popen[bytes], log_path: Path) -> None:
    late = time.monotonic() + _START_S
    while not await client.is_ready():
        if process.poll() is not None or time.monotonic() > late:
            raise NotServing(f"its log: {log_path}")
        await asyncio.sleep(_LOOK_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    for left in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(left.pid, signal.SIGKILL)
    process.wait()
    # Reap the descendants that this process has adopted (adopt_orphans).
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


# Everlift


def everlift(name: str, *, with_ray: bool, more: Mapping[str, Any] | None = None) -> Server:
    """Return an Everlift server. ``more`` maps full setting names to added or replaced values."""

    def command(place: Place) -> list[str]:
        settings = {
            "state_dir": place.directory / name,
            "router.port": 0,
            "router.http_port": place.port,
            "router.metrics_port": 0,
            **{f"worker.{key}": value for key, value in WORKER.items()},
            **(more or {}),
        }
        return [
            *(sys.executable, "-m", "cluster.cli", "up", "--model", str(place.model)),
            *(() if with_ray else ("--no-ray",)),
            *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")),
        ]

    return Server(name, command, _everlift_part)


def everlift_vllm() -> Server:
    """Return an Everlift server whose worker computes with vLLM."""
    engine = {"worker.engine": "vllm", "worker.python": (VLLM / "bin/python").absolute()}
    return everlift("everlift_vllm", with_ray=False, more=engine)


def _everlift_part(process: Process) -> tuple[str, str]:
    """Return the part of the process, and that of its first thread.

    The first thread of a rank runs the event loop and the others compute. Under Ray the event loop
    runs in another thread, so that both are one part.
    """
    for mark, parts in {
        "valkey-server": ("ledger", "ledger"),
        "cluster.local.process router": ("router", "router"),
        "cluster.local.fork_server_process": ("engine", "worker's event loop"),
        "cluster.local.process rank": ("engine", "worker's event loop"),
        "ServeReplica:everlift:router": ("router", "router"),
        "ray::RankActor": ("engine and worker's event loop",) * 2,
    }.items():
        if mark in process.command:
            return parts
    return "others", "others"


# vLLM, alone and under Ray


_CORES = os.cpu_count() or 1
#: Peers do not import the sources of Everlift.
_NO_SOURCES = {"PYTHONPATH": ""}


def vllm() -> Server:
    return _vllm("vllm", ["--no-enable-prefix-caching"])


def vllm_matched() -> Server:
    """Return a `vllm serve` with the settings of vLLM in a worker of Everlift."""
    worker = WorkerConfig()
    settings = {
        "--block-size": BLOCK_SIZE,
        "--max-num-seqs": worker.max_num_seqs,
        "--max-num-batched-tokens": worker.batched_tokens(DeviceKind.CPU),
        "--scheduling-policy": "priority",
    }
    more = [text for option, value in settings.items() for text in (option, str(value))]
    return _vllm("vllm_matched", ["--enable-prefix-caching", "--enforce-eager", *more])


def _vllm(name: str, more: Sequence[str]) -> Server:
    def command(place: Place) -> list[str]:
        return [
            # `vllm serve` looks for its version under a name that the CPU build does not have.
            *(str(VLLM / "bin/python"), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(place.model), "--served-model-name", place.model.name),
            *("--dtype", WORKER["dtype"]),
            *("--max-model-len", str(WORKER["max_model_len"]), *more),
            *("--host", "127.0.0.1", "--port", str(place.port), "--disable-uvicorn-access-log"),
        ]

    return Server(name, command, _vllm_part, vllm_environment(VLLM, _CORES) | _NO_SOURCES)


def ray_llm(name: str, mode: Mapping[str, str]) -> Server:
    """Return a server of Ray Serve LLM; ``mode`` are environment variables of Ray Serve."""
    variables = vllm_environment(RAY_LLM, _CORES) | _NO_SOURCES | dict(mode)
    preload = variables.pop("LD_PRELOAD")

    def command(place: Place) -> list[str]:
        return [
            *(str(RAY_LLM / "bin/python"), str(Path(__file__).with_name("online_ray_llm.py"))),
            *("--model", str(place.model), "--port", str(place.port)),
            *("--max-model-len", str(WORKER["max_model_len"]), "--dtype", WORKER["dtype"]),
            *("--preload", preload),
        ]

    return Server(name, command, _vllm_part, variables)


#: Environment variables of the mode with the highest throughput.
RAY_LLM_BEST = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
}


def _vllm_part(process: Process) -> tuple[str, str]:
    part = next(
        (
            part
            for mark, part in {
                "VLLM::EngineCore": "scheduler",
                "VLLM::Worker": "engine",
                "api_server": "API server",
                "haproxy": "HAProxy",
                "ServeReplica": "replicas",
                "ProxyActor": "proxy",
            }.items()
            if mark in process.command
        ),
        "others",
    )
    return part, part
