"""Search for the smallest sufficient number of workers, and its targets."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from itertools import islice, takewhile
from math import inf, log2
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image
from rich.console import Console

from cluster.errors import ForecastFailed
from cluster.simulator import plan_views
from cluster.simulator.command import machines
from cluster.simulator.plan import Plan, Trial, fewest, meets_targets, saturation_rate
from cluster.simulator.scenario import Scenario, WorkerSpec
from cluster.simulator.simulate import simulate
from cluster.simulator.summary import Slo
from cluster.simulator.target import Target, slo, targets
from cluster.simulator.workloads.arrivals import Arrival
from cluster.simulator.workloads.known import WORKLOADS
from everlift.step_time import Roofline
from tests.support import forecasts
from worker.config import WorkerConfig

# the search


@given(needed=st.integers(1, 300), guess=st.integers(0, 400), most=st.integers(1, 300))
def test_fewest_finds_the_minimum_in_few_trials(needed: int, guess: int, most: int) -> None:
    asked: list[int] = []

    def attempt(workers: int) -> Trial:
        asked.append(workers)
        return Trial(workers, (needed / workers,), workers >= needed)

    plan = fewest(attempt, guess, most)
    assert plan.workers == (needed if needed <= most else None)
    assert [trial.workers for trial in plan.trials] == sorted(set(asked)) == sorted(asked)
    assert len(asked) <= 3 + 2 * log2(1 + abs(needed - guess) + most)
    assert all(1 <= workers <= most for workers in asked)


def test_is_kept_requires_every_target() -> None:
    assert meets_targets((0.5, 0.05), (1.0, 0.05))
    assert not meets_targets((0.5, 0.06), (1.0, 0.05))


# targets


def test_plan_targets_and_slo_are_parsed() -> None:
    assert targets("ttft_p99=1s,tpot_p99=50ms, latency_mean=2.5s") == (
        Target("ttft", "p99", 1.0),
        Target("tpot", "p99", 0.05),
        Target("latency", "mean", 2.5),
    )
    assert slo("ttft=1s, tpot=50ms") == Slo(ttft_s=1.0, tpot_s=0.05)
    assert slo("tpot=50ms") == Slo(tpot_s=0.05)
    assert slo(None) == Slo()


@pytest.mark.parametrize(
    "text", ["", "ttft=1s", "ttft_p99", "ttft_p99=1", "ttft_p99=0s", "wait_p50=1s", "ttft_max=1s"]
)
def test_plan_targets_reject_invalid_text(text: str) -> None:
    with pytest.raises(ForecastFailed):
        targets(text)


@pytest.mark.parametrize("text", ["", "latency=1s", "ttft", "ttft=-1s", "ttft=1s,"])
def test_plan_slo_rejects_invalid_text(text: str) -> None:
    with pytest.raises(ForecastFailed):
        slo(text)


def test_target_counts_unfinished_requests_as_infinite() -> None:
    records = forecasts.some().records
    assert Target("ttft", "p50", 1.0).attained(records) == pytest.approx(0.5)
    assert Target("ttft", "p90", 1.0).attained(records) == pytest.approx(0.9)
    assert Target("ttft", "p99", 1.0).attained(records) == inf
    assert Target("ttft", "mean", 1.0).attained(records) == inf
    assert Target("tpot", "mean", 1.0).attained(records[:9]) == pytest.approx(0.02)
    assert Target("ttft", "p99", 1.0).attained(()) == inf


@pytest.mark.parametrize("statistic, place", [("p99.9", 998), ("p50", 499)])
def test_target_percentile_is_a_nearest_rank(statistic: str, place: int) -> None:
    """The rank is exact, although p99.9 / 100 is not in floating point."""
    record = forecasts.some().records[0]
    records = [replace(record, first_token=record.arrival.at + i) for i in range(1000)]
    assert Target("ttft", statistic, 1.0).attained(records) == pytest.approx(place)


# saturation rate of a worker

SLOW = Roofline(overhead_s=0.0, weights_s=1.0, token_s=0.0, kv_token_s=0.0)
PRODUCTS = Roofline(overhead_s=0.0, weights_s=0.0, token_s=0.001, kv_token_s=0.0)
REQUESTS = [Arrival(0.0, 100, 20, 50), Arrival(0.0, 300, 80, 20)]


def worker(step_time: Roofline, **settings: int) -> WorkerSpec:
    config = {"num_blocks": 10_000, "max_model_len": 4096, "max_num_batched_tokens": 2048}
    return WorkerSpec(WorkerConfig(**{**config, **settings}), step_time)  # type: ignore[arg-type]


def test_saturation_rate_is_bounded_by_slots() -> None:
    """Each request has 20 output tokens; ``max_tokens`` truncates the second one's 80."""
    assert saturation_rate(REQUESTS, worker(SLOW, max_num_seqs=10)) == pytest.approx(10 / 20)


