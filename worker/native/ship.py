"""``python -m worker.native.ship``: compile the libraries that an image ships, for all LEVELS.

For each head dimension of HEAD_DIMS, the libraries include an attention kernel and compiled
decoders, in fp32 and, for the level with BF16 instructions, also in bf16. Compiled decoders for
quantised checkpoints are included for QUANTISED_HEAD_DIMS only. A model with another head dimension
needs a compiler on the machine where it runs, or uses slower code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from worker.attention.cpu import kernel_flags
from worker.model.lora import lora_flags
from worker.model.panels import panel_flags
from worker.model.stack import stack_flags
from worker.model.weight_format import CODE_TYPES
from worker.native import native

#: Head dimensions of the published models of the supported families and of the demo model.
HEAD_DIMS = (32, 64, 80, 96, 128, 256)
#: Head dimensions of the models that are published in quantised formats most often.
QUANTISED_HEAD_DIMS = (64, 128)
_WEIGHTS_OF = {
    torch.float32: (torch.float32, torch.bfloat16, torch.int8),
    torch.bfloat16: (torch.bfloat16,),
}
_WORKER = Path(__file__).parents[1]


def libraries(level: native.Level) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the source file and the compiler flags of each library that ``level`` needs."""
    yield _WORKER / "parallel" / "collectives.cpp", ()
    yield _WORKER / "native" / "argmax.cpp", ()
    # dtype auto chooses float32 if the CPU has no bfloat16 instructions, and never float16.
    has_bfloat16 = level.name == "avx512_bf16"
    for dtype in (torch.float32, torch.bfloat16) if has_bfloat16 else (torch.float32,):
        yield _WORKER / "model" / "pointwise.cpp", (f"-D{native.DTYPES[dtype]}",)
        yield _WORKER / "model" / "lora.cpp", lora_flags(dtype)
        for head_dim in HEAD_DIMS:
            yield _WORKER / "attention" / "paged.cpp", kernel_flags(head_dim, dtype)
        for weights in _WEIGHTS_OF[dtype]:
            yield _WORKER / "model" / "panels.cpp", panel_flags(dtype, weights)
            for head_dim in HEAD_DIMS:
                yield _WORKER / "model" / "stack.cpp", stack_flags(head_dim, dtype, weights)
        for weights in {dtype, torch.bfloat16}:
            for codes in CODE_TYPES:
                yield _WORKER / "model" / "panels.cpp", panel_flags(dtype, weights, codes)
                for head_dim in QUANTISED_HEAD_DIMS:
                    flags = stack_flags(head_dim, dtype, weights, codes)
                    yield _WORKER / "model" / "stack.cpp", flags


def main() -> None:
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        compiling = [
            compilers.submit(native.ship, source, flags, level)
            for level in native.LEVELS
            for source, flags in libraries(level)
        ]
        for compilation in compiling:
            compilation.result()
    print(f"{len(compiling)} libraries")


if __name__ == "__main__":
    main()
