"""Native code of a decoder: choice of the fastest for this machine, and parallel compilation."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from worker.attention.cpu import compiled_kernel
from worker.model.compiled_pointwise import choose_pointwise
from worker.model.lora import lora_library
from worker.model.matrix import Packing
from worker.model.onednn import OneDnnPacking
from worker.model.panels import panel_packing, working_panels
from worker.model.panels import pays as panels_pay
from worker.model.stack import stack_library
from worker.model.weight_format import CodeType
from worker.native import native
from worker.native.argmax import choose_argmax


def choose_packing(
    dtype: torch.dtype, weights: torch.dtype, codes: CodeType | None = None
) -> Packing:
    """Return the fastest CPU packing for weights of type ``weights`` and inputs of ``dtype``.

    ``codes`` is the type of the codes of quantised weights, if there are any.
    """
    experts = partial(working_panels, dtype, weights, codes)
    return panel_packing(dtype, weights, codes) or OneDnnPacking(experts)


def describe_kernels(
    dtype: torch.dtype, weights: torch.dtype, num_threads: int, codes: CodeType | None = None
) -> str:
    """Return a description of the kernels of matrix products, such as `oneDNN, 2 threads (AMX)`.

    The text in parentheses is the reason for the choice.
    """
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    if panel_packing(dtype, weights, codes) is None:
        if codes is not None:
            cause = native.why_no_code() or f"dtype is {_short(dtype)}"
            return f"torch, {threads}: {codes} weights are dequantised for each product ({cause})"
        cause = native.why_no_code() or ("AMX" if native.has_amx() else f"dtype is {_short(dtype)}")
        return f"oneDNN, {threads} ({cause})"
    if dtype == torch.bfloat16:
        cause = "products of bf16" if native.has_bfloat16() else "dtype is bf16"
    else:
        cause = "dtype is fp32" if native.has_bfloat16() else "no BF16 instructions"
        cause += ": fp32 arithmetic"
    return f"{codes or _short(weights)} panels, {native.instructions()}, {threads} ({cause})"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def precompile(
    head_dim: int,
    dtype: torch.dtype,
    weights: torch.dtype,
    device: torch.device,
    codes: CodeType | None = None,
    has_adapters: bool = False,
) -> None:
    """Compile the native libraries that a decoder on a CPU needs, in parallel.

    ``has_adapters`` is whether the model has LoRA adapters. On other devices there is nothing to
    compile.
    """
    if device.type != "cpu":
        return
    libraries: list[Callable[[], object]] = [
        partial(compiled_kernel, head_dim, dtype),
        partial(choose_pointwise, dtype, device),
        partial(choose_argmax, device),
    ]
    if has_adapters:
        libraries.append(partial(lora_library, dtype))
    if panels_pay(dtype, weights, codes):
        libraries.append(partial(panel_packing, dtype, weights, codes))
        libraries.append(partial(stack_library, head_dim, dtype, weights, codes))
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        for compiled in [compilers.submit(library) for library in libraries]:
            compiled.result()
