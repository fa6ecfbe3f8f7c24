"""A Ray cluster that `everlift up` starts listens on loopback only and requires its token."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from tests.conftest import listening_ports

UP = ["up", "--model", "fake", "--workers", "1", "--set", "router.port=0"]
UP += ["--set", "router.http_port=0", "--set", "router.drain=0.2"]
#: gRPC methods by which a client of Ray submits a job and finds it.
KEYS, JOBS = (
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
)


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


async def answer(address: str, method: str, token: str) -> grpc.StatusCode:
    """Return Ray's status for a call with ``token``, or without one."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(method)(b"", metadata=metadata, timeout=60)
        return await call.code()


def control_plane(pid: int) -> str:
    """Return the address of the process's Ray control plane."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_bytes().decode()
            if found := re.search(r"--gcs-address=(127\.0\.0\.1:[1-9]\d+)", command):
                return found[1]
    raise AssertionError("it has no Ray")


@pytest.mark.long
async def test_ray_rejects_clients_without_token(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    async with up(home) as process:
        address = control_plane(process.pid)
        token = (home / ".ray" / "auth_token").read_text().strip()
        assert len(token) >= 32
        hosts = {where.partition(":")[0] for where in listening_ports(process.pid)}
        assert hosts <= {"0100007F", "0000000000000000FFFF00000100007F"}
        for method in (KEYS, JOBS):
            for wrong in ("", "0" * len(token), token[:-1]):
                refused = await answer(address, method, wrong)
                assert refused is grpc.StatusCode.UNAUTHENTICATED, (method, wrong)
            assert await answer(address, method, token) is grpc.StatusCode.OK
