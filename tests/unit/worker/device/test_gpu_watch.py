"""Utilisation of the GPU, reported by a replacement of NVML."""

from __future__ import annotations

import asyncio

import pytest
import torch

from worker.device import gpu

CUDA = torch.device("cuda")


async def test_gpu_watch_reports_utilization_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    percent = iter([0, 55, 100])
    enough, reported = asyncio.Event(), list[float]()

    def report(utilization: float) -> None:
        reported.append(utilization)
        if len(reported) == 3:
            enough.set()

    monkeypatch.setattr(gpu, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(gpu, "choose_device", lambda wanted: CUDA)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(percent, 100))
    watching = asyncio.create_task(gpu.watch("auto", report))
    async with asyncio.timeout(20):
        await enough.wait()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert reported[:3] == [0.0, 0.55, 1.0]


async def test_gpu_watch_reports_nothing_without_pynvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def utilization(device: torch.device) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(gpu, "choose_device", lambda wanted: CUDA)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    await gpu.watch("cuda", pytest.fail)


async def test_gpu_watch_does_nothing_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", pytest.fail)
    await gpu.watch("cpu", pytest.fail)
