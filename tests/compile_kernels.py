"""Compiles every kernel that a step launches ahead of time, for GPUs that are not there.

``python -m tests.compile_kernels 80 90`` launches what a step does, on a CPU, with a launch in the
place of Triton's that compiles what it was to run. A line of JSON for each variant: kernel, compute
capability, bytes of machine code, and of memory that the threads of a program share. It takes a
process without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests import kernel_launches

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint64: "*u64",
}
#: Options of a launch, beside the kernel's own parameters.
OPTIONS = ("num_warps", "num_stages")


class Compiling:
    """In the place of JITFunction.run."""

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
                self._compile(source, capability, options)

    def _compile(self, source: ASTSource, capability: int, options: dict[str, Any]) -> None:
        compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options)
        cubin = compiled.asm["cubin"]
        shared = compiled.metadata.shared
        print(json.dumps([source.name, capability, len(cubin), shared]), flush=True)


def _is_aligned(value: object) -> bool:
    """As a launch tells the compiler: memory is, and so are multiples of 16."""
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
