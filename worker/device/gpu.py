"""How busy this rank's GPU is, as NVML has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from everlift import logs
from worker.device.device import choose_device

log = logs.get(__name__)

#: NVML's own figure is of about the last second.
_INTERVAL_S = 1.0


async def watch(device: str, tell: Callable[[float], None]) -> None:
    """Tells the part of the last while, from 0 to 1, in which the GPU ran anything, once a second
    until cancelled. Returns where ``device`` is none, or NVML cannot be asked: it takes pynvml."""
    if (chosen := choose_device(device)).type != "cuda":
        return
    try:
        while True:
            tell(await asyncio.to_thread(torch.cuda.utilization, chosen) / 100)
            await asyncio.sleep(_INTERVAL_S)
    except Exception as error:
        log.info("GPU utilisation not known", cause=str(error))
