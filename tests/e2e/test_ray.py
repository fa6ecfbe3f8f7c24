"""Everlift under Ray Serve on two local nodes: one worker with a rank on each node."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cluster.config import Config
from cluster.demo import prompts
from cluster.local.processes import ProcessCluster
from cluster.ray import local_ray
from cluster.ray.ray_cluster import RayCluster
from everlift.client.client import AsyncClient
from everlift.client.stream import Stream
from everlift.v1 import inference_pb2 as pb
from router.config import RouterConfig
from router.observability.metrics.catalogue import STEP_PARTS
from tests.conftest import leaving_nothing
from tests.support.free_port import free_port
from tests.support.router import retrying
from tests.support.router.scrape import scraped
from worker.config import WorkerConfig

# Ray and Serve emit warnings of their own.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]
TASKS = prompts.mixed(6, seed=3)


def config(state_dir: Path, ranks: int) -> Config:
    return Config(
        state_dir=state_dir,
        # As the chart sets it for a worker that is larger than a pod.
        nodes_per_worker=ranks,
        router=RouterConfig(port=free_port(), http_port=0, drain=1.0),
        worker=WorkerConfig(
            model="",
            tensor_parallel=ranks,
            num_threads=1,
            num_blocks=256,
            dtype="float32",
            # A rank may lack a core for seconds.
            rank_silence=20.0,
        ),
    )


#: Resource that only the head node has.
HEAD = "head"


@pytest.fixture(scope="module")
def two_nodes() -> Any:
    local_ray.prepare()
    from ray.cluster_utils import Cluster

    with leaving_nothing():
        head = {"num_cpus": 1, "resources": {HEAD: 1.0}}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1)
        yield cluster
        cluster.shutdown()


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Override the check after each test: it runs at the end of Ray, which starts processes."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    two_nodes: Any, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RayCluster]:
    settings = config(tmp_path_factory.mktemp("ray"), ranks=2)
    async with RayCluster(replace(settings, ray_address=two_nodes.address)) as cluster:
        yield cluster


async def answer(client: AsyncClient, prompt: str) -> tuple[list[int], str]:
    stream = client.generate(prompt, temperature=0)
    tokens, text = [], ""
    async for chunk in stream:
        tokens.extend(chunk.token_ids)
        text += chunk.text
    return tokens, text


async def answers(address: str) -> list[tuple[list[int], str]]:
    async with retrying.client(address) as client:
        return await asyncio.gather(*(answer(client, task.prompt) for task in TASKS))


async def running_answers(address: str) -> asyncio.Task[list[tuple[list[int], str]]]:
    """Start all requests, and return their task once some of them run at the only worker.

    Start them again if they end before the worker's status is read, as on a busy machine.
    """
    work = asyncio.create_task(answers(address))
    async with retrying.client(address) as client:
        while (await only_worker(client)).num_running == 0:
            if work.done():
                work = asyncio.create_task(answers(address))
            await asyncio.sleep(0.01)
    return work


def rank_actors() -> list[Any]:
    from ray.util import state

    return [a for a in state.list_actors() if a.class_name == "RankActor" and a.state == "ALIVE"]


@pytest.mark.long
async def test_ranks_on_two_nodes_match_single_rank(running: RayCluster, tmp_path: Path) -> None:
    ranks = rank_actors()
    assert len({rank.node_id for rank in ranks}) == 2
    of_two = await answers(running.address)
    async with ProcessCluster(config(tmp_path, ranks=1)) as single:
        of_one = await answers(single.address)
    assert of_two == of_one
    assert [text for _, text in of_two] == [task.answer for task in TASKS]


@pytest.mark.long
async def test_ranks_have_configured_threads_and_wait_passively(running: RayCluster) -> None:
    ranks = rank_actors()
    assert len(ranks) == 2
    environments = [Path(f"/proc/{rank.pid}/environ").read_text() for rank in ranks]
    niceness = {os.getpriority(os.PRIO_PROCESS, rank.pid) for rank in ranks}
    assert niceness == {os.getpriority(os.PRIO_PROCESS, 0)}
    for environment in environments:
        assert {"OMP_WAIT_POLICY=PASSIVE", "OMP_NUM_THREADS=1"} <= set(environment.split("\0"))


@pytest.mark.long
async def test_router_replica_reports_metrics_address(running: RayCluster) -> None:
    from ray import serve

    router = serve.get_deployment_handle("router", "everlift")
    await answers(running.address)
    described = await router.describe.remote()
    samples = (await scraped(described["metrics_address"])).samples
    assert samples["everlift_requests_total", "outcome=ok"] >= len(TASKS)
    parts_s = samples.values("everlift_worker_step_seconds_total", "part")
    assert all(parts_s[part] > 0 for part in STEP_PARTS)
    assert sum(parts_s.values()) < samples.total("everlift_worker_busy_seconds_total")


@pytest.mark.long
async def test_status_names_resources_that_pending_worker_lacks(running: RayCluster) -> None:
    async with retrying.client(running.address) as client:
        before = await only_worker(client)

        async def until_missing(said: str) -> None:
            async with asyncio.timeout(60.0):
                while (await client.status()).missing_workers != said:
                    await asyncio.sleep(0.1)

        running._deploy(running.application(replace(running.config, num_workers=2)))
        await until_missing("1 of 2 ready; 1 pending placement: no nodes with 2 x (1 CPU) are free")
        running._deploy(running.application(running.config))
        await until_missing("")
        assert (await only_worker(client)).worker_id == before.worker_id


@pytest.mark.long
async def test_redeployed_worker_hands_back_all_requests(running: RayCluster) -> None:
    from ray import serve

    async with retrying.client(running.address) as client:
        before = await only_worker(client)
        work = await running_answers(running.address)
        worker = replace(running.config.worker, max_num_seqs=32)
        changed = replace(running.config, worker=worker)
        await asyncio.to_thread(
            serve.run, running.application(changed), name="everlift", route_prefix=None
        )
        assert [text for _, text in await work] == [task.answer for task in TASKS]
        assert (await only_worker(client)).worker_id != before.worker_id
    [lost] = [
        event for event in router_events(running) if event.get("worker_id") == before.worker_id
    ][-1:]
    assert (lost["event"], lost["requests"]) == ("worker lost", 0)


def router_events(running: RayCluster) -> list[dict[str, Any]]:
    return [event for event in log_of(running, "router-*") if event["event"] == "worker lost"]


def log_of(running: RayCluster, name: str) -> list[dict[str, Any]]:
    logs = (running.config.state_dir / "logs").glob(f"{name}.log")
    return [json.loads(line) for log in logs for line in log.read_text().splitlines()]


async def test_killed_rank_ends_its_replica_and_loses_no_token(
    running: RayCluster,
) -> None:
    async with retrying.client(running.address) as client:
        before = await only_worker(client)
        work = await running_answers(running.address)
        os.kill(rank_pid(1), signal.SIGKILL)
        assert [text for _, text in await work] == [task.answer for task in TASKS]
        # If the requests ended before the kill, the router may not have detected the loss yet.
        async with asyncio.timeout(90):
            while (await only_worker(client)).worker_id == before.worker_id:
                await asyncio.sleep(0.05)


def rank_pid(rank: int) -> int:
    from ray.util import state

    actors = state.list_actors(detail=True)
    alive = [a for a in actors if a.class_name == "RankActor" and a.state == "ALIVE"]
    return [a.pid for a in sorted(alive, key=lambda a: a.pid)][rank]


async def only_worker(client: AsyncClient) -> pb.WorkerStatus:
    async with asyncio.timeout(60):
        while True:
            workers = [worker for worker in (await client.status()).workers if worker.alive]
            if len(workers) == 1:
                return workers[0]
            await asyncio.sleep(0.05)


@pytest.mark.long
async def test_killed_router_replica_is_replaced(
    running: RayCluster,
) -> None:
    from ray import serve

    router = serve.get_deployment_handle("router", "everlift")
    pid = (await router.describe.remote())["pid"]
    work = await running_answers(running.address)
    os.kill(pid, signal.SIGKILL)
    assert [text for _, text in await work] == [task.answer for task in TASKS]


@pytest.mark.long
async def test_leaving_router_replica_drains_and_is_replaced(
    running: RayCluster,
) -> None:
    """The router's process ends by itself, without unfinished requests."""
    from ray import serve

    router = serve.get_deployment_handle("router", "everlift")
    pid = (await router.describe.remote())["pid"]
    work = await running_answers(running.address)
    os.kill(pid, signal.SIGUSR1)
    assert [text for _, text in await work] == [task.answer for task in TASKS]
    while Path(f"/proc/{pid}").exists():
        await asyncio.sleep(0.01)
    assert [text for _, text in await answers(running.address)] == [t.answer for t in TASKS]
    assert (await router.describe.remote())["pid"] != pid
    said = [event["event"] for event in log_of(running, f"router-{pid}")]
    assert said[said.index("stop requested") :][:2] == ["stop requested", "router stopping"]
    assert "leadership lost" in said and "router did not stop cleanly" not in said