def test_saturation_rate_is_bounded_by_the_token_budget() -> None:
    """A row takes 1 token per step, and 200 / 20 tokens for the prompts of later requests."""
    limited = worker(SLOW, max_num_seqs=256, max_num_batched_tokens=256)
    assert saturation_rate(REQUESTS, limited) == pytest.approx(256 / 11 / 20)


def test_saturation_rate_is_bounded_by_the_kv_cache() -> None:
    """A sequence has 210 tokens on average."""
    limited = worker(SLOW, num_blocks=100)
    assert saturation_rate(REQUESTS, limited) == pytest.approx(3200 * 0.99 / 210 / 20)


def test_saturation_rate_is_bounded_by_compute() -> None:
    assert saturation_rate(REQUESTS, worker(PRODUCTS)) == pytest.approx(1000 / 220)
    half = WorkerSpec(worker(PRODUCTS).config, PRODUCTS, slowness=2.0)
    assert saturation_rate(REQUESTS, half) == pytest.approx(500 / 220)


@pytest.mark.long
def test_saturation_rate_matches_a_simulated_worker() -> None:
    """Conversations arrive at an H200 at 1.5 times its estimated saturation rate."""
    spec = machines.spec_of(machines.kind_of("h200", "llama-3.1-8b"), None, ())
    workload = replace(WORKLOADS["azure-conversation"].without_drift(), deadline_s=inf)
    estimate = saturation_rate(list(islice(workload.arrivals(1), 2000)), spec)
    arrivals = takewhile(lambda each: each.at < 40, workload.at_rate(1.5 * estimate).arrivals(1))
    answer = simulate(arrivals, Scenario((spec,)))
    ended = sum(20 <= record.finished < 40 for record in answer.records)
    assert estimate == pytest.approx(ended / 20, rel=0.1)


# views of a plan

TARGETS = (Target("ttft", "p99", 1.0), Target("tpot", "mean", 0.05))
ENOUGH = Plan(2, (Trial(1, (inf, 0.06), False), Trial(2, (0.8, 0.04), True)))
HOPELESS = Plan(None, (Trial(1, (0.5, 0.09), False), Trial(4, (0.1, 0.0899), False)))
TOO_FEW = Plan(None, (Trial(1, (9.0, 0.04), False), Trial(4, (2.0, 0.03), False)))


def test_plan_verdict_gives_the_number_or_the_cause() -> None:
    assert plan_views.verdict("h100", ENOUGH, TARGETS) == "h100: 2 workers are enough"
    assert plan_views.verdict("h100", HOPELESS, TARGETS) == (
        "h100: 4 workers are not enough: tpot_mean is 89.9 ms, and more workers would not change "
        "that"
    )
    assert plan_views.verdict("h100", TOO_FEW, TARGETS) == (
        "h100: 4 workers are not enough: ttft_p99 is 2.00 s"
    )


def test_plan_verdict_counts_refused_requests() -> None:
    """Refused requests keep a percentile from being reached with any number of workers."""
    refused = {"deadline_exceeded": 3, "prompt_too_long": 7}
    trials = [Trial(n, (inf, 0.04), False, refused) for n in (2, 4)]
    assert plan_views.verdict("l4", Plan(None, tuple(trials)), TARGETS) == (
        "l4: 4 workers are not enough: ttft_p99 is never reached, and more workers would not "
        "change that; 7 requests ended with prompt_too_long; "
        "3 requests ended with deadline_exceeded"
    )
    enough = Plan(1, (Trial(1, (0.8, 0.04), True, {"queue_full": 2}),))
    assert plan_views.verdict("l4", enough, TARGETS) == (
        "l4: 1 worker is enough; 2 requests ended with queue_full"
    )
    content = plan_views.as_json({"l4": enough}, TARGETS)
    assert json.loads(json.dumps(content))["kinds"]["l4"]["trials"][0]["refused"] == {
        "queue_full": 2
    }


def test_plan_json_has_every_trial() -> None:
    content = json.loads(json.dumps(plan_views.as_json({"l4": ENOUGH}, TARGETS), allow_nan=False))
    assert content["targets"] == {"ttft_p99": 1.0, "tpot_mean": 0.05}
    assert content["kinds"]["l4"]["workers"] == 2
    first = content["kinds"]["l4"]["trials"][0]
    assert first["attained_s"] == {"ttft_p99": None, "tpot_mean": 0.06}


def test_plan_is_drawn_and_tabulated(tmp_path: Path) -> None:
    never = Plan(None, (Trial(1, (inf, inf), False),))
    hard = (Target("ttft", "p99", 10.0), Target("tpot", "mean", 1.0))
    assert plan_views.draw({"l4": never}, hard, tmp_path / "never.png").exists()
    plans = {"h100": ENOUGH, "l4": HOPELESS}
    path = plan_views.draw(plans, TARGETS, tmp_path / "plan.png")
    assert image.imread(path).std() > 0.05
    written = StringIO()
    Console(width=100, file=written).print(plan_views.table(plans, TARGETS))
    assert "never" in written.getvalue() and "89.9 ms" in written.getvalue()
