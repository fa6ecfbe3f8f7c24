"""Figures of outcomes: under vLLM's names, goodput, lag, and curves over time."""

from __future__ import annotations

import pytest

from cluster.bench.report import (
    CountedBy,
    Slo,
    curve,
    due_time,
    each_request,
    figures,
    lag,
    more_figures,
    most_tokens_in_a_second,
    peak_concurrency,
    percent_name,
    slo,
    spread,
    time_series,
)
from cluster.errors import BenchFailed
from tests.support.outcomes import outcome

NO_SLO = Slo()

#: Keys of the figures that `vllm bench serve` writes for a generation load.
VLLMS_FIGURES = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
    *(
        f"{word}_{name}_ms"
        for word in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    ),
}
VLLMS_LISTS = {
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times"),
    "errors",
}


def test_figures_have_all_of_vllms_names() -> None:
    found = figures([outcome()], NO_SLO, (99.0,))
    assert found.keys() >= VLLMS_FIGURES
    assert found.keys() - VLLMS_FIGURES == {
        f"{word}_norm_ms" for word in ("mean", "median", "std", "p99")
    }
    assert each_request([outcome()]).keys() == VLLMS_LISTS


def test_figures_have_counts_rates_and_latencies() -> None:
    outcomes = [
        outcome(0.0, ttft_s=0.5, gap_s=0.1, tokens=6),
        outcome(1.0, ttft_s=1.5, gap_s=0.3, tokens=6),
        outcome(2.0, error="429 queue_full", tokens=0),
    ]
    found = figures(outcomes, NO_SLO, (50.0, 100.0))
    assert found["duration"] == pytest.approx(4.0)
    assert (found["completed"], found["failed"], found["request_goodput"]) == (2, 1, None)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 12)
    assert found["request_throughput"] == pytest.approx(0.5)
    assert found["output_throughput"] == pytest.approx(3.0)
    assert found["total_token_throughput"] == pytest.approx(8.0)
    assert found["mean_ttft_ms"] == found["median_ttft_ms"] == pytest.approx(1000.0)
    assert found["std_ttft_ms"] == pytest.approx(500.0)
    assert found["p100_ttft_ms"] == pytest.approx(1500.0)
    assert found["mean_tpot_ms"] == found["mean_itl_ms"] == pytest.approx(200.0)
    assert found["mean_e2el_ms"] == pytest.approx(2000.0)
    assert found["mean_norm_ms"] == pytest.approx(2000.0 / 6)


def test_figures_report_latency_from_due_and_from_sent() -> None:
    outcomes = [outcome(0.0, ttft_s=0.5, lag_s=0.25)]
    found, more = figures(outcomes, NO_SLO, ()), more_figures(outcomes, NO_SLO, (), 0.0)
    assert found["mean_ttft_ms"] == pytest.approx(750.0)
    assert more["from_sent"]["mean_ttft_ms"] == pytest.approx(500.0)
    assert found["mean_e2el_ms"] - more["from_sent"]["mean_e2el_ms"] == pytest.approx(250.0)
    assert found["mean_itl_ms"] == more["from_sent"]["mean_itl_ms"]
    (each,) = (each_request(outcomes)[name] for name in ("ttfts",))
    assert each == [pytest.approx(0.75)]


def test_figures_without_answers_have_no_latency() -> None:
    outcomes = [outcome(error="unreachable", tokens=0)]
    found = figures(outcomes, NO_SLO, (99.0,))
    assert (found["completed"], found["failed"], found["request_throughput"]) == (0, 1, 0.0)
    assert found["mean_ttft_ms"] is found["p99_e2el_ms"] is None
    assert each_request(outcomes)["ttfts"] == [0.0]
    assert figures([], NO_SLO, (99.0,))["duration"] == 0.0


def test_percent_name_follows_vllm() -> None:
    assert [percent_name(each) for each in (50.0, 99.0, 99.9)] == ["p50", "p99", "p99.9"]


def test_figures_omit_tpot_for_a_single_token() -> None:
    found = figures([outcome(tokens=1)], slo(["tpot:0"]), ())
    assert found["mean_tpot_ms"] is None
    assert found["request_goodput"] > 0, "nor does it miss a target of it"


def test_figures_count_errors_by_cause() -> None:
    causes = ["429 queue_full", "timeout", "429 queue_full", ""]
    found = more_figures([outcome(error=cause) for cause in causes], NO_SLO, (), 0.0)
    assert list(found["errors"].items()) == [("429 queue_full", 2), ("timeout", 1)]


def test_figures_mark_pieces_counted_as_tokens() -> None:
    sure, unsure = outcome(), outcome(counted_by=CountedBy.PIECES)
    assert more_figures([sure], NO_SLO, (), 0.0)["marks"] == []
    found = more_figures([sure, unsure], NO_SLO, (), 0.0)
    assert found["tokens_counted_by"] == {"usage": 1, "pieces": 1}
    (mark,) = found["marks"]
    assert "pieces were counted" in mark


