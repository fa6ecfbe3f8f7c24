"""Evaluation by the admission benchmark."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.online.online_load import Answer
from benchmarks.scheduling import (
    scheduling,
    scheduling_fair_share,
    scheduling_faithful,
    scheduling_forecast,
    scheduling_picture,
    scheduling_queue,
    scheduling_sessions,
    scheduling_victims,
)
from benchmarks.scheduling.scheduling_live import figures, ratios, saturation
from benchmarks.scheduling.scheduling_mix import APPLICATIONS, MAX_TOKENS, Request, mix
from everlift.hashes import BLOCK_SIZE
from tests.support.worker.worker_support import limits, prompt, sequence
from worker.engine import scheduler
from worker.engine.sequence import Sequence


def request(due: float, tokens: int, *, is_high: bool = False) -> Request:
    return Request(APPLICATIONS[0], "p", tokens, due, is_high)


def answer(request: Request, ttft_s: float, e2e_s: float) -> Answer:
    return Answer(request.due, request.due + ttft_s, request.due + e2e_s, request.tokens)


def test_mix_is_reproducible_and_keeps_application_shares() -> None:
    requests = mix(4000, 8.0, seed=1)
    assert mix(4000, 8.0, seed=1) == requests
    for application in APPLICATIONS:
        of_it = [it for it in requests if it.application is application]
        assert len(of_it) / 4000 == pytest.approx(application.share, abs=0.03)
    assert requests[-1].due == pytest.approx(500, rel=0.1)
    assert fmean(it.tokens for it in requests) == pytest.approx(80, rel=0.1)
    assert fmean(it.is_high for it in requests) == pytest.approx(0.1, abs=0.02)
    assert len({it.prompt[:12] for it in requests}) == 4000


def test_timed_request_max_tokens_hides_the_output_length() -> None:
    timed = request(0.0, 7).to_timed_request(priority=5)
    assert (timed.max_tokens, timed.tokens) == (MAX_TOKENS, 7)
    assert timed.fields["min_tokens"] == 6
    assert timed.fields["priority"] == 5


def test_saturation_excludes_ramp_up_and_tail() -> None:
    slow_begin = [answer(request(0.0, 10), 1.0, 50.0 + i) for i in range(20)]
    middle = [answer(request(0.0, 10), 1.0, 70.0 + i / 2) for i in range(61)]
    slow_end = [answer(request(0.0, 10), 1.0, 120.0 + 9 * i) for i in range(19)]
    assert saturation([*slow_end, *middle, *slow_begin]) == pytest.approx(20.0)


def test_figures_of_live_answers_include_the_high_class() -> None:
    requests = [request(1.0, 10), request(2.0, 20, is_high=True)]
    found = figures(requests, [answer(requests[0], 1.0, 2.0), answer(requests[1], 3.0, 8.0)])
    assert found["tokens_per_s"] == pytest.approx(30 / 10)
    assert found["normalised_latency_mean_ms"] == pytest.approx(300.0)
    assert (found["ttft_p99_s"], found["high_ttft_p99_s"]) == (3.0, 3.0)
    assert found["ttft_mean_s"] == 2.0


def test_admission_ratios_are_relative_to_fifo() -> None:
    fifo = {"normalised_latency_mean_ms": 10.0, "ttft_p99_s": 4.0, "high_ttft_p99_s": 4.0}
    shortest = {"normalised_latency_mean_ms": 5.0, "ttft_p99_s": 6.0, "high_ttft_p99_s": 6.0}
    classes = {"normalised_latency_mean_ms": 11.0, "ttft_p99_s": 5.0, "high_ttft_p99_s": 0.2}
    assert ratios({"fifo": fifo, "shortest": shortest, "classes": classes}) == {
        "sjf_mean_vs_fifo": 0.5,
        "sjf_p99_ttft_vs_fifo": 1.5,
        "high_class_p99_ttft_vs_fifo": 0.05,
    }


def test_scheduling_parts_yield_every_ratio_of_the_readme() -> None:
    latencies = {"normalised_latency_mean_ms": 9.0, "ttft_p99_s": 2.0, "high_ttft_p99_s": 1.0}
    errors = dict.fromkeys(
        ("ttft_p50_s", "ttft_p90_s", "latency_p50_s", "latency_p90_s", "tokens_per_s"), -0.05
    )
    loads = ("saturated", *(f"{load:g}" for load in scheduling_faithful.LOADS))
    forecast = {
        scheduling_forecast.BINDING: {"8 workers, load 0.9": {"global": 1.0, "p2c": 4.0, "jsq": 2}},
        "goodput": {"bounded": {"1": 0.8, "1.3": 0.9}},
        "speed_100_workers": 0.6,
    }
    by_order = {order: {"turns": 1.0, "arrival": 2.0} for order in ("fifo", "shortest")}
    found = (
        scheduling.batch_ratios({"continuous_vs_static_tokens_per_s": 2.0})
        | scheduling_queue.ratios("queue", {"fifo": {100: 5.0, 10_000: 8.0}})
        | scheduling_fair_share.ratios(by_order, {0: {100: 5.0}, 10: {100: 7.0}})
        | scheduling_forecast.ratios(forecast)
        | scheduling_faithful.ratios({load: {"forecast": errors} for load in loads})
        | ratios({"fifo": latencies, "shortest": latencies, "classes": latencies})
    )
    wanted = {
        "continuous_vs_static": 2.0,
        "sjf_mean_vs_fifo": 1.0,
        "sjf_p99_ttft_vs_fifo": 1.0,
        "high_class_p99_ttft_vs_fifo": 1.0,
        "global_p99_ttft_vs_p2c": 0.25,
        "goodput_1_3_vs_1_0": 1.125,
        "vtc_gap_vs_bound": 1.0 / scheduling_fair_share.bound(),
        "queue_ops_per_s_at_1e4": 125_000.0,
        "simulator_ttft_p50_error": 0.05,
        "simulator_speed_100_workers": 0.6,
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_fair_order_keeps_tenant_gap_within_the_bound() -> None:
    steps = 3000
    assert (
        scheduling_fair_share.gap("fifo", is_fair=True, steps=steps)
        <= scheduling_fair_share.bound()
    )
    assert (
        scheduling_fair_share.gap("fifo", is_fair=False, steps=steps)
        > scheduling_fair_share.bound()
    )


def test_victim_choice_takes_its_sequence_of_the_lowest_class() -> None:
    there = [running(1, 3), running(2, 1), running(3, 4), running(4, 2), running(5, 0, priority=1)]
    first = {
        name: min(there, key=choice).key.epoch
        for name, choice in scheduling_victims.VICTIM_KEYS.items()
    }
    assert first == {"least computed": 2, "newest": 4, "most blocks": 3, "oldest": 1}


def running(epoch: int, num_blocks: int, priority: int = 0) -> Sequence:
    """Return a running sequence; epochs are in the order of arrival."""
    there = sequence(limits(), epoch, prompt(200), priority=priority)
    there.order = epoch
    there.num_computed = num_blocks * BLOCK_SIZE
    there.block_table = tuple(range(num_blocks))
    return there


@pytest.mark.long
def test_victims_benchmark_restores_the_scheduler_choice() -> None:
    chosen = scheduler._preemption_key
    found = scheduling_victims.measure(scheduling_victims.SMALLEST)
    assert scheduler._preemption_key is chosen
    assert [*found] == ["0.9", "1.1"]
    for policies in found.values():
        assert [*policies] == [*scheduling_victims.POLICIES]
        ours, no_moves = (
            policies[name]
            for name in (scheduling_victims.LEAST_COMPUTED, scheduling_victims.NO_MOVES)
        )
        assert ours["migrations"] > 0 and no_moves["migrations"] == 0
        assert ours["recomputed_share"] > 0 and no_moves["preemptions"] > 0
        assert ours != policies["newest"] != policies["oldest"]
    ratios = scheduling_victims.ratios(found)
    assert "victims_newest_vs_product_1.1_recomputed_share" in ratios
    assert "victims_least_computed_no_moves_vs_product_0.9_ttft_p99_s" in ratios


def test_picture_is_drawn_only_for_measured_parts(tmp_path: Path) -> None:
    figures = {"normalised_latency_mean_ms": 9.0, "ttft_p99_s": 2.0, "high_ttft_p99_s": 1.0}
    names = ["fifo", *(f"{order} tau 0.6" for order in ("shortest", "ranked", "hrrn"))]
    orders = {load: dict.fromkeys(names, figures) for load in ("0.9", "1.1")}
    raw = {
        "live": {"medians": {"fifo": figures, "classes": figures}},
        "forecast": {
            "orders": orders,
            scheduling_forecast.BINDING: {"8 workers, load 0.9": {"global": 1.0, "p2c": 3.0}},
        },
    }
    picture, nothing = tmp_path / "all.png", tmp_path / "none.png"
    scheduling_picture.draw(raw, picture)
    scheduling_picture.draw({"queue": {}}, nothing)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not nothing.exists()


@pytest.mark.long
def test_sessions_benchmark_follows_its_sessions_to_their_ends() -> None:
    run = scheduling_sessions.Run("mixed", "attained", 0.1, duration_s=100.0)
    loop = scheduling_sessions.ClosedLoop("mixed", run.rate, 100.0)
    figures = run.figures()
    assert 0 < figures["sessions"] <= len(loop.starting) < len(loop.arrivals)
    assert figures["ttft_mean_s"] < 1.0 < figures["session_mean_s"]
    assert figures["cached_share"] > 0.9
    found = {"mixed_0.1": dict.fromkeys(("fifo", "attained"), figures)}
    assert scheduling_sessions.ratios(found) == {
        "mixed_0.1_attained_vs_fifo_session_mean_s": 1.0,
        "mixed_0.1_attained_vs_fifo_session_p99_s": 1.0,
    }
