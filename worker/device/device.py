"""Device, dtype and threads of a rank, as configured."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress

import torch

from worker.device.device_kind import DeviceKind, kind_of_gpu
from worker.kernels.trial import kernels_work
from worker.native import native

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(requested: str) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda``; ``auto`` is a GPU if there is one.

    Raises ValueError if ``requested`` is ``cuda`` and torch finds no CUDA device.
    """
    if requested == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no CUDA device here")
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(requested)


def choose_dtype(requested: str, device: torch.device, quantization: str = "none") -> torch.dtype:
    """Return the dtype to compute in.

    ``requested`` is ``float32``, ``bfloat16``, ``float16`` or ``auto``; another name raises
    KeyError. ``auto`` is bfloat16 if the device computes in it natively and the weights are not
    quantised, and float32 otherwise. ``auto`` raises ValueError on a CPU if native.LEVEL_VARIABLE
    is invalid and the weights are not quantised.
    """
    if requested != "auto":
        return _DTYPES[requested]
    if quantization != "none":
        return torch.float32
    has_bfloat16 = _gpu_has_bfloat16 if device.type == "cuda" else native.has_bfloat16
    return torch.bfloat16 if has_bfloat16() else torch.float32


def _gpu_has_bfloat16() -> bool:
    """Return whether the current GPU computes in bfloat16 natively (Ampere and newer ones do).

    Older GPUs emulate it, which torch counts as support by default.
    """
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def kind_of(device: torch.device) -> DeviceKind:
    if device.type != "cuda":
        return DeviceKind.CPU
    facts = torch.cuda.get_device_properties(device)
    return kind_of_gpu(facts.total_memory, (facts.major, facts.minor))


def name_of(device: torch.device) -> str:
    """Return the name of the device, including settings that affect its speed.

    The name of a CPU includes the number of torch's threads. That of a GPU ends with "without
    kernels" if Everlift's kernels do not work on it.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return name if kernels_work(device) else f"{name}, without kernels"
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def arithmetic(device: torch.device, dtype: torch.dtype) -> str:
    """Return a name for the arithmetic in use, which is empty if a row's bits depend on the batch.

    Equal names that are not empty mean bit-identical results of a row, provided that the dtype is
    the same. Only compiled code for a CPU, in float32 or bfloat16, computes a row with the same
    bits in any batch; a CPU with AMX computes bfloat16 with oneDNN instead. Raises ValueError if
    such code can be used and native.LEVEL_VARIABLE is invalid.
    """
    if device.type != "cpu" or dtype == torch.float16 or native.why_no_code():
        return ""
    if dtype == torch.bfloat16 and native.has_amx():
        return ""
    return f"cpu {native.target_name()}"


def _cpu_name() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def use_threads(num_threads: int | None) -> None:
    """Set the number of torch's threads to ``num_threads``, or to this process's cores if None."""
    torch.set_num_threads(num_threads or _cores())


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
