"""Command-line options of a forecast."""

from __future__ import annotations

import json
from itertools import islice
from math import inf
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL
from cluster.errors import ForecastFailed, WorkloadFailed
from cluster.simulator.command import faults, machines
from cluster.simulator.command.load import Requests
from cluster.simulator.plan import saturation_rate
from cluster.simulator.scenario import WorkerDrain, WorkerLoss, WorkerSpec, WorkerStart
from everlift.errors import SettingsError

H200 = machines.spec_of(machines.kind_of("h200", "llama-3.1-8b"), None, ())


def workers(*texts: str, settings: tuple[str, ...] = ()) -> tuple[WorkerSpec, ...]:
    return machines.specs_of(texts, machines.DEFAULT_MODEL, None, settings)


# requests


def test_requests_of_a_workload_keep_its_rate_and_duration() -> None:
    arrivals = list(Requests(["azure-conversation"], duration_s=60.0).arrivals(()))
    assert 60 * 5.53 * 0.5 < len(arrivals) < 60 * 5.53 * 2
    assert arrivals[-1].at < 60.0


def test_requests_load_is_a_share_of_worker_capacity() -> None:
    asked = Requests(["chat"], load=0.5, duration_s=20.0)
    arrivals = list(asked.arrivals((H200, H200)))
    capacity = 2 * saturation_rate(arrivals, H200)
    assert len(arrivals) / 20.0 == pytest.approx(0.5 * capacity, rel=0.1)


def test_requests_of_several_workloads_share_the_rate() -> None:
    asked = Requests(["chat=3", "azure-conversation"], rate=20.0, duration_s=100.0, is_steady=True)
    kinds = [each.application for each in asked.arrivals(())]
    assert kinds.count("chat") == pytest.approx(1500, rel=0.1)
    assert kinds.count("conversation") == pytest.approx(500, rel=0.15)
    assert asked.average_rate() == pytest.approx(20.0, rel=0.1)


def test_requests_of_a_trace_keep_their_recorded_times(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * i, "input_length": 9, "output_length": 5, "hash_ids": [i]}
        for i in range(10)
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked = Requests(trace=file, begin_s=2.0, speed=2.0)
    assert [each.at for each in asked.arrivals(())] == [i / 2 for i in range(8)]
    cut = Requests(trace=file, duration_s=3.0)
    assert [each.at for each in cut.arrivals(())] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "options",
    [
        {"workloads": ["gossip"]},
        {"workloads": ["chat=0"]},
        {"workloads": ["chat=x"]},
        {"workloads": ["chat", "reasoning"]},
        {"rate": 0.0},
        {"load": inf},
        {"duration_s": -1.0},
        {"rate": 1.0, "load": 1.0},
        {"speed": 2.0},
        {"trace": Path("x"), "rate": 2.0},
        {"trace": Path("x"), "is_steady": True},
    ],
)
def test_requests_reject_invalid_options(options: dict[str, object]) -> None:
    with pytest.raises((ForecastFailed, WorkloadFailed)):
        list(islice(Requests(**options).arrivals((H200,)), 5))  # type: ignore[arg-type]


# workers


def test_worker_specs_parse_kind_and_number() -> None:
    one, two, three = workers("h200=2", "l4=1")
    assert one == two == H200
    assert three.step_time.seconds != one.step_time.seconds
    assert three.config.num_blocks != one.config.num_blocks


def test_worker_specs_default_to_h100() -> None:
    assert workers("3") == workers("h100=3")
    assert machines.specs_of(None, machines.DEFAULT_MODEL, None, ["num_workers=2"]) == workers("2")


def test_worker_spec_of_several_gpus_is_one_worker() -> None:
    (spec,) = machines.specs_of(["h100x4=1"], "llama-3.3-70b", None, ())
    assert spec.config.max_model_len == 131_072


def test_worker_specs_apply_settings_to_every_kind(tmp_path: Path) -> None:
    (spec,) = workers("l4=1", settings=("worker.max_num_seqs=9", "worker.num_blocks=77"))
    assert (spec.config.max_num_seqs, spec.config.num_blocks) == (9, 77)
    assert spec.config.max_num_batched_tokens == 2048


