"""``everlift up`` as a separate process, until a signal ends it."""

import asyncio
import os
import re
import signal
import sys
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL
from tests.support.example_counts import long

UP = [
    *("up", "--no-ray", "--model", "fake", "--workers", "2"),
    *("--set", "router.port=0", "--set", "router.http_port=0", "--set", "router.drain=0.2"),
    *("--set", "worker.fake.step_time=0.005"),
]


#: sitecustomize.py of all Python processes: ray cannot be imported.
NO_RAY = """
import sys

class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"{name} is not to be imported here", name=name)

sys.meta_path.insert(0, NoRay())
"""
#: sitecustomize.py of all Python processes: those of a cluster block at their start.
NO_START = """
import sys, threading

if "cluster.local.process" in sys.orig_argv:
    threading.Event().wait()
"""
AN_LLM = """
import sys
from cluster import LLM
with LLM(sys.argv[1], num_blocks=16, max_num_seqs=2) as llm:
    [completion] = llm.generate(["hello"], max_tokens=3, temperature=0.0)
    print(len(completion.choices[0].token_ids))
"""


async def everlift(home: Path, *arguments: str) -> Process:
    return await python(home, "-m", "cluster.cli", *arguments)


async def python(home: Path, *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdout=PIPE,
        stderr=PIPE,
        env={
            **os.environ,
            "XDG_STATE_HOME": str(home),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
    )


@asynccontextmanager
async def up(home: Path) -> AsyncIterator[Process]:
    """Run ``everlift up`` until it is ready; the caller must end it by a signal."""
    process = await everlift(home, *UP)
    try:
        assert process.stdout is not None
        welcome = b""
        while b"status --watch" not in (line := await process.stdout.readline()):
            assert line, await process.communicate()
            welcome += line
        assert re.search(rb"\n  OpenAI   http://127.0.0.1:\d+/v1\n", welcome), welcome
        assert re.search(rb"\n  metrics  http://127.0.0.1:\d+/metrics\n", welcome), welcome
        yield process
        async with asyncio.timeout(30):
            assert await process.wait() == 0
            assert await process.communicate() == (b"stopping\n", b"")
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def metrics(status: str) -> str:
    """Return the metrics from the address at the end of a status."""
    url = status.split()[-1]
    with await asyncio.to_thread(urllib.request.urlopen, url) as answer:
        return str(answer.read().decode())


async def output(home: Path, *arguments: str) -> str:
    return await output_of(await everlift(home, *arguments))


async def output_of(process: Process) -> str:
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    return out.decode()


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM]
)
async def test_up_serves_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    async with up(tmp_path) as process:
        text = await output(tmp_path, "generate", "hello", "--max-tokens", "9", "--request-id", "r")
        assert len(text) > 9
        assert await output(tmp_path, "attach", "r") == text
        status = await output(tmp_path, "status")
        assert "completed 1" in status
        ok = r'everlift_requests_total{model="\w+",outcome="ok"} 1\.0\n'
        assert re.search(ok, await metrics(status))
        process.send_signal(number)
    assert not (tmp_path / "everlift" / "endpoint.json").exists()


@pytest.mark.long
async def test_cluster_and_llm_run_without_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ray = tmp_path / "without_ray"
    without_ray.mkdir()
    (without_ray / "sitecustomize.py").write_text(NO_RAY)
    monkeypatch.syspath_prepend(without_ray)
    _, err = await (await python(tmp_path, "-c", "import ray")).communicate()
    assert b"ray is not to be imported here" in err
    async with up(tmp_path) as process:
        assert len(await output(tmp_path, "generate", "hello", "--max-tokens", "9")) > 9
        assert "completed 1" in await output(tmp_path, "status")
        process.send_signal(signal.SIGTERM)
    assert await output_of(await python(tmp_path, "-c", AN_LLM, str(DEMO_MODEL))) == "3\n"


@pytest.mark.parametrize("number", [long(signal.SIGINT), signal.SIGTERM])
async def test_up_exits_on_a_signal_during_start(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held"
    held.mkdir()
    (held / "sitecustomize.py").write_text(NO_START)
    monkeypatch.syspath_prepend(held)
    process = await everlift(tmp_path, *UP)
    log = tmp_path / "everlift" / "logs" / "up.log"
    async with asyncio.timeout(90):
        while not (log.exists() and "process started" in log.read_text()):
            await asyncio.sleep(0.01)
    process.send_signal(number)
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert b"serves" not in out


@pytest.mark.long
async def test_generate_is_cancelled_by_ctrl_c(tmp_path: Path) -> None:
    async with up(tmp_path) as process:
        command = ["generate", "hello", "--max-tokens", "4000", "--request-id", "r"]
        generating = await everlift(tmp_path, *command)
        assert generating.stdout is not None
        await generating.stdout.readexactly(20)
        generating.send_signal(signal.SIGINT)
        await generating.communicate()
        assert generating.returncode != 0
        assert await output(tmp_path, "cancel", "r") == "cancelled\n"
        process.send_signal(signal.SIGTERM)
