"""Learned step times of a cluster's workers, in a file for forecasts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.errors import ForecastFailed
from cluster.simulator.hardware import kind_file, learned
from everlift import settings
from everlift.step_time import Roofline
from everlift.v1.admin_pb2 import StepTimeModel, WorkerKind
from worker.config import WorkerConfig

STEPS = StepTimeModel(
    overhead_s=0.01, row_s=2e-6, token_s=1e-4, kv_token_s=3e-8, pair_s=1e-9, error=0.04
)
LARGE = WorkerKind(
    workers=3,
    device="L",
    max_num_seqs=16,
    num_blocks=400,
    max_model_len=1024,
    max_num_batched_tokens=512,
    step_time=STEPS,
)
SMALL = WorkerKind(workers=1, device="S", num_blocks=5)


def test_learned_step_times_are_a_kind_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(learned.content(LARGE)))
    kind = kind_file.read(path)
    assert kind.step_time == Roofline(0.01, 0.0, 1e-4, 3e-8, 1e-9, 2e-6)
    assert kind.worker == {
        "num_blocks": 400,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
    }


def test_learned_kind_keeps_the_engine_policy() -> None:
    kind = WorkerKind()
    kind.CopyFrom(LARGE)
    kind.engine_policy = "slai"
    made = kind_file.parse_kind("L", learned.content(kind))
    assert settings.load(WorkerConfig, made.worker).scheduling.policy == "slai"


def test_learned_kind_needs_a_device_among_several() -> None:
    assert learned.only([LARGE], None) is LARGE
    assert learned.only([LARGE, SMALL], "S") is SMALL
    with pytest.raises(ForecastFailed, match="L, S: select one with --device"):
        learned.only([LARGE, SMALL], None)
    with pytest.raises(ForecastFailed, match="no worker runs on T"):
        learned.only([LARGE], "T")
    with pytest.raises(ForecastFailed, match="no worker is connected"):
        learned.only([], None)


def test_learned_kind_rejects_an_idle_worker() -> None:
    with pytest.raises(ForecastFailed, match="send some requests"):
        learned.content(SMALL)
