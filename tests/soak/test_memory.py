"""Growth of the memory of workers and routers per request."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.report import machine
from cluster.config import load
from cluster.local.processes import ProcessCluster
from tests.soak.duration import minutes
from tests.soak.growth import LIMIT_KIB, Growth, Sample, resident_kib
from tests.soak.short_requests import ShortRequests

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(0),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

_MINUTES = 30.0
#: Share of the soak's duration in which requests are sent.
_PART = 1 / 2
_SEED = 6
#: Number of requests between two samples.
_EVERY = 20
#: Least number of requests; a busy machine takes more time for them.
_LEAST_REQUESTS = 2000
_MAX_TOKENS = 512
_VOCAB_SIZE = 512
#: Limit of a worker's growth during warm-up, without its KV cache: 256 compiled products of 0.55
#: MiB, and as much for code that is loaded at first use and for fragmentation.
_WARM_UP_MIB = 280
_KV_CACHE_MIB = 16


async def test_memory_growth_per_request_is_bounded(tmp_path: Path) -> None:
    settings = [
        # With bfloat16, the compiled kernels have no caches.
        "worker.dtype=float32",
        f"worker.kv_cache_mib={_KV_CACHE_MIB}",
        f"worker.max_num_batched_tokens={_MAX_TOKENS}",
        "worker.num_threads=1",
        "router.port=0",
        "router.http_port=0",
        "num_workers=1",
        f"state_dir={tmp_path}",
    ]
    async with ProcessCluster(load(None, {}, settings)) as cluster:
        pids = {"worker": cluster.workers[0].pids[0], "router": cluster.routers[0].pids[0]}
        samples: dict[str, list[Sample]] = {name: [] for name in pids}
        requests = ShortRequests(cluster.addresses, _SEED)

        def sample() -> None:
            if requests.num_done % _EVERY == 0:
                for name, pid in pids.items():
                    samples[name].append(Sample(requests.num_done, resident_kib(pid)))

        sample()
        await requests.warm_up(_MAX_TOKENS, _VOCAB_SIZE)
        end = time.monotonic() + minutes(_MINUTES) * _PART * 60
        await requests.run(
            lambda: time.monotonic() > end and requests.num_done >= _LEAST_REQUESTS, sample
        )
    growths = {name: Growth.of(each) for name, each in samples.items()}
    _report(growths)
    worker = growths["worker"]
    assert worker.kib_per_request <= worker.bound_kib
    assert worker.warm_up_mib <= _KV_CACHE_MIB + _WARM_UP_MIB


def _report(growths: dict[str, Growth]) -> None:
    figures: dict[str, Any] = {name: growth.figures for name, growth in growths.items()}
    figures = {"machine": machine(), "limit_kib_per_request": LIMIT_KIB} | figures
    if path := os.environ.get("SOAK_REPORT"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")
    console = Console(highlight=False, width=120)
    console.print("\nsoak: memory per request")
    console.print_json(json.dumps(figures))
