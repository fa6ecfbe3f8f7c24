"""Reports of a child process, and other outputs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.errors import ClusterFailed
from cluster.local.launch import Launch, RankLaunch
from cluster.local.launcher import Child
from worker.config import WorkerConfig

LAUNCH = RankLaunch("worker-0", "info", WorkerConfig(model="fake"))


class Said:
    """Process that has written ``line``, and its own launcher."""

    pid = 1

    def __init__(self, line: bytes) -> None:
        self.returncode: int | None = None
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_data(line)
        self.stdout.feed_eof()

    async def start(self, launch: Launch, log_path: Path) -> Said:
        return self

    async def wait(self) -> int:
        return 3

    def send_signal(self, signal: int) -> None:
        raise AssertionError(signal)


async def report(line: bytes, tmp_path: Path) -> dict[str, str]:
    child = Child(LAUNCH, Said(line), tmp_path / "log")
    await child.start()
    return await child.report()


async def test_child_report_is_one_line(tmp_path: Path) -> None:
    assert await report(b'{"worker_id": "w"}\nmore', tmp_path) == {"worker_id": "w"}


@pytest.mark.parametrize("line", [b"hello\n", b"5\n", b"[1]\n", b'"text"\n', b"\xff\n", b"{"])
async def test_child_malformed_report_fails_and_is_quoted(line: bytes, tmp_path: Path) -> None:
    with pytest.raises(ClusterFailed, match=r"worker-0: invalid report "):
        await report(line, tmp_path)


@pytest.mark.parametrize(
    ("line", "cause"), [(b'{"error": "no room"}\n', "no room"), (b"", "ended with status 3")]
)
async def test_child_error_report_or_exit_fails_with_its_cause(
    line: bytes, cause: str, tmp_path: Path
) -> None:
    with pytest.raises(ClusterFailed, match=cause):
        await report(line, tmp_path)