# goodput


def test_slo_good_request_meets_every_target() -> None:
    outcomes = [
        outcome(ttft_s=0.4, gap_s=0.05),
        outcome(ttft_s=0.6, gap_s=0.05),
        outcome(ttft_s=0.4, gap_s=0.06),
        outcome(error="timeout"),
    ]
    wanted = slo(["ttft:500 tpot:50.001"])
    assert [wanted.is_good(each, due_time) for each in outcomes] == [True, False, False, False]
    assert more_figures(outcomes, wanted, (), 0.0)["good_share"] == 0.25


def test_slo_counts_lag_of_a_late_request() -> None:
    assert not slo(["ttft:500"]).is_good(outcome(ttft_s=0.4, lag_s=0.2), due_time)


@pytest.mark.parametrize("said", [["ttft:500", "e2el:9"], ["ttft:500 e2el:9"], ["ttft:500,e2el:9"]])
def test_slo_targets_parse_together_or_separately(said: list[str]) -> None:
    assert slo(said).most_ms == {"ttft": 500.0, "e2el": 9.0}


@pytest.mark.parametrize("said", ["itl:5", "ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:inf"])
def test_slo_rejects_an_invalid_target(said: str) -> None:
    with pytest.raises(BenchFailed, match="must be ttft, tpot, e2el"):
        slo([said])


# lag of the generator


@pytest.mark.parametrize(
    "lag_s, ttft_s, cpu_share, is_behind",
    [
        (0.009, 0.05, 0.5, False),
        (0.011, 0.05, 0.5, True),
        (0.040, 1.0, 0.5, False),
        (0.060, 1.0, 0.5, True),
        (0.0, 1.0, 0.95, True),
    ],
)
def test_figures_mark_a_generator_that_fell_behind(
    lag_s: float, ttft_s: float, cpu_share: float, is_behind: bool
) -> None:
    outcomes = [outcome(ttft_s=ttft_s, lag_s=lag_s)] * 3
    assert lag(outcomes, cpu_share).is_behind == is_behind
    found = more_figures(outcomes, NO_SLO, (), cpu_share)
    assert any("fell behind" in mark for mark in found["marks"]) == is_behind


def test_lag_of_one_percent_of_requests_is_detected() -> None:
    few = [outcome(lag_s=0.5)] * 3 + [outcome()] * 97
    assert lag(few, 0.0).is_behind
    assert not lag([*few[:1], *[outcome()] * 299], 0.0).is_behind
    assert lag(few, 0.0).most == pytest.approx(0.5)


# over time


def test_over_time_counts_due_ended_tokens_and_in_flight() -> None:
    outcomes = [outcome(at, ttft_s=0.5, gap_s=0.5, tokens=4) for at in (0.0, 0.0, 10.0, 58.0)]
    found = time_series(outcomes)
    assert found.width_s == 1.0
    assert len(found.due_per_s) == 61
    assert [found.due_per_s[i] for i in (0, 1, 10)] == [2.0, 0.0, 1.0]
    assert [found.ended_per_s[i] for i in (1, 2, 12)] == [0.0, 2.0, 1.0]
    assert [found.tokens_per_s[i] for i in (0, 1, 2)] == [2.0, 4.0, 2.0]
    assert [found.in_flight[i] for i in (0, 1, 2, 10, 12, 60)] == [2, 2, 0, 1, 0, 0]
    assert found.ttft_ms[0] == pytest.approx(500.0) and found.ttft_ms[1] is None
    assert sum(found.tokens_per_s) == pytest.approx(16.0)


@pytest.mark.parametrize("duration", [0.0, 0.01, 3.0, 59.0, 3600.0, 1e6])
def test_over_time_limits_the_number_of_points(duration: float) -> None:
    found = time_series([outcome(0.0), outcome(duration)])
    assert len(found.due_per_s) <= 402
    assert len(found.due_per_s) * found.width_s >= found.width_s + duration - 1e-6


def test_maxima_of_concurrency_and_tokens_per_second() -> None:
    outcomes = [outcome(at, ttft_s=0.5, gap_s=0.0, tokens=8) for at in (0.0, 0.25, 0.5, 0.75)]
    assert peak_concurrency(outcomes) == 2, "the third is sent as the first ends"
    assert most_tokens_in_a_second(outcomes) == 16.0
    assert peak_concurrency([]) == most_tokens_in_a_second([]) == 0


def test_spread_interpolates_percentiles() -> None:
    found = spread([10.0, 20.0, 30.0, 40.0], (50.0, 90.0))
    assert found is not None
    assert found.percentiles == {50.0: 25.0, 90.0: pytest.approx(37.0)}
    assert (found.mean, found.median) == (25.0, 25.0)
    assert spread([], (50.0,)) is None
    assert curve([]) == []
    assert curve([1.0, 2.0])[::50] == [1.0, 1.5, 2.0]
