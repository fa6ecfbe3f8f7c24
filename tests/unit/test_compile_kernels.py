"""Every kernel compiles to machine code for GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

#: Of a program on an A100.
SHARED_BYTES = 163 << 10
KERNELS = {
    *("attend_tiles", "merge_splits", "turn_and_place"),
    *("sum_and_norm", "gate_and_multiply", "draw_rows"),
}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", [80, 90])
def test_all_kernels_compile(capability: int) -> None:
    command = [sys.executable, "-m", "tests.compile_kernels", str(capability)]
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    variants = [json.loads(line) for line in done.stdout.splitlines()]
    found = Counter(kernel for kernel, *_ in variants)
    assert {*found} == KERNELS
    # Two kinds of tiles, four head dimensions, three dtypes; and the decoding step's.
    assert found["attend_tiles"] >= 2 * 4 * 3 + 1
    for *_, size, shared in variants:
        assert size > 1000 and shared <= SHARED_BYTES