def test_worker_specs_accept_a_kind_file(tmp_path: Path) -> None:
    step_time = {"overhead_s": 0.0, "weights_s": 0.01, "token_s": 1e-3, "kv_token_s": 1e-7}
    worker = {"num_blocks": 50, "max_model_len": 512, "max_num_seqs": 8}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"step_time": step_time, "worker": worker}))
    (spec,) = workers(f"{file}=1")
    assert (spec.step_time.weights_s, spec.config.num_blocks) == (0.01, 50)  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["", "x", "h100=0", "h100=-1", "b200=1", "h100x0=1", "no.json=1"])
def test_worker_specs_reject_invalid_text(text: str) -> None:
    with pytest.raises(ForecastFailed):
        workers(text)


def test_worker_specs_accept_a_model_directory() -> None:
    (spec,) = machines.specs_of(["l4=1"], str(DEMO_MODEL), None, ())
    assert spec.config.max_model_len == 1024


def test_kind_of_rejects_an_unknown_model() -> None:
    with pytest.raises(ForecastFailed, match="must be one of"):
        machines.kind_of("h100", "gpt-2")


def test_worker_specs_reject_invalid_settings(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        workers("h100=1", settings=("worker.max_seqs=9",))
    with pytest.raises(ForecastFailed, match="speculation"):
        workers("h100=1", settings=("worker.speculation.num_draft_tokens=2",))


# what happens


def test_fault_events_are_sorted_by_time() -> None:
    assert faults.events(["3@60"], ["0@1.5"], ["2@30"], (H200, H200), 10.0) == (
        WorkerDrain(1.5, 0),
        WorkerStart(30.0, H200, 10.0),
        WorkerStart(30.0, H200, 10.0),
        WorkerLoss(60.0, 3),
    )


def test_slowed_sets_the_slowness_of_a_worker() -> None:
    assert [spec.slowness for spec in faults.slowed((H200, H200), ["1=2.5"])] == [1.0, 2.5]


@pytest.mark.parametrize("text", ["", "3", "3@", "@60", "x@60", "3@x", "-1@60", "3@-1", "1@inf"])
def test_fault_events_reject_invalid_text(text: str) -> None:
    with pytest.raises(ForecastFailed, match="--lose"):
        faults.events([text], None, None, (H200,) * 4, 0.0)


def test_fault_events_reject_losing_an_unknown_worker() -> None:
    with pytest.raises(ForecastFailed, match="no worker 3"):
        faults.events(["3@5"], None, ["1@2"], (H200, H200), 0.0)
    assert faults.events(["3@5"], None, None, (H200,), 0.0, is_scaled=True) == (WorkerLoss(5.0, 3),)


def test_fault_events_reject_losing_a_starting_worker() -> None:
    with pytest.raises(
        ForecastFailed, match="worker 2 cannot be removed at 40 s: it starts at 50 s"
    ):
        faults.events(None, ["2@40"], ["1@20"], (H200, H200), 30.0)
    assert faults.events(None, ["2@50.1", "0@0"], ["1@20"], (H200, H200), 30.0)
    with pytest.raises(ForecastFailed, match="worker 3"):
        faults.events(["3@45"], None, ["1@20", "1@10"], (H200, H200), 30.0)
    assert faults.events(["2@45"], None, ["1@20", "1@10"], (H200, H200), 30.0)


def test_fault_events_start_workers_at_normal_speed() -> None:
    slow = faults.slowed((H200, H200), ["0=3"])
    assert faults.events(None, None, ["1@20"], slow, 5.0) == (WorkerStart(20.0, H200, 5.0),)


@pytest.mark.parametrize("text", ["2=2", "0=0", "0@2"])
def test_slowed_rejects_invalid_text(text: str) -> None:
    with pytest.raises(ForecastFailed, match="--slow"):
        faults.slowed((H200, H200), [text])
