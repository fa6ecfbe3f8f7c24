"""The servers that `make bench-online` compares: how each is started, and what its processes are.

    everlift       router, embedded ledger (everysec, before_delivery) and one worker, in plain
                   processes: `everlift up --no-ray`
    everlift_ray   the same under a local Ray: `everlift up`
    vllm           `vllm serve`, CPU build: both cores bound, torch.compile, tcmalloc
    ray_llm        Ray Serve LLM on that vLLM with its defaults
    ray_llm_best   the same with direct streaming, HAProxy and RAY_SERVE_THROUGHPUT_OPTIMIZED

Peers have environments of their own. All have 2 GiB of KV cache, bfloat16, at most 1,024 tokens a
sequence, and no caches of prefixes but Everlift's, which the load leaves without a hit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.free_port import free_port
from tests.perf.online_load import Client
from tests.perf.online_parts import PartsOf, Process, below

ROOT = Path(__file__).parents[2]
#: What differs from the worker's defaults: as the peers have it.
WORKER: Mapping[str, Any] = {"kv_cache_mib": 2048, "max_model_len": 1024, "dtype": "bfloat16"}
_START_S = 300.0
_LOOK_S = 0.5
_END_S = 60.0


class NotServing(Exception):
    """A server that ended, or does not answer, before it was measured. Its log says more."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a start of a server is given: a port, the model, a directory for its own files."""

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
async def serving(server: Server, model: Path, directory: Path) -> AsyncIterator[Client]:
    """A client of it, when it answers. Raises NotServing. Nothing of it is left in the end, nor any
    other process below this one."""
    place = Place(free_port(), model, directory)
    with (directory / f"{server.name}.log").open("wb") as log:
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
            await _answering(server, client, process)
            yield client
    finally:
        await asyncio.to_thread(_end, process)


async def _answering(server: Server, client: Client, process: subprocess.Popen[bytes]) -> None:
    late = time.monotonic() + _START_S
    while not await client.is_ready():
        if process.poll() is not None or time.monotonic() > late:
            raise NotServing(server.name)
        await asyncio.sleep(_LOOK_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    for left in below(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(left.pid, signal.SIGKILL)
    process.wait()
    # Whose parents have ended are ours by now.
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


# Everlift


def everlift(name: str, *, with_ray: bool) -> Server:
    def command(place: Place) -> list[str]:
        settings = {
            "state_dir": place.directory / name,
            "router.port": 0,
            "router.http_port": place.port,
            "router.metrics_port": 0,
            **{f"worker.{key}": value for key, value in WORKER.items()},
        }
        return [
            *(sys.executable, "-m", "cluster.cli", "up", "--model", str(place.model)),
            *(() if with_ray else ("--no-ray",)),
            *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")),
        ]

    return Server(name, command, _everlift_part)


def _everlift_part(process: Process) -> tuple[str, str]:
    """The first thread of a rank has its event loop, except under Ray; the others compute."""
    for mark, parts in {
        "valkey-server": ("ledger", "ledger"),
        "cluster.process router": ("router", "router"),
        "cluster.nursery_process": ("engine", "worker's event loop"),
        "ServeReplica:everlift:router": ("router", "router"),
        "ray::RankActor": ("engine and worker's event loop",) * 2,
    }.items():
        if mark in process.command:
            return parts
    return "others", "others"


# vLLM, alone and under Ray


@dataclass(frozen=True, slots=True)
class Peers:
    """Environments of others, and what their processes have to load before anything else."""

    vllm: Path
    ray_llm: Path
    preload: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": self.preload,
            "VLLM_CPU_KVCACHE_SPACE": str(WORKER["kv_cache_mib"] // 1024),
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "",
        }


_ENVIRONMENTS = ROOT / "build" / "peers"
PEERS = Peers(_ENVIRONMENTS / "vllm", _ENVIRONMENTS / "ray-llm", "")


def vllm(peers: Peers) -> Server:
    def command(place: Place) -> list[str]:
        return [
            *(str(peers.vllm / "bin/vllm"), "serve", str(place.model)),
            *("--host", "127.0.0.1", "--port", str(place.port), "--dtype", WORKER["dtype"]),
            *("--max-model-len", str(WORKER["max_model_len"]), "--no-enable-prefix-caching"),
            "--disable-uvicorn-access-log",
        ]

    return Server("vllm", command, _vllm_part, peers.environment)


def ray_llm(name: str, peers: Peers, environment: Mapping[str, str]) -> Server:
    def command(place: Place) -> list[str]:
        return [
            *(
                str(peers.ray_llm / "bin/python"),
                str(Path(__file__).with_name("online_ray_llm.py")),
            ),
            *("--model", str(place.model), "--port", str(place.port)),
            *("--max-model-len", str(WORKER["max_model_len"])),
        ]

    return Server(name, command, _vllm_part, peers.environment | environment)


#: Its best mode.
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
                "EngineCore": "engine",
                "vllm serve": "API server",
                "haproxy": "HAProxy",
                "ServeReplica": "replicas",
                "ProxyActor": "proxy",
            }.items()
            if mark in process.command
        ),
        "others",
    )
    return part, part
