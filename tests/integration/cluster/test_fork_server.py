"""Ranks that are forked from a fork server: start, end, reports, and the server's death."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL
from cluster.errors import ClusterFailed
from cluster.local import fork_server_process
from cluster.local.fork_server import ForkServer
from cluster.local.launch import RankLaunch
from cluster.local.launcher import Child, SubprocessLauncher, stdin_bytes
from cluster.threads import rank_environment
from worker.config import WorkerConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does")

FAKE = WorkerConfig(model="fake")
#: Launch of rank 0 of two, which reports its rendezvous and waits for rank 1.
HALF = RankLaunch("worker-0", "info", WorkerConfig(model="fake", tensor_parallel=2))


@pytest.fixture
async def fork_server(tmp_path: Path) -> AsyncIterator[ForkServer]:
    fork_server = ForkServer(FAKE, rank_environment(2, FAKE), tmp_path / "fork-server.log")
    yield fork_server
    fork_server.close()


async def rank(fork_server: ForkServer, tmp_path: Path) -> Child:
    """Return a running rank, which waits for rank 1."""
    child = Child(HALF, fork_server, tmp_path / "rank.log")
    await child.start()
    assert "rendezvous" in await child.report()
    return child


async def test_launchers_import_nothing_from_the_working_directory(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cluster", "everlift", "router", "uvloop", "worker"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    for launcher in (fork_server, SubprocessLauncher(rank_environment(2, FAKE))):
        child = Child(HALF, launcher, tmp_path / "rank.log")
        await child.start()
        assert "rendezvous" in await child.report()
        await child.kill()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descriptors(pid: int) -> dict[Path, str]:
    """Return the open file of each descriptor; descriptors may be closed meanwhile."""
    files = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            files[descriptor] = os.readlink(descriptor)
    return files


def open_files(pid: int) -> set[str]:
    return set(descriptors(pid).values())


@pytest.mark.long
async def test_fork_server_starts_ranks_despite_numpy_threads(tmp_path: Path) -> None:
    """The environment keeps numpy, which the model's runner imports, from starting threads."""
    launch = replace(HALF, worker=replace(HALF.worker, model=str(DEMO_MODEL)))
    fork_server = ForkServer(launch.worker, rank_environment(2, FAKE), tmp_path / "fork-server.log")
    child = Child(launch, fork_server, tmp_path / "rank.log")
    try:
        await child.start()
        assert "rendezvous" in await child.report()
        await child.kill()
    finally:
        fork_server.close()


