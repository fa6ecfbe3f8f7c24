"""A Ray of ours for one machine lets nobody in who has not its token, and has no dashboard."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.conftest import listening_ports

UP = ["up", "--model", "fake", "--workers", "1", "--set", "router.port=0"]
UP += ["--set", "router.http_port=0", "--set", "router.drain=0.2"]
#: As somebody does who has an account on the machine: runs a function on it.
STRANGER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("in as", ray.get(ray.remote(num_cpus=0)(lambda: "owner").remote()))
"""


async def python(*arguments: str, environ: Mapping[str, str]) -> Process:
    path = os.pathsep.join(path for path in sys.path if path)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdout=PIPE,
        stderr=DEVNULL,
        env={**os.environ, "PYTHONPATH": path, **environ},
    )


@asynccontextmanager
async def up(home: Path) -> AsyncIterator[Process]:
    environ = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    process = await python("-m", "cluster.cli", *UP, environ=environ)
    try:
        assert process.stdout is not None
        while b"status --watch" not in (line := await process.stdout.readline()):
            assert line, "it ended"
        yield process
    finally:
        process.terminate()
        await process.communicate()


async def said_to(environ: Mapping[str, str], address: str) -> str:
    """What Ray lets somebody do."""
    process = await python("-c", STRANGER, address, environ=environ)
    try:
        async with asyncio.timeout(120):
            return (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def control_plane(pid: int) -> str:
    """Where the process's Ray keeps its books."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().decode().split("\0")
        except OSError:
            continue
        if words[0].endswith("gcs_server") and parent_of(command.parent) == pid:
            [scratch] = {
                it for word in words for it in re.findall(r"/[^ =]*/everlift-ray-[^/]+", word)
            }
            return (Path(scratch) / "ray_current_cluster").read_text().strip()
    raise AssertionError("it has no Ray")


def parent_of(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


async def test_nobody_without_the_token_runs_anything(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    async with up(home) as process:
        address = control_plane(process.pid)
        token = home / ".ray" / "auth_token"
        assert len(token.read_text().strip()) >= 32
        hosts = {where.partition(":")[0] for where in listening_ports(process.pid)}
        assert hosts <= {"0100007F", "0000000000000000FFFF00000100007F"}
        for environ in (
            {"RAY_AUTH_MODE": "disabled"},
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        ):
            assert await said_to({"HOME": str(elsewhere), **environ}, address) == ""
        known = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        assert await said_to({"HOME": str(elsewhere), **known}, address) == "in as owner\n"
