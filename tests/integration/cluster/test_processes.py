"""A cluster of plain processes: start, recovery after kills, and error reports.

conftest.py checks after each test that no process or file is left.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL, Config, load
from cluster.errors import ClusterFailed
from cluster.local.fork_server import ForkServer
from cluster.local.processes import ProcessCluster
from cluster.local.replica import RouterReplica
from everlift import AsyncClient, OnDisconnect
from everlift.v1 import inference_pb2 as pb
from tests.support.free_port import free_port
from tests.support.router import retrying

TOKENS = 200
SETTINGS = [
    "model=fake",
    "router.port=0",
    "router.http_port=0",
    "router.drain=0.2",
    "worker.fake.step_time=0.005",
    # A rank may wait for a core for seconds.
    "worker.rank_silence=20",
]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(None, {}, [*SETTINGS, f"state_dir={tmp_path}"])


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


async def undisturbed(cluster: ProcessCluster) -> str:
    async with retrying.client(cluster.addresses) as client:
        return await client.generate("prompt", temperature=0.0, max_tokens=TOKENS).text()


async def worker_that_runs(cluster: ProcessCluster, client: AsyncClient) -> int:
    busy = {w.worker_id for w in (await client.status()).workers if w.num_running}
    return next(i for i, worker in enumerate(cluster.workers) if worker.worker_id in busy)


async def num_alive(address: str) -> int:
    async with retrying.client(address) as client:
        return sum(worker.alive for worker in (await client.status()).workers)


@pytest.mark.long
async def test_routers_all_serve_with_all_workers(config: Config) -> None:
    async with ProcessCluster(replace(config, num_routers=2, num_workers=2)) as cluster:
        assert await asyncio.gather(*map(num_alive, cluster.addresses)) == [2, 2]
        assert len([pid for pid in cluster.pids if is_alive(pid)]) == 5
        texts = set()
        for address in cluster.addresses:
            async with retrying.client(address) as client:
                texts.add(await client.generate("x", max_tokens=5, temperature=0.0).text())
        assert len(texts) == 1


@pytest.mark.long
async def test_stream_continues_when_its_worker_is_killed(config: Config) -> None:
    async with ProcessCluster(replace(config, num_workers=2)) as cluster:
        expected = await undisturbed(cluster)
        async with retrying.client(cluster.address) as client:
            stream = client.generate("prompt", temperature=0.0, max_tokens=TOKENS)
            text, victim = "", -1
            async for chunk in stream:
                text += chunk.text
                if victim < 0 and chunk.offset >= 50:
                    victim = await worker_that_runs(cluster, client)
                    await cluster.kill_worker(victim)
        assert text == expected
        assert stream.timing is not None
        assert stream.timing.migrations == 1
        before = cluster.workers[victim].worker_id
        await cluster.restart_worker(victim)
        assert cluster.workers[victim].worker_id != before


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
async def test_explain_reports_the_time_to_detect_a_lost_worker(
    config: Config, number: signal.Signals
) -> None:
    async with ProcessCluster(replace(config, num_workers=2)) as cluster:
        async with retrying.client(cluster.address) as client:
            stream = client.generate("prompt", max_tokens=TOKENS, request_id="r")
            victim = -1
            async for chunk in stream:
                # A chunk has several tokens if the reader is late.
                if victim < 0 and chunk.offset >= 50:
                    victim = await worker_that_runs(cluster, client)
                    for pid in cluster.workers[victim].pids:
                        os.kill(pid, number)
            explanation = await client.explain("r")
        await cluster.kill_worker(victim)
    first, second = explanation.attempts
    assert "was lost" in first.end and second.end == "finished"
    spent = {(span.kind, span.attempt): span.seconds for span in explanation.spans}
    found_s = spent[pb.SPAN_KIND_MIGRATION, 1]
    # A dead worker is detected by the end of its stream, a frozen one by its silence. The margin
    # is for the transit of its last message.
    assert found_s > (0.75 * config.router.worker_silence if number == signal.SIGSTOP else 0)
    assert spent[pb.SPAN_KIND_RECOMPUTE, 2] > 0


async def test_explain_reports_waiting_for_a_starting_worker(config: Config) -> None:
    """The explanation has a span for the time in the queue without a worker."""
    async with ProcessCluster(config) as cluster, retrying.client(cluster.address) as client:
        await cluster.kill_worker(0)
        asking = asyncio.create_task(client.generate("x", max_tokens=5, request_id="r").text())
        async with asyncio.timeout(20):
            while not (await client.status()).queued:
                await asyncio.sleep(0.02)
        await cluster.restart_worker(0)
        await asking
        kinds = {span.kind for span in (await client.explain("r")).spans}
    assert pb.SPAN_KIND_NO_WORKER in kinds


@pytest.mark.long
async def test_stream_resumes_after_a_router_restart(
    config: Config,
) -> None:
    async with ProcessCluster(config) as cluster:
        expected = await undisturbed(cluster)
        address = cluster.address
        async with retrying.client(address) as client:
            before = await client.status()
            text, has_restarted = "", False
            async for chunk in client.generate("prompt", temperature=0.0, max_tokens=TOKENS):
                text += chunk.text
                if not has_restarted and chunk.offset >= 50:
                    has_restarted = True
                    await cluster.kill_router(0)
                    await cluster.restart_router(0)
            after = await client.status()
            assert before.metrics_address and after.metrics_address == before.metrics_address
            assert before.http_address and after.http_address == before.http_address
        assert (text, cluster.address) == (expected, address)


async def test_worker_ranks_start_and_end_together(config: Config) -> None:
    config = replace(config, worker=replace(config.worker, tensor_parallel=2))
    async with ProcessCluster(config) as cluster:
        first, second = cluster.workers[0].pids
        assert len(await undisturbed(cluster)) > 0
        os.kill(second, signal.SIGKILL)
        await until(lambda: not is_alive(first))
        await cluster.restart_worker(0)
        pids = cluster.workers[0].pids
        await cluster.kill_worker(0)
        assert not any(is_alive(pid) for pid in pids)


@pytest.mark.long
async def test_revive_restarts_killed_routers_and_workers(config: Config) -> None:
    # While nothing listens, another test may get a port that the kernel has chosen.
    router = replace(config.router, port=free_port(), http_port=free_port())
    async with ProcessCluster(replace(config, router=router), revive=True) as cluster:
        before = cluster.pids[1:]
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        replicas = (*cluster.routers, *cluster.workers)
        await until(lambda: all(r.is_running and r.pids[0] not in before for r in replicas))
        assert len(await undisturbed(cluster)) > 0


async def test_failed_process_start_reports_the_cause(tmp_path: Path) -> None:
    config = load(
        None, {}, ["model=/nowhere", "router.port=0", "router.http_port=0", f"state_dir={tmp_path}"]
    )
    with pytest.raises(ClusterFailed, match="router-0: no model at '/nowhere'"):
        await ProcessCluster(config).start()


@pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does")
async def test_fork_server_loads_while_routers_start(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load and the start each wait until the other begins."""
    both = asyncio.Barrier(2)
    load, start = ForkServer.load, RouterReplica.start

    async def met_load(fork_server: ForkServer) -> None:
        await both.wait()
        await load(fork_server)

    async def met_start(router: RouterReplica) -> None:
        await both.wait()
        await start(router)

    monkeypatch.setattr(ForkServer, "load", met_load)
    monkeypatch.setattr(RouterReplica, "start", met_start)
    async with asyncio.timeout(60), ProcessCluster(config, revive=True) as cluster:
        assert cluster.workers[0].is_running


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does")
async def test_workers_start_without_a_fork_server(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def crowded(fork_server: ForkServer) -> None:
        raise ClusterFailed("2 threads are there")

    monkeypatch.setattr(ForkServer, "load", crowded)
    async with ProcessCluster(config, revive=True) as cluster:
        before = cluster.workers[0].pids
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: cluster.workers[0].is_running and cluster.workers[0].pids != before)
        assert len(await undisturbed(cluster)) > 0
    assert "fork server unavailable: workers start more slowly" in caplog.text