async def test_ranks_are_separate_children_of_one_fork_server(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    first, second = await rank(fork_server, tmp_path), await rank(fork_server, tmp_path)
    assert first.pid != second.pid
    assert parent(first.pid) == parent(second.pid)
    await first.kill()
    assert (first.is_running, second.is_running) == (False, True)
    await second.kill()


async def test_forked_rank_has_its_own_log_and_session(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    child = await rank(fork_server, tmp_path)
    assert os.getsid(child.pid) == child.pid
    assert os.readlink(f"/proc/{child.pid}/fd/2") == str(tmp_path / "rank.log")
    descriptors = open_files(child.pid)
    assert not any("fork-server.log" in each for each in descriptors)
    await child.kill()


async def test_forked_rank_reads_a_launch_larger_than_a_pipe(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    launch = replace(HALF, models=(FAKE,) * 100)
    assert len(stdin_bytes(1, launch)) > 1 << 16
    child = Child(launch, fork_server, tmp_path / "rank.log")
    await child.start()
    assert "rendezvous" in await child.report()
    await child.kill()


async def test_rank_without_a_log_file_leaves_no_descriptor_open(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    await fork_server.load()
    before = descriptors(os.getpid()).keys()
    with pytest.raises(FileNotFoundError):
        await fork_server.start(HALF, tmp_path / "deleted" / "rank.log")
    assert descriptors(os.getpid()).keys() == before


async def test_forked_rank_reports_the_cause_of_its_failure(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    launch = RankLaunch("worker-0", "info", WorkerConfig(model="/nowhere"))
    child = Child(launch, fork_server, tmp_path / "rank.log")
    await child.start()
    with pytest.raises(ClusterFailed, match="worker-0: no model at '/nowhere'"):
        await child.report()
    await child.wait()


async def test_forked_rank_uses_its_assigned_gpu(fork_server: ForkServer, tmp_path: Path) -> None:
    child = Child(replace(HALF, gpu="GPU-5a"), fork_server, tmp_path / "rank.log")
    await child.start()
    assert "rendezvous" in await child.report()
    await child.kill()
    [said] = [line for line in (tmp_path / "rank.log").read_text().splitlines() if "GPU-5a" in line]
    assert "GPU assigned" in said


async def test_forked_rank_reports_its_kill_status(fork_server: ForkServer, tmp_path: Path) -> None:
    child = await rank(fork_server, tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ClusterFailed, match="ended with status -9"):
        await child.report()
    await child.stop(1.0)


async def test_forked_rank_stops_cleanly_on_request(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    child = await rank(fork_server, tmp_path)
    await child.stop(10.0)
    with pytest.raises(ClusterFailed, match="ended with status 0"):
        await child.report()


async def test_fork_server_death_ends_its_ranks_and_is_recovered(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    child = await rank(fork_server, tmp_path)
    first = parent(child.pid)
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(10):
        await child.wait()
    other = await rank(fork_server, tmp_path)
    assert parent(other.pid) != first
    await other.kill()


async def test_cancelled_rank_start_leaves_no_rank(fork_server: ForkServer, tmp_path: Path) -> None:
    await fork_server.load()
    abandoned = asyncio.create_task(fork_server.start(HALF, tmp_path / "rank.log"))
    await asyncio.sleep(0)
    abandoned.cancel()
    with suppress(asyncio.CancelledError):
        await abandoned
    child = await rank(fork_server, tmp_path)
    await child.kill()


async def test_closed_fork_server_is_not_restarted(fork_server: ForkServer, tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    starting = [
        asyncio.create_task(fork_server.start(HALF, tmp_path / "rank.log")) for _ in range(3)
    ]
    await asyncio.sleep(0.1)
    for each in starting:
        each.cancel()
    fork_server.close()
    async with asyncio.timeout(5):
        # A task which still waits for the fork server would start a new one.
        while asyncio.all_tasks() - before:
            await asyncio.sleep(0.01)
    assert fork_server._process is None


async def test_failed_fork_is_reported_and_closes_its_descriptors() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fork", no_fork)
        read, write = os.pipe()
        assert fork_server_process.ForkServer(theirs)._fork([write]) == -1
        assert b"unavailable" in ours.recv(256)
        assert os.read(read, 1) == b""  # no process has the write end open
        os.close(read)


def no_fork() -> int:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


async def test_ranks_are_dead_once_fork_server_death_is_noticed(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    children = [await rank(fork_server, tmp_path) for _ in range(3)]
    os.kill(parent(children[0].pid), signal.SIGKILL)
    for child in children:
        await child.wait()
        assert not is_alive(child.pid)


async def test_ended_rank_leaves_no_open_pipe(fork_server: ForkServer, tmp_path: Path) -> None:
    """Another process may still have the write end of the rank's report pipe open."""
    await fork_server.load()
    before = open_files(os.getpid())
    child = await rank(fork_server, tmp_path)
    shared = (open_files(os.getpid()) - before) & open_files(child.pid)
    [pipe] = [path for path, file in descriptors(child.pid).items() if file in shared]
    with pipe.open("wb", buffering=0) as reports:
        os.kill(child.pid, signal.SIGKILL)
        reports.write(b'{"error": "the last"}\n')
        await child.wait()
        assert [*descriptors(os.getpid()).values()].count(*shared) == 1
    with pytest.raises(ClusterFailed, match="the last"):
        await child.report()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_fork_server_fails_to_load_beside_other_threads(tmp_path: Path) -> None:
    """A fork copies only one thread, so other threads of the fork server would be lost."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = rank_environment(2, FAKE) | {"PYTHONPATH": path}
    fork_server = ForkServer(FAKE, environment, tmp_path / "fork-server.log")
    with pytest.raises(ClusterFailed, match="2 threads run before the first fork"):
        await fork_server.load()
    assert fork_server._process is None


async def test_failed_fork_server_start_names_its_log(tmp_path: Path) -> None:
    (tmp_path / "grpc.py").write_text("raise RuntimeError('broken')")
    fork_server = ForkServer(FAKE, {"PYTHONPATH": str(tmp_path)}, tmp_path / "fork-server.log")
    child = Child(HALF, fork_server, tmp_path / "rank.log")
    with pytest.raises(ClusterFailed, match=r"fork-server\.log"):
        await child.start()
    assert "broken" in (tmp_path / "fork-server.log").read_text()
