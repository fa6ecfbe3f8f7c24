"""Ahead-of-time compiler of every kernel that a step launches, for GPUs that are absent.

``python -m tests.support.worker.compile_kernels 80 90`` launches the kernels of a step on a CPU,
but each launch only compiles the kernel. It prints a line of JSON for each variant: its parameters
and the resources of a program. The process must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.support.worker import kernel_launches

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint64: "*u64",
}
#: Instructions of matrix products.
PRODUCTS = ("wgmma", "tcgen05.mma", "mma.sync")
#: Least compute capability of GPUs that multiply FP8.
FP8_CAPABILITY = 89
#: Options of a launch, besides the kernel's own parameters.
OPTIONS = ("num_warps", "num_stages")
#: Parameters that distinguish variants.
SHOWN = (
    *("HEAD_DIM", "BLOCK_ROWS", "BLOCK_KEYS", "TOKENS", "SPLITS", "WIDTH", "VOCAB"),
    *("CODES", "GROUP", "ACTIVATION", "EXPERTS", "OUT", "HAS_X_SCALES", "IS_FP8"),
)


class Compiling:
    """Replacement of JITFunction.run that compiles the kernel and prints its resources."""

    def __init__(self, capabilities: list[int]) -> None:
        self._capabilities = capabilities
        self._done: set[tuple[Any, ...]] = set()

    def __call__(self, kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
        signature = {name: _type(name, value, constants) for name, value in values.items()}
        signature = {name: signature[name] for name in kernel.arg_names}
        aligned = [
            i
            for i, name in enumerate(signature)
            if name not in constants and _is_aligned(values[name])
        ]
        source = ASTSource(
            kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned}
        )
        variant = (source.hash(), *options.items())
        if variant not in self._done:
            self._done.add(variant)
            for capability in self._capabilities:
                if values.get("HAS_X_SCALES") and capability < FP8_CAPABILITY:
                    continue  # FP8 inputs are not used on such a GPU
                self._compile(source, capability, options, values)

    def _compile(
        self, source: ASTSource, capability: int, options: dict[str, Any], values: dict[str, Any]
    ) -> None:
        compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options)
        cubin = compiled.asm["cubin"]
        registers, spilled = _registers(cubin)
        variant = {
            "kernel": source.name,
            "capability": capability,
            "x": source.signature.get("x"),
            "types": sorted({*source.signature.values()} & {"*bf16", "*fp16"}),
            **{name: values[name] for name in SHOWN if name in values},
            **options,
            "code_bytes": len(cubin),
            "shared_bytes": compiled.metadata.shared,
            "registers": registers,
            "spilled_bytes": spilled,
            "products": [name for name in PRODUCTS if name in compiled.asm["ptx"]],
        }
        print(json.dumps(variant), flush=True)


def _registers(cubin: bytes) -> tuple[int, int]:
    """Return a thread's number of registers, and the bytes that it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def _is_aligned(value: object) -> bool:
    """Return whether a launch declares a value divisible by 16 to the compiler."""
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


def _type(name: str, value: object, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int), (name, value)
    return "i32"


def main(capabilities: list[int]) -> None:
    compiling = Compiling(capabilities)
    JITFunction.run = lambda kernel, *args, **kwargs: compiling(kernel, *args, **kwargs)
    kernel_launches.launch_all()


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
