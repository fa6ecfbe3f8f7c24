"""Evaluation of two generators' reports by the load-generator benchmark."""

from __future__ import annotations

import pytest

from benchmarks.load_generator import Plan, medians, of_everlift, of_guidellm, ratios

PLAN = Plan(ttft=100.0, gap=10.0, tokens=11, rate=5.0, requests=20)


def test_reports_of_both_generators_yield_comparable_figures() -> None:
    ours = of_everlift(
        {
            "median_ttft_ms": 101.0,
            "median_tpot_ms": 10.0,
            "median_e2el_ms": 202.0,
            "p99_ttft_ms": 110.0,
            "p99_tpot_ms": 11.0,
            "p99_e2el_ms": 220.0,
            "everlift": {"lag": {"p99": 0.002}},
        }
    )
    metrics = {
        "time_to_first_token_ms": {"p50": 100.0, "p99": 100.0},
        "inter_token_latency_ms": {"p50": 10.0, "p99": 10.0},
        # This metric includes the first token.
        "time_per_output_token_ms": {"p50": 18.0, "p99": 18.0},
        "request_latency": {"p50": 0.2, "p99": 0.2},
    }
    theirs = of_guidellm(
        {
            "benchmarks": [
                {"metrics": {n: {"successful": {"percentiles": it}} for n, it in metrics.items()}}
            ]
        }
    )
    assert ours["lag_p99_ms"] == 2.0
    assert theirs == {
        "ttft_p50_ms": 100.0,
        "ttft_p99_ms": 100.0,
        "tpot_p50_ms": 10.0,
        "tpot_p99_ms": 10.0,
        "e2el_p50_ms": 200.0,
        "e2el_p99_ms": 200.0,
    }
    found = ratios({"everlift": ours, "guidellm": theirs}, PLAN.truth())
    for who in ("guidellm", "the endpoint"):
        assert found[f"ttft_p50_ms by {who}"] == pytest.approx(1.01)
        assert found[f"tpot_p50_ms by {who}"] == pytest.approx(1.0)
        assert found[f"e2el_p99_ms by {who}"] == pytest.approx(1.1)


def test_rounds_are_summarised_by_medians() -> None:
    assert medians([{"a": 1.0}, {"a": 9.0}, {"a": 2.0}]) == {"a": 2.0}
