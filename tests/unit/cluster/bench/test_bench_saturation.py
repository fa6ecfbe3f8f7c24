"""Rates of a ramp, and the detection of an unsustained rate."""

from __future__ import annotations

from random import Random

import pytest

from cluster.bench.report import Ramp, Slo, is_load_sustained, slo
from tests.support.outcomes import outcome

NO_SLO = Slo()


def rates(ramp: Ramp, saturation: float) -> list[float]:
    tried = []
    while (rate := ramp.next_rate()) is not None:
        tried.append(rate)
        ramp.report(rate, rate <= saturation)
    return tried


def test_ramp_doubles_rates_and_then_bisects() -> None:
    ramp = Ramp(1.0, 64.0)
    assert rates(ramp, 5.0) == pytest.approx([1, 2, 4, 8, 5.657, 4.757, 5.187], rel=1e-3)
    assert (ramp.highest_sustained, ramp.lowest_unsustained) == (
        pytest.approx(4.757, rel=1e-3),
        pytest.approx(5.187, 1e-3),
    )


def test_ramp_ends_at_its_maximum_or_at_its_first_rate() -> None:
    ramp = Ramp(3.0, 20.0)
    assert rates(ramp, 100.0) == [3.0, 6.0, 12.0, 20.0]
    assert (ramp.highest_sustained, ramp.lowest_unsustained) == (20.0, None)
    ramp = Ramp(3.0, 20.0)
    assert rates(ramp, 1.0) == [3.0]
    assert (ramp.highest_sustained, ramp.lowest_unsustained) == (None, 3.0)


def served(rate: float, capacity: float, duration_s: float, slo: Slo = NO_SLO) -> bool:
    """Return whether an endpoint that answers one request at a time sustains the load."""
    chance, free, at, outcomes = Random(3), 0.0, 0.0, []
    while (at := at + chance.expovariate(rate)) < duration_s:
        free = max(free, at) + 1 / capacity
        outcomes.append(outcome(at, ttft_s=free - at, gap_s=0.0))
    return is_load_sustained(outcomes, duration_s, slo)


@pytest.mark.parametrize("rate", [2.0, 5.0, 8.0, 9.0])
def test_saturation_rate_below_capacity_is_sustained(rate: float) -> None:
    assert served(rate, 10.0, 60.0)


@pytest.mark.parametrize("rate", [13.0, 15.0, 40.0])
def test_saturation_rate_above_capacity_is_not_sustained(rate: float) -> None:
    assert not served(rate, 10.0, 60.0)


def test_saturation_counts_a_missed_slo_as_too_much() -> None:
    assert not served(9.0, 10.0, 60.0, slo(["ttft:110"]))
    assert served(1.0, 10.0, 60.0, slo(["ttft:250"]))


def test_saturation_counts_refusals_as_too_much() -> None:
    fine = [outcome(at / 10, ttft_s=0.01, gap_s=0.0) for at in range(100)]
    assert is_load_sustained(fine, 10.0, Slo())
    refused = [outcome(5.0, error="429 queue_full")] * 2
    assert not is_load_sustained([*fine, *refused], 10.0, Slo())
