"""Compilation of every kernel to machine code for several GPUs, none of which is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

#: Shared memory of a program by compute capability: on an A100, an L40, an H100 and a B200.
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
#: Spilled bytes of a thread that cost next to nothing.
SPILLED_BYTES = 128
#: Instructions of newer GPUs that multiply matrices, by compute capability.
OWN = {90: "wgmma", 100: "tcgen05.mma"}
KERNELS = {
    *("attend_tiles", "merge_splits", "turn_and_place"),
    *("sum_and_norm", "gate_and_multiply", "draw_rows"),
    *("multiply_tiles", "quantise_rows", "sum_splits", "route_tokens", "sort_pairs", "sum_experts"),
}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_for_every_capability(capability: int) -> None:
    command = [sys.executable, "-m", "tests.support.worker.compile_kernels", str(capability)]
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    variants = [json.loads(line) for line in done.stdout.splitlines()]
    found = Counter(variant["kernel"] for variant in variants)
    assert {*found} == KERNELS
    # Two kinds of tiles, four head dimensions, three dtypes; and the variant for decode steps.
    assert found["attend_tiles"] >= 2 * 4 * 3 + 1
    for variant in variants:
        assert variant["code_bytes"] > 1000 and variant["shared_bytes"] <= SHARED_BYTES[capability]
        assert variant["spilled_bytes"] <= SPILLED_BYTES, variant
        if variant["types"] and variant["kernel"] == "attend_tiles":
            # These instructions need tiles of at least 64 queries.
            is_wide = variant["BLOCK_ROWS"] >= 64 and capability >= 90
            assert (OWN[capability] if is_wide else "mma.sync") in variant["products"], variant
        if variant["kernel"] == "multiply_tiles" and variant["x"] != "*fp32":
            # A failed compilation may leave a program that does nothing.
            assert variant["registers"] > 16
            assert OWN.get(capability, "mma.sync") in variant["products"], variant
