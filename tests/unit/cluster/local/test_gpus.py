"""Assignment of GPUs to ranks without Ray; no GPU is needed."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.config import DEMO_MODEL, Config, load
from cluster.local import gpus, process
from cluster.local.gpus import (
    VISIBLE,
    count_gpus,
    gpus_of_ranks,
    ranks_with_gpus,
    visible_gpus,
)
from cluster.local.launch import Launch, RankLaunch
from cluster.local.processes import ProcessCluster
from worker.config import WorkerConfig


def config(num_workers: int = 1, tensor_parallel: int = 1, *settings: str) -> Config:
    sizes = [f"num_workers={num_workers}", f"worker.tensor_parallel={tensor_parallel}"]
    return load(None, {}, [f"model={DEMO_MODEL}", *sizes, *settings])


def gpus_of(config: Config, gpus: list[str], worker: int = 0, group: int = 0) -> list[str]:
    groups = config.groups
    return gpus_of_ranks(groups, groups[group], gpus, worker)


class Nvml:
    """NVML with a GPU for each of ``gpus``, which says whether it is accessible."""

    def __init__(self, *gpus: bool, starts: bool = True) -> None:
        self._gpus = gpus
        self._starts = starts
        self.is_open = False

    def nvmlInit_v2(self) -> int:
        self.is_open = self._starts
        return 0 if self._starts else 9

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, handle: Any) -> int:
        return 0 if self._gpus[number] else 4


@pytest.mark.parametrize(
    ("workers", "ranks", "gpus", "expected"),
    [
        (2, 1, ["0", "1"], [["0"], ["1"]]),
        (1, 2, ["0", "1"], [["0", "1"]]),
        (2, 2, ["4", "5", "6", "7"], [["4", "5"], ["6", "7"]]),
        (2, 2, ["0", "1", "2"], [["0", "1"], ["2", "0"]]),
        (3, 1, ["GPU-a", "GPU-b"], [["GPU-a"], ["GPU-b"], ["GPU-a"]]),
        (2, 2, ["3"], [["", ""], ["", ""]]),
        (1, 2, [], [["", ""]]),
    ],
)
def test_gpus_are_assigned_to_ranks_in_order(
    workers: int, ranks: int, gpus: list[str], expected: list[list[str]]
) -> None:
    this = config(workers, ranks)
    assert [gpus_of(this, gpus, worker) for worker in range(workers)] == expected


def test_gpus_of_vllm_all_belong_to_its_only_rank() -> None:
    this = config(2, 2, "worker.engine=vllm")
    gpus = ["0", "1", "2"]
    assert [gpus_of(this, gpus, worker) for worker in range(2)] == [["0,1"], ["2,0"]]
    assert gpus_of(config(1, 4, "worker.engine=vllm"), ["0", "1"]) == ["0,1"]
    assert gpus_of(this, ["0"]) == [""]


def test_gpus_are_divided_over_the_workers_of_all_models() -> None:
    models = ["models.a.model=org/a", "models.a.num_workers=2", "models.a.worker.device=cuda"]
    cpus = ["models.b.model=org/b", "models.b.worker.device=cpu", "models.c.model=org/c"]
    this, gpus = config(2, 1, *models, *cpus), ["0", "1", "2", "3", "4"]
    found = [gpus_of(this, gpus, worker, group) for group in (0, 1) for worker in (0, 1)]
    assert found == [["0"], ["1"], ["2"], ["3"]]
    assert gpus_of(this, gpus, 0, 2) == [""]
    assert gpus_of(this, gpus, 0, 3) == ["4"]
    assert ranks_with_gpus(this.groups) == 5
    assert visible_gpus(config(1, 1, "worker.device=cpu", *models).groups, {VISIBLE: "0"}) == ["0"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,3", ["2", "3"]),
        ("GPU-8f, MIG-01", ["GPU-8f", "MIG-01"]),
        ("1,-1,0", ["1"]),
        ("", []),
    ],
)
def test_visible_gpus_follow_cuda_visible_devices(visible: str, expected: list[str]) -> None:
    assert visible_gpus(config().groups, {VISIBLE: visible}) == expected


def test_visible_gpus_default_to_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml(True, True, True))
    assert visible_gpus(config().groups, {}) == ["0", "1", "2"]


def test_visible_gpus_are_empty_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_NVML", "libnowhere.so.1")
    assert visible_gpus(config().groups, {}) == []


@pytest.mark.parametrize("setting", ["worker.device=cpu", "model=fake"])
def test_visible_gpus_are_empty_for_cpu_and_fake_models(setting: str) -> None:
    assert visible_gpus(config(1, 1, setting).groups, {VISIBLE: "0,1"}) == []


@pytest.mark.parametrize(
    ("nvml", "expected"),
    [
        (Nvml(True, True), 2),
        (Nvml(True, False, True), 2),
        (Nvml(), 0),
        (Nvml(True, starts=False), 0),
    ],
)
def test_count_gpus_counts_accessible_devices(nvml: Nvml, expected: int) -> None:
    assert count_gpus(nvml) == expected
    assert not nvml.is_open


def test_processes_module_does_not_import_torch() -> None:
    program = "import cluster.local.processes, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


class Ready:
    """Rank process that has sent all reports of its start."""

    pid = 1
    returncode = 0

    def __init__(self) -> None:
        self.stdout = asyncio.StreamReader()
        for report in ({"rendezvous": "there"}, {"worker_id": "1"}):
            self.stdout.feed_data(json.dumps(report).encode() + b"\n")

    async def wait(self) -> int:
        return self.returncode

    def send_signal(self, signal: int) -> None:
        pass


class Noting:
    """Launcher that records the launches of ranks."""

    def __init__(self) -> None:
        self.launches: list[RankLaunch] = []

    async def start(self, launch: Launch, log_path: Path) -> Ready:
        assert isinstance(launch, RankLaunch)
        self.launches.append(launch)
        return Ready()


async def test_worker_launches_each_rank_with_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, launcher = ProcessCluster(config(2, 2)), Noting()
    monkeypatch.setattr(cluster, "_gpus", ["0", "1", "2", "3"])
    monkeypatch.setattr(cluster, "_ranks", lambda group, index: launcher)
    [group] = cluster.config.groups
    for index in range(2):
        await cluster._worker(group, index).start()
    pairs = [(launch.name, launch.gpu) for launch in launcher.launches]
    assert pairs == [
        ("worker-0", "0"),
        ("worker-0.1", "1"),
        ("worker-1", "2"),
        ("worker-1.1", "3"),
    ]


@pytest.mark.parametrize("gpu", ["1", ""])
async def test_rank_process_sets_its_gpu_before_construction(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, "0,1,2")
    seen: list[str] = []

    def made(*_: object, **more: object) -> None:
        seen.append(os.environ[VISIBLE])
        raise ValueError("seen")

    monkeypatch.setattr("worker.serving.rank.Rank", made)
    launch = RankLaunch("worker-0", "error", WorkerConfig(model="fake"), gpu=gpu)
    with pytest.raises(ValueError, match="seen"):
        await process._run_rank(launch, lambda report: None, asyncio.Event())
    assert seen == [gpu or "0,1,2"]
