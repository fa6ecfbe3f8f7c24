"""What is said on the command line, as what a forecast is of."""

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


def test_a_workload_comes_at_its_own_rate_for_its_duration() -> None:
    arrivals = list(Requests(["azure-conversation"], duration_s=60.0).arrivals(()))
    assert 60 * 5.53 * 0.5 < len(arrivals) < 60 * 5.53 * 2
    assert arrivals[-1].at < 60.0


def test_a_load_is_a_part_of_what_the_workers_can_do() -> None:
    asked = Requests(["chat"], load=0.5, duration_s=20.0)
    arrivals = list(asked.arrivals((H200, H200)))
    capacity = 2 * saturation_rate(arrivals, H200)
    assert len(arrivals) / 20.0 == pytest.approx(0.5 * capacity, rel=0.1)


def test_several_workloads_share_the_rate() -> None:
    asked = Requests(["chat=3", "azure-conversation"], rate=20.0, duration_s=100.0, is_steady=True)
    kinds = [each.application for each in asked.arrivals(())]
    assert kinds.count("chat") == pytest.approx(1500, rel=0.1)
    assert kinds.count("conversation") == pytest.approx(500, rel=0.15)
    assert asked.average_rate() == pytest.approx(20.0, rel=0.1)


def test_a_trace_comes_as_it_was_recorded(tmp_path: Path) -> None:
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
def test_requests_that_cannot_be_are_refused(options: dict[str, object]) -> None:
    with pytest.raises((ForecastFailed, WorkloadFailed)):
        list(islice(Requests(**options).arrivals((H200,)), 5))  # type: ignore[arg-type]


# workers


def test_workers_are_named_by_kind_and_number() -> None:
    one, two, three = workers("h200=2", "l4=1")
    assert one == two == H200
    assert three.step_time.seconds != one.step_time.seconds
    assert three.config.num_blocks != one.config.num_blocks


def test_without_a_kind_they_are_of_the_usual_one() -> None:
    assert workers("3") == workers("h100=3")
    assert machines.specs_of(None, machines.DEFAULT_MODEL, None, ["num_workers=2"]) == workers("2")


def test_several_gpus_make_one_worker() -> None:
    (spec,) = machines.specs_of(["h100x4=1"], "llama-3.3-70b", None, ())
    assert spec.config.max_model_len == 131_072


def test_what_is_set_is_set_for_each_kind(tmp_path: Path) -> None:
    (spec,) = workers("l4=1", settings=("worker.max_num_seqs=9", "worker.num_blocks=77"))
    assert (spec.config.max_num_seqs, spec.config.num_blocks) == (9, 77)
    assert spec.config.max_num_batched_tokens == 2048


def test_a_file_is_a_kind_too(tmp_path: Path) -> None:
    step_time = {"overhead_s": 0.0, "weights_s": 0.01, "token_s": 1e-3, "kv_token_s": 1e-7}
    worker = {"num_blocks": 50, "max_model_len": 512, "max_num_seqs": 8}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"step_time": step_time, "worker": worker}))
    (spec,) = workers(f"{file}=1")
    assert (spec.step_time.weights_s, spec.config.num_blocks) == (0.01, 50)  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["", "x", "h100=0", "h100=-1", "b200=1", "h100x0=1", "no.json=1"])
def test_workers_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ForecastFailed):
        workers(text)


def test_a_directory_with_a_config_is_a_model_too() -> None:
    (spec,) = machines.specs_of(["l4=1"], str(DEMO_MODEL), None, ())
    assert spec.config.max_model_len == 1024


def test_a_model_that_is_not_known_is_refused() -> None:
    with pytest.raises(ForecastFailed, match="must be one of"):
        machines.kind_of("h100", "gpt-2")


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        workers("h100=1", settings=("worker.max_seqs=9",))
    with pytest.raises(ForecastFailed, match="speculation"):
        workers("h100=1", settings=("worker.speculation.num_draft_tokens=2",))


# what happens


def test_events_are_in_the_order_of_their_moments() -> None:
    assert faults.events(["3@60"], ["0@1.5"], ["2@30"], (H200, H200), 10.0) == (
        WorkerDrain(1.5, 0),
        WorkerStart(30.0, H200, 10.0),
        WorkerStart(30.0, H200, 10.0),
        WorkerLoss(60.0, 3),
    )


def test_a_slow_worker() -> None:
    assert [spec.slowness for spec in faults.slowed((H200, H200), ["1=2.5"])] == [1.0, 2.5]


@pytest.mark.parametrize("text", ["", "3", "3@", "@60", "x@60", "3@x", "-1@60", "3@-1", "1@inf"])
def test_events_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ForecastFailed, match="--lose"):
        faults.events([text], None, None, (H200,) * 4, 0.0)


def test_a_worker_that_never_comes_cannot_go() -> None:
    with pytest.raises(ForecastFailed, match="no worker 3"):
        faults.events(["3@5"], None, ["1@2"], (H200, H200), 0.0)
    assert faults.events(["3@5"], None, None, (H200,), 0.0, is_scaled=True) == (WorkerLoss(5.0, 3),)


def test_a_worker_that_is_still_starting_cannot_go() -> None:
    with pytest.raises(ForecastFailed, match="worker 2 cannot go at 40 s: it comes at 50 s"):
        faults.events(None, ["2@40"], ["1@20"], (H200, H200), 30.0)
    assert faults.events(None, ["2@50.1", "0@0"], ["1@20"], (H200, H200), 30.0)
    with pytest.raises(ForecastFailed, match="worker 3"):
        faults.events(["3@45"], None, ["1@20", "1@10"], (H200, H200), 30.0)
    assert faults.events(["2@45"], None, ["1@20", "1@10"], (H200, H200), 30.0)


def test_who_comes_is_not_as_slow_as_the_first_worker_is_made() -> None:
    slow = faults.slowed((H200, H200), ["0=3"])
    assert faults.events(None, None, ["1@20"], slow, 5.0) == (WorkerStart(20.0, H200, 5.0),)


@pytest.mark.parametrize("text", ["2=2", "0=0", "0@2"])
def test_slow_workers_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ForecastFailed, match="--slow"):
        faults.slowed((H200, H200), [text])
