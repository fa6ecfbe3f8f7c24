"""Bounds of a load's figures that hold for all outcomes."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.report import Outcome, Ramp, Slo, figures, more_figures, spread
from cluster.sse import Events
from tests.support.outcomes import outcome

seconds = st.floats(0, 1000, allow_subnormal=False)
values = st.lists(seconds, min_size=1, max_size=60)
percents = st.floats(0, 100)
outcomes = st.lists(
    st.builds(
        outcome,
        due=seconds,
        ttft_s=st.floats(0.001, 10),
        gap_s=st.floats(0, 1),
        tokens=st.integers(1, 8),
        lag_s=st.floats(0, 5),
        error=st.sampled_from(["", "", "", "timeout"]),
    ),
    max_size=20,
)


def exactly(values: list[float], percent: float) -> Fraction:
    """Return a percentile by its definition.

    It is the value at (n - 1) * percent / 100 of the ordered values, with linear interpolation.
    """
    ordered = sorted(map(Fraction, values))
    place = (len(ordered) - 1) * Fraction(percent) / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@given(values, percents)
def test_percentile_matches_definition(values: list[float], percent: float) -> None:
    found = spread(values, (percent,))
    assert found is not None
    expected = float(exactly(values, percent))
    assert found.percentiles[percent] == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(values, st.lists(percents, min_size=2, max_size=6))
def test_percentiles_are_ordered_and_within_range(
    values: list[float], percents: list[float]
) -> None:
    found = spread(values, sorted(set(percents)))
    assert found is not None
    at = list(found.percentiles.values())
    assert at == sorted(at)
    assert min(values) <= at[0] and at[-1] <= max(values)


@given(outcomes, st.floats(0, 10_000), st.floats(0, 10_000))
def test_goodput_is_bounded_and_monotonic_in_target(
    outcomes: list[Outcome], one: float, other: float
) -> None:
    strict, lax = sorted((one, other))
    good = [
        figures(outcomes, Slo({"ttft": most, "e2el": most}), ())["request_goodput"]
        for most in (strict, lax)
    ]
    found = figures(outcomes, Slo(), ())
    assert 0 <= good[0] <= good[1] <= found["request_throughput"]
    assert found["completed"] + found["failed"] == len(outcomes)


@given(outcomes)
def test_latency_from_due_time_is_at_least_that_from_sending(
    outcomes: list[Outcome],
) -> None:
    found, more = figures(outcomes, Slo(), (99.0,)), more_figures(outcomes, Slo(), (99.0,), 0.0)
    for name, sent in more["from_sent"].items():
        if sent is not None and not name.startswith("std"):
            assert found[name] >= sent - 1e-6


@given(outcomes)
def test_time_series_account_for_all_requests_and_tokens(outcomes: list[Outcome]) -> None:
    found = more_figures(outcomes, Slo(), (), 0.0)["over_time"]
    width = found["width_s"]
    assert sum(found["due_per_s"]) * width == pytest.approx(len(outcomes))
    assert sum(found["ended_per_s"]) * width == pytest.approx(len(outcomes))
    tokens = sum(each.output_tokens for each in outcomes if each.is_complete)
    assert sum(found["tokens_per_s"]) * width == pytest.approx(tokens)
    assert all(number >= 0 for number in found["in_flight"])
    assert found["in_flight"][-1] == 0


@given(st.floats(0.1, 10), st.floats(1, 100), st.floats(0.01, 2000))
def test_ramp_finds_saturation_within_ten_percent(
    first: float, factor: float, saturation: float
) -> None:
    ramp, tried = Ramp(first, first * factor), 0
    while (rate := ramp.next_rate()) is not None:
        assert first <= rate <= first * factor
        ramp.report(rate, rate <= saturation)
        tried += 1
    assert tried <= 12
    assert ramp.highest_sustained is None or ramp.highest_sustained <= saturation
    assert ramp.lowest_unsustained is None or ramp.lowest_unsustained > saturation
    if ramp.highest_sustained is not None and ramp.lowest_unsustained is not None:
        assert ramp.lowest_unsustained <= 1.1 * ramp.highest_sustained


@given(st.lists(st.binary(max_size=9).map(bytes.hex), max_size=9), st.lists(st.integers(0, 200)))
def test_sse_events_are_independent_of_chunking(events: list[str], cuts: list[int]) -> None:
    sent = b"".join(b"id: 1\ndata: " + text.encode() + b"\n\n" for text in events)
    places = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    reader = Events()
    pieces = [sent[a:b] for a, b in pairwise(places)]
    found = [event for piece in pieces for event in reader.of(piece)]
    assert found == [text.encode() for text in events]
