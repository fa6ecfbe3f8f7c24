"""Drain rate of the queue, with made-up clocks."""

from __future__ import annotations

import pytest

from router.admission.throughput import DrainRate


def drained(
    seconds: int,
    tokens: int,
    *,
    drain: DrainRate | None = None,
    num_queued: int = 5,
    workers: int = 2,
) -> DrainRate:
    """Return the drain rate of a queue that a request of ``tokens`` leaves five times a second."""
    drain = drain or DrainRate()
    for tick in range(5 * seconds + 1):
        drain.measure(num_queued, workers, tick / 5)
        drain.note_departure(tokens)
    return drain


def test_drain_rate_counts_departures_per_worker() -> None:
    drain = drained(10, tokens=40)
    assert drain.is_known
    assert drain.tokens_per_s(2) == pytest.approx(200)
    assert drain.requests_per_s(2) == pytest.approx(5)
    assert drain.tokens_per_s(3) == pytest.approx(300)


def test_drain_rate_is_unknown_if_queue_was_empty() -> None:
    assert not DrainRate().is_known
    assert not drained(10, tokens=40, num_queued=0).is_known
    drain = DrainRate()
    for tick in range(50):
        drain.measure(5, 2, tick / 5)
        drain.note_departure(40)
        drain.pause()
    assert not drain.is_known


def test_drain_rate_is_unknown_without_workers() -> None:
    assert not drained(10, tokens=40, workers=0).is_known


def test_drain_rate_follows_a_change() -> None:
    drain = drained(30, tokens=80, drain=drained(30, tokens=40))
    assert drain.tokens_per_s(2) == pytest.approx(400, rel=0.05)


@pytest.mark.parametrize("every", [5, 60, 600])
def test_drain_rate_of_a_slow_queue_is_known_between_departures(every: int) -> None:
    drain, rates = DrainRate(), list[float]()
    for second in range(20 * every):
        drain.measure(5, 1, second)
        rates.append(drain.requests_per_s(1))
        if second % every == 0:
            drain.note_departure(40)
    settled = rates[10 * every :]
    assert 0.8 / every < min(settled) <= max(settled) < 1.25 / every


def test_drain_rate_recovers_after_a_standstill() -> None:
    """The rate during a standstill is only an upper bound, and is forgotten soon."""
    drain = drained(30, tokens=40)
    for tick in range(150, 150 + 5 * 600):
        drain.measure(5, 2, tick / 5)
    assert 1 / 600 < drain.requests_per_s(2) < 10 / 600
    for tick in range(3150, 3150 + 5 * 40):
        drain.note_departure(40)
        drain.measure(5, 2, tick / 5)
    assert drain.requests_per_s(2) == pytest.approx(5, rel=0.05)
