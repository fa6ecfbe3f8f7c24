"""Launch of a process that ends before it reads its input."""

import asyncio
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import pytest
import uvloop

from cluster.local.launch import RankLaunch
from cluster.local.launcher import SubprocessLauncher
from worker.config import WorkerConfig


def test_launcher_returns_the_status_of_an_early_exit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = asyncio.create_subprocess_exec

    async def ended(*arguments: Any, **options: Any) -> Process:
        process = await started(*arguments, **options)
        await process.wait()
        assert process.stdin is not None
        while not process.stdin.is_closing():
            await asyncio.sleep(0)
        return process

    async def status() -> int:
        launcher = SubprocessLauncher({})
        process = await launcher.start(RankLaunch("gone", "info", WorkerConfig()), tmp_path / "log")
        return await process.wait()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", ended)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert uvloop.run(status()) == 1