@pytest.mark.long
async def test_streams_continue_while_ray_head_is_frozen(
    running: RayCluster, two_nodes: Any
) -> None:
    [head] = two_nodes.head_node.all_processes["gcs_server"]
    async with retrying.client(running.address) as client:
        await only_worker(client)
        work = await running_answers(running.address)
        head.process.send_signal(signal.SIGSTOP)
        try:
            assert [text for _, text in await work] == [task.answer for task in TASKS]
            _, text = await answer(client, TASKS[0].prompt)
        finally:
            head.process.send_signal(signal.SIGCONT)
        assert text == TASKS[0].answer


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_killed_raylet_loses_its_worker_and_no_token(
    running: RayCluster, two_nodes: Any
) -> None:
    """Each node has a worker, and the head has the router; the other node's raylet is killed.

    Its worker may continue for seconds, but no token is delivered twice. The replacement starts on
    a node that joins.
    """
    from ray import serve

    # Two steps, because Serve keeps the old replica, which occupies both nodes, until two can run.
    for num_workers in (1, 2):
        worker = replace(running.config.worker, tensor_parallel=1)
        changed = replace(
            running.config,
            num_workers=num_workers,
            nodes_per_worker=1,
            worker=worker,
            router_resource=HEAD,
        )
        await asyncio.to_thread(
            serve.run, running.application(changed), name="everlift", route_prefix=None
        )
    node = two_nodes.list_all_nodes()[1]
    async with retrying.client(running.address) as client:
        before = await alive_workers(client, 2)

        def begin() -> asyncio.Future[list[tuple[list[int], str]]]:
            streams = [client.generate(task.prompt, temperature=0) for task in TASKS * 4]
            return asyncio.gather(*(offsets_and_text(stream) for stream in streams))

        work = begin()
        while min(w.num_running for w in await alive_workers(client, 2)) == 0:
            if work.done():
                work = begin()
            await asyncio.sleep(0.01)
        os.kill(raylet_pid(node), signal.SIGKILL)
        for (offsets, text), task in zip(await work, TASKS * 4, strict=True):
            assert offsets == list(range(len(offsets)))
            assert text == task.answer
        two_nodes.remove_node(node, allow_graceful=False)
        two_nodes.add_node(num_cpus=1)
        after = await alive_workers(client, 2)
        assert len({w.worker_id for w in after} & {w.worker_id for w in before}) == 1


