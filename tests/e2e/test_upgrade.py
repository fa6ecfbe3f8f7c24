"""Upgrades under load, as KubeRay performs them.

A second Ray cluster uses the same ledger. Clients are switched to it when its application runs, and
the first cluster then ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from cluster.ray import local_ray
from router.ledger.config import URL_VARIABLE, LedgerConfig
from router.ledger.embedded.embedded import EmbeddedLedger
from tests.conftest import leaving_nothing
from tests.support.chart import Object, running_helm
from tests.support.free_port import free_port
from tests.support.router import retrying
from tests.support.serve_api import call
from worker.config import FakeModel
from worker.runner.fake_runner import expected_tokens

# Ray and Serve emit warnings of their own.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]

#: Two workers generate 160 tokens per second.
MODEL = FakeModel(step_time=0.05)
SEQUENCES, WORKERS = 4, 2
SATURATION = WORKERS * SEQUENCES / MODEL.step_time
TOKENS = 40
LOAD = 0.7
WINDOW_S = 10.0
#: Settings of the routers' readiness probe (helm/templates/_containers.tpl).
PROBE_PERIOD_S, FAILURE_THRESHOLD = 2.0, 2
_TIMEOUT_S = 300.0


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Override the check after each test: it runs at the end of Ray, which starts processes."""


def values(model: str = "fake", **worker: object) -> Object:
    settings = {"num_blocks": 256, "max_num_seqs": SEQUENCES, "num_threads": 1}
    return {
        "model": {"name": model},
        "routers": {"replicas": 1},
        # When the upgrade begins, more workers than the minimum are running.
        "workers": {"device": "cpu", "min": 1, "max": 4},
        "config": {
            "worker": {**settings, "fake": {"step_time": MODEL.step_time}, **worker},
            "autoscale": {"down_delay": 600.0},
        },
    }


@pytest.fixture(scope="module")
def versions() -> list[Object]:
    """Serve applications as Helm renders them.

    They are the first version, the same model with another setting, and the demo model.
    """
    changes: list[Object] = [{}, {"watermark": 0.02}, {"model": ""}]
    with running_helm() as helm:
        return [helm.render(values(**more)).application for more in changes]


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = EmbeddedLedger(LedgerConfig(), listen=("127.0.0.1", free_port()))
    url = server.start(tmp_path / "ledger")
    monkeypatch.setenv(URL_VARIABLE, url)
    yield url
    server.stop()


class RayCluster:
    """Ray cluster with Serve's REST API, and the application for it."""

    def __init__(self, application: Object, state_dir: Path) -> None:
        from ray.cluster_utils import Cluster

        self._api_port = free_port()
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 4,
                "resources": {"everlift_router": 1, "everlift_worker": 4},
                "include_dashboard": True,
                "dashboard_port": self._api_port,
            },
        )
        port, metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self.probe = f"http://127.0.0.1:{metrics_port}/ready"
        arguments = deepcopy(application["args"])
        # Listen on loopback only, at free ports.
        arguments["router"] |= {
            "host": "127.0.0.1",
            "port": port,
            "http_host": "",
            "metrics_host": "127.0.0.1",
            "metrics_port": metrics_port,
        }
        arguments["state_dir"] = str(state_dir)
        arguments["worker"]["ready_dir"] = str(state_dir / "ready")
        hook = {"worker_process_setup_hook": "cluster.ray.local_ray.bind_replicas"}
        self._application = application | {"args": arguments, "runtime_env": hook}
        self.state_dir = state_dir

    @property
    def _api(self) -> str:
        return f"http://127.0.0.1:{self._api_port}/api/serve/applications/"

    async def deploy(self) -> None:
        """Deploy the application, and wait until it runs."""
        body = {"proxy_location": "Disabled", "applications": [self._application]}
        await asyncio.to_thread(call, self._api, body)
        async with asyncio.timeout(_TIMEOUT_S):
            while (found := await self._status())["status"] != "RUNNING":
                assert found["status"] != "DEPLOY_FAILED", found
                await asyncio.sleep(0.5)

    async def _status(self) -> Any:
        status = await asyncio.to_thread(call, self._api)
        return status["applications"]["everlift"]

    async def replicas(self, deployment: str) -> int:
        """Return the number of running replicas of a deployment."""
        found = (await self._status())["deployments"][deployment]["replicas"]
        return sum(replica["state"] == "RUNNING" for replica in found)

    def leave(self) -> None:
        """Notify all pods' processes as a pod's hook does before it ends (helm/files/leave.sh)."""
        for file in (self.state_dir / "logs").glob("*.log"):
            kind, _, pid = file.stem.rpartition("-")
            if kind in ("router", "worker.rank-0"):
                os.kill(int(pid), signal.SIGUSR1)

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_clusters() -> Iterator[ExitStack]:
    local_ray.prepare()
    with leaving_nothing(), ExitStack() as stack:
        yield stack


