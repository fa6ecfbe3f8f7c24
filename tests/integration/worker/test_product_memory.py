"""Memory of the matrix products that oneDNN compiles in a rank's process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cluster.config import DEMO_MODEL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_SCRIPT = """
import os, sys
import torch
from tests.soak.growth import resident_kib
from worker.runner.build import build_runner
from worker.config import WorkerConfig
from worker.model.onednn import OneDnn
from worker.parallel.group import Group

config = WorkerConfig(model=sys.argv[1], dtype="float32", device="cpu", num_blocks=16)
build_runner(config, Group.single())
weights = [torch.randn(outputs, 64) for outputs in (32, 64, 96, 128)]
packed = [OneDnn(weight) for weight in weights]
before = resident_kib(os.getpid())
with torch.inference_mode():
    for rows in range(1, 401):
        for weight in packed:
            x = torch.randn(rows, 64)
            {product}
print(resident_kib(os.getpid()) - before >> 10)
"""


def grown_mib(product: str) -> int:
    """Return a rank's memory growth in MiB after products of 1 to 400 rows with four weights."""
    command = [sys.executable, "-c", _SCRIPT.format(product=product), str(DEMO_MODEL)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_packed_products_take_bounded_memory() -> None:
    # 40 padded numbers of rows with four weights are 160 products of 0.55 MiB.
    assert grown_mib("weight.multiply(x, None)") < 150


@pytest.mark.long
def test_onednn_linear_products_take_bounded_memory() -> None:
    # The caches hold 256 products. Freed code fragments the heap.
    product = 'torch.ops.mkldnn._linear_pointwise(x, weight._packed, None, "none", [], "")'
    assert grown_mib(product) < 300