def raylet_pid(node: Any) -> int:
    [raylet] = node.all_processes["raylet"]
    return int(raylet.process.pid)


async def offsets_and_text(stream: Stream) -> tuple[list[int], str]:
    offsets: list[int] = []
    text = ""
    async for chunk in stream:
        offsets.extend(range(chunk.offset, chunk.offset + len(chunk.token_ids)))
        text += chunk.text
    return offsets, text


async def alive_workers(client: AsyncClient, count: int) -> list[pb.WorkerStatus]:
    """Wait until ``count`` workers are alive; return them."""
    async with asyncio.timeout(90):
        while True:
            workers = [worker for worker in (await client.status()).workers if worker.alive]
            if len(workers) == count:
                return workers
            await asyncio.sleep(0.05)


@pytest.mark.long
async def test_doctor_checks_every_node(two_nodes: Any, tmp_path: Path) -> None:
    # Ray needs time to detect the dead node that the previous test leaves.
    async with asyncio.timeout(120):
        while sum(node["Alive"] for node in two_nodes.global_state.node_table()) != 2:
            await asyncio.sleep(0.1)
    settings = [f"--set=ray_address={two_nodes.address}", f"--set=state_dir={tmp_path}"]
    doctor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.cli", "doctor", "--json", *settings),
        f"--set=router.port={free_port()}",
        "--set=router.http_port=0",
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await doctor.communicate()
    findings = json.loads(out)
    found = {each["subject"]: each for each in findings}
    assert found["nodes"]["says"].startswith("2: ")
    assert found["CPU all-reduce"]["says"].startswith("over 2 ranks")
    assert found.keys() >= {"nodes", "versions", "clocks", "CPU all-reduce"}
    assert [each for each in findings if each["level"] != "ok"] == []
    assert doctor.returncode == 0
