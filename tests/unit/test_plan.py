"""How many workers are enough, and what they are to attain."""

from __future__ import annotations

from math import inf, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ForecastFailed
from cluster.forecast.arrival import Arrival
from cluster.forecast.plan import Trial, fewest, is_kept
from cluster.forecast.saturation import saturation_rate
from cluster.forecast.scenario import WorkerSpec
from cluster.forecast.summary import Slo
from cluster.forecast.target import Target, slo, targets
from router.admission.step_time import Roofline
from tests import forecasts
from worker.config import WorkerConfig

# the search


@given(needed=st.integers(1, 300), guess=st.integers(0, 400), most=st.integers(1, 300))
def test_the_fewest_that_are_enough_are_found_in_few_trials(
    needed: int, guess: int, most: int
) -> None:
    asked: list[int] = []

    def attempt(workers: int) -> Trial:
        asked.append(workers)
        return Trial(workers, (needed / workers,), workers >= needed)

    plan = fewest(attempt, guess, most)
    assert plan.workers == (needed if needed <= most else None)
    assert [trial.workers for trial in plan.trials] == sorted(set(asked)) == sorted(asked)
    assert len(asked) <= 3 + 2 * log2(1 + abs(needed - guess) + most)
    assert all(1 <= workers <= most for workers in asked)


def test_a_wish_is_kept_only_where_all_targets_are() -> None:
    assert is_kept((0.5, 0.05), (1.0, 0.05))
    assert not is_kept((0.5, 0.06), (1.0, 0.05))


# targets


def test_targets_are_read() -> None:
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
def test_targets_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ForecastFailed):
        targets(text)


@pytest.mark.parametrize("text", ["", "latency=1s", "ttft", "ttft=-1s", "ttft=1s,"])
def test_wishes_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ForecastFailed):
        slo(text)


def test_what_never_ended_took_for_ever() -> None:
    records = forecasts.some().records
    assert Target("ttft", "p50", 1.0).attained(records) == pytest.approx(0.5)
    assert Target("ttft", "p90", 1.0).attained(records) == pytest.approx(0.9)
    assert Target("ttft", "p99", 1.0).attained(records) == inf
    assert Target("ttft", "mean", 1.0).attained(records) == inf
    assert Target("tpot", "mean", 1.0).attained(records[:9]) == pytest.approx(0.02)
    assert Target("ttft", "p99", 1.0).attained(()) == inf


# what a worker can do

SLOW = Roofline(overhead_s=0.0, weights_s=1.0, token_s=0.0, kv_token_s=0.0)
PRODUCTS = Roofline(overhead_s=0.0, weights_s=0.0, token_s=0.001, kv_token_s=0.0)
REQUESTS = [Arrival(0.0, 100, 20, 50), Arrival(0.0, 300, 80, 20)]


def worker(step_time: Roofline, **settings: int) -> WorkerSpec:
    config = {"num_blocks": 10_000, "max_model_len": 4096, "max_num_batched_tokens": 2048}
    return WorkerSpec(WorkerConfig(**{**config, **settings}), step_time)  # type: ignore[arg-type]


def test_as_many_requests_end_in_a_step_as_slots_over_their_outputs() -> None:
    """Both have 20 output tokens: the second would have had 80."""
    assert saturation_rate(REQUESTS, worker(SLOW, max_num_seqs=10)) == pytest.approx(10 / 20)


def test_the_budget_allows_so_many_rows_as_leave_room_for_their_prompts() -> None:
    """A row needs 1 token a step, and 200 / 20 for the prompts that come after it."""
    limited = worker(SLOW, max_num_seqs=256, max_num_batched_tokens=256)
    assert saturation_rate(REQUESTS, limited) == pytest.approx(256 / 11 / 20)


def test_the_cache_allows_so_many_rows_as_it_holds() -> None:
    """Of 210 tokens on the average."""
    limited = worker(SLOW, num_blocks=100)
    assert saturation_rate(REQUESTS, limited) == pytest.approx(3200 * 0.99 / 210 / 20)


def test_where_products_count_it_is_tokens_that_are_done() -> None:
    assert saturation_rate(REQUESTS, worker(PRODUCTS)) == pytest.approx(1000 / 220)
    half = WorkerSpec(worker(PRODUCTS).config, PRODUCTS, slowness=2.0)
    assert saturation_rate(REQUESTS, half) == pytest.approx(500 / 220)
