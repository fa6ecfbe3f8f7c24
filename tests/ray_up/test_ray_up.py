"""`ray up` over ssh to three hosts.

The cluster serves, is scaled up, survives a disconnected host and a lost host, and is torn down.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from everlift import AsyncClient
from everlift.errors import EverliftError
from everlift.v1 import inference_pb2 as pb
from tests.conftest import leaving_nothing
from tests.ray_up.hosts import Hosts, missing
from worker.config import FakeModel
from worker.runner.fake_runner import expected_tokens

pytestmark = [
    pytest.mark.ray_up,
    pytest.mark.timeout(0),
    pytest.mark.asyncio(loop_scope="module"),
]

REPOSITORY = Path(__file__).parents[2]
FILES = REPOSITORY / "deploy" / "ray-up"
MODEL = FakeModel(step_time=0.05)
#: A worker takes the two cores that Ray sees on every host.
SETTINGS: dict[str, Any] = {
    "model": "fake",
    "num_routers": 1,
    "router_resource": "everlift_router",
    "router": {"host": "0.0.0.0"},
    "worker": {
        "num_threads": 2,
        "num_blocks": 512,
        "max_num_seqs": 4,
        "fake": {"step_time": MODEL.step_time},
    },
    "autoscale": {"min_workers": 1, "max_workers": 3, "ttft_target": 1.0, "down_delay": 600.0},
}
#: A busy machine may need three attempts of 30 s for the start of each node.
_UP_S = 600.0
_GROW_S = 480.0
#: Raylets end after a minute without the head.
_DOWN_S = 120.0


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Override the check after each test: the cluster stays, so it runs at the cluster's end."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if lacks := missing():
        pytest.skip(f"hosts of namespaces need {', '.join(lacks)}")
    with leaving_nothing(), Hosts(3, tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def cluster(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Path of the running cluster's YAML.

    It is deploy/ray-up/machines.yaml with these hosts and their settings, and with this environment
    instead of an installation.
    """
    staged = tmp_path_factory.mktemp("everlift")
    shutil.copytree(FILES, staged / "deploy" / "ray-up", ignore=shutil.ignore_patterns("secrets"))
    (staged / "deploy" / "ray-up" / "settings.yaml").write_text(yaml.safe_dump(SETTINGS))
    subprocess.run(["bash", staged / "deploy" / "ray-up" / "secrets.sh"], check=True)
    file = staged / "deploy" / "ray-up" / "machines.yaml"
    config = yaml.safe_load(file.read_text())
    head, *workers = hosts.all
    config["provider"] |= {"head_ip": head.address, "worker_ips": [w.address for w in workers]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.key)}
    here = f"EVERLIFT_VENV={sys.prefix} PYTHONPATH={REPOSITORY}:{REPOSITORY / 'proto'}"
    config["setup_commands"] = []
    for role in ("head", "worker"):
        key = f"{role}_start_ray_commands"
        config[key] = [f"{here} {command}" for command in config[key]]
    file.write_text(yaml.safe_dump(config))
    ray_up(staged, "up", "-y", "--no-config-cache", str(file))
    yield file
    stop = "bash ~/everlift/deploy/ray-up/node.sh stop-ledger"
    ray_up(staged, "exec", str(file), stop)
    ray_up(staged, "down", "-y", str(file))
    give_up = time.monotonic() + _DOWN_S
    # The last host is switched off.
    for host in hosts.all[:-1]:
        while left := [line for line in host.run("ps -eo args").splitlines() if _is_ours(line)]:
            assert time.monotonic() < give_up, left
            time.sleep(1.0)


def _is_ours(process: str) -> bool:
    return any(word in process for word in ("raylet", "gcs_server", "everlift ledger", "valkey"))


def ray_up(clone: Path, *arguments: str) -> None:
    ray = Path(sys.executable).with_name("ray")
    # With the provider "local", Ray's autoscaler v2 adds no node.
    environment = os.environ | {"RAY_UP_enable_autoscaler_v2": "0"}
    done = subprocess.run(
        [ray, *arguments],
        cwd=clone,
        env=environment,
        timeout=_UP_S,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def address(cluster: Path, hosts: Hosts) -> str:
    return f"{hosts.all[0].address}:50051"


async def alive(client: AsyncClient) -> list[pb.WorkerStatus]:
    try:
        return [worker for worker in (await client.status()).workers if worker.alive]
    except EverliftError:
        return []


async def until_workers(client: AsyncClient, count: int, seconds: float) -> list[pb.WorkerStatus]:
    async with asyncio.timeout(seconds):
        while len(workers := await alive(client)) != count:
            await asyncio.sleep(0.5)
    return workers


class Load:
    """Closed-loop requests, ``at_once`` at a time, each compared with its right answer."""

    def __init__(self, client: AsyncClient, at_once: int, tokens: int) -> None:
        self.done = 0
        self._client = client
        self._tokens = tokens
        self._rng = Random(1)
        self._is_over = False
        self._tasks = [asyncio.create_task(self._go_on()) for _ in range(at_once)]

    async def _go_on(self) -> None:
        while not self._is_over:
            prompt = [self._rng.randrange(256) for _ in range(20)]
            stream = self._client.generate(prompt, max_tokens=self._tokens, temperature=0.0)
            tokens = [token async for chunk in stream for token in chunk.token_ids]
            assert tokens == expected_tokens(prompt, self._tokens, MODEL)
            self.done += 1

    async def finish(self) -> int:
        """Stop; return the number of correct requests. Raises the error of a failed one."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        return self.done


async def test_cluster_scales_with_queue_and_survives_host_loss(address: str, hosts: Hosts) -> None:
    async with AsyncClient(address) as client:
        await until_workers(client, 1, _UP_S)
        load = Load(client, at_once=16, tokens=60)
        # 16 concurrent requests exceed a worker's 4 slots: hosts are added until there are three.
        workers = await until_workers(client, 3, _GROW_S)
        assert {worker.address.partition(":")[0] for worker in workers} == {
            host.address for host in hosts.all
        }
        hosts.all[1].unplug()
        await until_workers(client, 2, 30.0)
        await asyncio.sleep(3.0)
        hosts.all[1].plug_in()
        await until_workers(client, 3, _GROW_S)
        hosts.all[2].power_off()
        await until_workers(client, 2, 30.0)
        assert await load.finish() > 50


async def test_ray_up_rejects_api_client_without_token(cluster: Path, hosts: Hosts) -> None:
    stranger = f"RAY_AUTH_MODE=disabled {Path(sys.executable).with_name('ray')} list nodes"
    with pytest.raises(subprocess.CalledProcessError):
        hosts.all[0].run(f"{stranger} --address http://127.0.0.1:8265")
