"""`everlift demo` as a command: under Ray, with the kill of a worker."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

import pytest

from tests.conftest import listening_ports

LOOPBACK = ("0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:")


@pytest.mark.long
@pytest.mark.parametrize("model", ["smollm2", "demo"])
async def test_demo_survives_worker_kill_without_token_loss(model: str, tmp_path: Path) -> None:
    summary_file, picture = tmp_path / "summary.json", tmp_path / "slots.png"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.cli", "demo", "--model", model),
        *("--json", str(summary_file), "--picture", str(picture)),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )
    watching = asyncio.create_task(ports_of(process))
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert str(picture) in out.decode().replace("\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    check(json.loads(summary_file.read_text()))
    beyond = {port for port in await watching if not port.startswith(LOOPBACK)}
    assert not beyond


def check(summary: dict[str, object]) -> None:
    assert summary["requests"] == summary["completed"] == summary["identical"] == 32
    assert summary["tokens_lost"] == summary["tokens_repeated"] == 0
    assert int(str(summary["migrated"])) > 0
    assert int(str(summary["output_tokens"])) > 1000
    assert summary.keys() >= {"ttft_ms", "inter_token_ms", "output_tokens_per_s"}


async def ports_of(process: Process) -> set[str]:
    """Return the addresses on which the demo and its descendants listened, as /proc writes them."""
    ports: set[str] = set()
    while process.returncode is None:
        ports |= await asyncio.to_thread(listening_ports, process.pid)
        await asyncio.sleep(0.5)
    assert ports
    return ports