@pytest.mark.parametrize("revive", [False, True])
async def test_router_port_in_use_is_reported(config: Config, revive: bool) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        router = replace(config.router, port=taken.getsockname()[1])
        with pytest.raises(ClusterFailed, match="router-0: cannot listen on"):
            await ProcessCluster(replace(config, router=router), revive=revive).start()


@pytest.mark.parametrize("model", ["fake", pytest.param(str(DEMO_MODEL), marks=pytest.mark.long)])
async def test_processes_listen_on_loopback_only(tmp_path: Path, model: str) -> None:
    """The check includes all descendants of the cluster's processes."""
    settings = [*SETTINGS, f"model={model}", f"state_dir={tmp_path}", "worker.tensor_parallel=2"]
    async with ProcessCluster(load(None, {}, settings)) as cluster:
        addresses = set(listening(with_descendants(cluster.pids)))
        # A router has three ports, a worker has one.
        assert len(addresses) >= 4
        assert {address.rpartition(":")[0] for address in addresses} <= LOOPBACK


def with_descendants(pids: Iterable[int]) -> set[int]:
    found, left = set[int](), list(pids)
    while left:
        pid = left.pop()
        found.add(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            # A thread may end meanwhile.
            with suppress(OSError):
                left.extend(map(int, children.read_text().split()))
    return found


#: 127.0.0.1 as an IPv4 and as an IPv6 address, as /proc writes them.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


def listening(pids: Iterable[int]) -> Iterable[str]:
    """Yield the local addresses, as /proc writes them, on which the processes listen."""
    sockets = set[str]()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # A descriptor may be closed meanwhile.
            with suppress(OSError):
                sockets.add(os.readlink(link))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                yield fields[1]


KILLED = """
import asyncio, sys
from pathlib import Path
from cluster.config import load
from cluster.local.fork_server import ForkServer
from cluster.local.processes import ProcessCluster
from cluster.local.replica import RouterReplica

async def main():
    async with ProcessCluster(load(None, {}, sys.argv[1:])) as cluster:
        print(cluster.address, *cluster.pids, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def is_written(state_dir: Path, *names: bytes) -> bool:
    """Return whether the ledger's file on disk contains all names, so that they survive a kill."""
    files = (state_dir / "ledger" / "appendonlydir").glob("*.aof")
    data = b"".join(file.read_bytes() for file in files)
    return all(name in data for name in names)


@pytest.mark.long
async def test_next_cluster_resumes_after_the_first_is_killed(config: Config) -> None:
    assignments = [*SETTINGS, f"state_dir={config.state_dir}"]
    first = subprocess.Popen(
        [sys.executable, "-c", KILLED, *assignments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    with first:
        assert first.stdout is not None
        address, *pids = (await asyncio.to_thread(first.stdout.readline)).split()
        async with retrying.client(address) as client:
            text = await client.generate("done", request_id="done", max_tokens=5).text()
            stream = client.generate(
                "open",
                request_id="open",
                temperature=0.0,
                max_tokens=1000,
                on_disconnect=OnDisconnect.CONTINUE,
            )
            seen = [(await anext(stream)).token_ids for _ in range(100)]
            await until(lambda: is_written(config.state_dir, b"done", b"open"))
        first.kill()
    await until(lambda: not any(is_alive(int(pid)) for pid in pids))
    async with ProcessCluster(config) as cluster, retrying.client(cluster.address) as client:
        assert (await client.get_request("done")).state == pb.REQUEST_STATE_FINISHED
        assert await client.attach("done").text() == text
        again = [chunk async for chunk in client.attach("open")]
        tokens = [token for chunk in again for token in chunk.token_ids]
        assert len(tokens) == 1000
        shown = [token for ids in seen for token in ids]
        assert tokens[: len(shown)] == shown