class Service:
    """Proxy that connects each client to a random ready router, like the chart's Service."""

    def __init__(self, clusters: list[RayCluster]) -> None:
        self._clusters = clusters
        self._failures = {cluster.address: FAILURE_THRESHOLD for cluster in clusters}
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> list[str]:
        return [it for it, failures in self._failures.items() if failures < FAILURE_THRESHOLD]

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self._probing = asyncio.create_task(self._probe_all())
        return "{}:{}".format(*self._server.sockets[0].getsockname())

    async def stop(self) -> None:
        self._probing.cancel()
        self._server.close()
        await asyncio.gather(*self._connections)

    async def _probe_all(self) -> None:
        while True:
            for cluster in self._clusters:
                is_ready = await asyncio.to_thread(_answers, cluster.probe)
                failures = 0 if is_ready else self._failures[cluster.address] + 1
                self._failures[cluster.address] = failures
            await asyncio.sleep(PROBE_PERIOD_S)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            host, port = random.choice(self.ready).split(":")
            back, forth = await asyncio.open_connection(host, port)
            try:
                await asyncio.gather(_copy(reader, forth), _copy(back, writer))
            finally:
                forth.close()
        except (OSError, IndexError):
            # No router is ready, or the chosen one has ended.
            pass
        finally:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class Load:
    """Requests at constant intervals, and their results."""

    def __init__(self, addresses: list[str], model: str = "fake") -> None:
        self.addresses = addresses
        #: model that clients request
        self.model = model
        self.failures: list[str] = []
        self.delivered: Counter[int] = Counter()
        self.finished: Counter[str] = Counter()
        self._began = time.monotonic()
        self._requests: set[asyncio.Task[None]] = set()
        self._sending = asyncio.create_task(self._send())

    async def stop(self) -> None:
        self._sending.cancel()
        await asyncio.gather(*self._requests)

    @property
    def window(self) -> int:
        return int((time.monotonic() - self._began) / WINDOW_S)

    async def _send(self) -> None:
        for seed in range(1_000_000):
            task = asyncio.create_task(self._ask(seed, list(self.addresses), self.model))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
            due = self._began + (seed + 1) * TOKENS / (LOAD * SATURATION)
            await asyncio.sleep(due - time.monotonic())

    async def _ask(self, seed: int, addresses: list[str], model: str) -> None:
        prompt = [seed % 256, seed // 256, *range(14)]
        tokens: list[int] = []
        try:
            async with retrying.client(addresses) as client:
                stream = client.generate(
                    prompt, max_tokens=TOKENS, temperature=0.0, model=model, ignore_eos=True
                )
                async for chunk in stream:
                    tokens += chunk.token_ids
                    self.delivered[self.window] += len(chunk.token_ids)
        except Exception as error:
            self.failures.append(repr(error))
        else:
            self.finished[model] += 1
            expected = expected_tokens(prompt, TOKENS, MODEL)
            is_wrong = tokens != expected if model == "fake" else len(tokens) != TOKENS
            if is_wrong:
                self.failures.append(f"request {seed} has other tokens")


async def total_workers(address: str) -> int:
    async with retrying.client(address) as client:
        return sum(worker.alive for worker in (await client.status()).workers)


async def is_steady(address: str) -> bool:
    """Return whether there are enough workers for the load, and the queue is empty."""
    async with retrying.client(address) as client:
        status = await client.status()
    return sum(worker.alive for worker in status.workers) >= WORKERS and not status.queued


async def served_model(address: str) -> str:
    """Return the name of the model that a new connection leads to."""
    async with retrying.client(address) as client:
        return (await client.models()).models[0].name


async def test_upgrade_fails_no_request_and_keeps_throughput(
    ledger: str, versions: list[Object], tmp_path: Path
) -> None:
    old_version, new_version, _ = versions
    with ray_clusters() as stack:
        old = RayCluster(old_version, tmp_path / "old")
        stack.callback(old.close)
        # The nodes start before the load, because their start takes CPU time of this machine.
        new = RayCluster(new_version, tmp_path / "new")
        stack.callback(new.close)
        await old.deploy()
        load = Load([old.address])
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while not await is_steady(old.address):
                    await asyncio.sleep(0.5)
            first = load.window + 1
            await asyncio.sleep((first + 2) * WINDOW_S - (time.monotonic() - load._began))
            serving = await total_workers(old.address)
            await new.deploy()
            # KubeRay now switches clients to the new cluster, which must have the same capacity.
            assert await new.replicas("worker") >= serving
            load.addresses = [new.address, old.address]
            await asyncio.sleep(WINDOW_S)
            load.addresses = [new.address]
            await asyncio.to_thread(old.leave)
            await asyncio.sleep(6.0)
            await asyncio.to_thread(old.close)
            await asyncio.sleep(3 * WINDOW_S)
            last = load.window - 1
        finally:
            await load.stop()
    assert load.failures == []
    before = min(load.delivered[window] for window in (first, first + 1))
    during = {window: load.delivered[window] for window in range(first + 2, last + 1)}
    print(f"{before} tokens a window before, then {list(during.values())}")
    assert min(during.values()) >= 0.8 * before


async def test_upgrade_sends_no_request_to_unknown_model(
    ledger: str, versions: list[Object], tmp_path: Path
) -> None:
    old_version, _, new_version = versions
    with ray_clusters() as stack:
        old = RayCluster(old_version, tmp_path / "old")
        stack.callback(old.close)
        new = RayCluster(new_version, tmp_path / "new")
        stack.callback(new.close)
        await old.deploy()
        service = Service([old, new])
        address = await service.start()
        async with asyncio.timeout(_TIMEOUT_S):
            while service.ready != [old.address]:
                await asyncio.sleep(0.1)
        load = Load([address])
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while not await is_steady(old.address):
                    await asyncio.sleep(0.5)
            serving = await total_workers(old.address)
            deploying = asyncio.create_task(new.deploy())
            async with asyncio.timeout(_TIMEOUT_S):
                while new.address not in service.ready:
                    # Clients reach only the old model while the new one's workers start.
                    assert service.ready == [old.address]
                    await asyncio.sleep(0.05)
            async with asyncio.timeout(_TIMEOUT_S):
                while (name := await served_model(address)) == "fake":
                    await asyncio.sleep(0.1)
            load.model = name
            await deploying
            assert await new.replicas("worker") >= serving
            async with asyncio.timeout(_TIMEOUT_S):
                while service.ready != [new.address]:
                    await asyncio.sleep(0.1)
            await asyncio.sleep(WINDOW_S)
            await asyncio.to_thread(old.leave)
            await asyncio.sleep(6.0)
            await asyncio.to_thread(old.close)
            await asyncio.sleep(WINDOW_S)
        finally:
            await load.stop()
            await service.stop()
    assert load.failures == []
    print(f"requests finished: {dict(load.finished)}")
    assert min(load.finished["fake"], load.finished[name]) >= 20
