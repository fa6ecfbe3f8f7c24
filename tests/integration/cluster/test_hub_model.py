"""A cluster that serves one commit of a hub model, which it downloads once."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL, Config, load
from cluster.local.processes import ProcessCluster
from everlift import AsyncClient
from everlift.model_files import pin
from tests.support.hub import Hub, in_use
from worker.config import WorkerConfig
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.serving.rank import Rank

NAME = "org/demo"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with in_use(tmp_path / "cache") as hub:
        hub.push(NAME, {path.name: path.read_bytes() for path in DEMO_MODEL.iterdir()})
        yield hub


def config(directory: Path, model: str) -> Config:
    return load(
        None,
        {},
        [f"model={model}", "router.port=0", "router.http_port=0", f"state_dir={directory}"],
    )


async def text(cluster: ProcessCluster) -> str:
    async with AsyncClient(cluster.address) as client:
        assert (await client.status()).model == NAME
        stream = client.generate("count from 17 to 30:", model=NAME, temperature=0.0, max_tokens=8)
        return await stream.text()


@pytest.mark.long
async def test_workers_serve_the_pinned_commit_after_the_branch_moved(
    hub: Hub, tmp_path: Path
) -> None:
    async with ProcessCluster(config(tmp_path, NAME)) as cluster:
        assert await text(cluster) == " 17 18 1"
        hub.push(NAME, {"config.json": b"of another model"})
        hub.requests.clear()
        await cluster.restart_worker(0)
        assert await text(cluster) == " 17 18 1"
    assert hub.requests == []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/nobody", "the hub has no such model"),
        ("/nowhere", "not a GGUF file, and not a hub id"),
    ],
)
async def test_up_reports_an_unservable_model_in_one_line(
    hub: Hub, tmp_path: Path, model: str, words: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.cli", "up", "--model", model),
        stdout=PIPE,
        stderr=PIPE,
        env={
            **os.environ,
            "XDG_STATE_HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
    )
    out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    (line,) = err.decode().splitlines()
    assert line.startswith("error: ") and model in line and words in line


async def test_dummy_weights_are_not_downloaded(hub: Hub) -> None:
    commit = await pin(NAME)
    config = WorkerConfig(
        model=NAME, model_revision=commit, load_format="dummy", kv_cache_mib=1, num_threads=1
    )
    await Rank(config).fetch()
    build_runner(config, Group.single()).close()
    assert "model.safetensors" not in hub.downloads()
    await Rank(replace(config, load_format="auto")).fetch()
    assert "model.safetensors" in hub.downloads()
