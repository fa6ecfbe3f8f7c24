"""Delays and time limits of retries."""

import pytest

from everlift.client.retries import Backoff


def test_backoff_doubles_to_200_ms_and_is_1_s_after_3_s() -> None:
    backoff = Backoff(100.0, lambda: 1.0)
    times = [10.0, 10.1, 10.2, 10.4, 12.9, 13.0, 20.0]
    assert [backoff.delay(at) for at in times] == [0.05, 0.1, 0.2, 0.2, 0.2, 1.0, 1.0]


def test_backoff_ramps_up_slowly_for_rare_failures() -> None:
    backoff = Backoff(100.0, lambda: 1.0)
    times = [0.0, 5.0, 10.0, 15.0, 20.0, 25.0]
    assert [backoff.delay(at) for at in times] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]


def test_backoff_jitter_removes_at_most_half_of_delay() -> None:
    assert Backoff(100.0, lambda: 0.0).delay(0.0) == 0.025


def test_backoff_stops_after_time_limit() -> None:
    backoff = Backoff(2.0, lambda: 1.0)
    assert backoff.delay(10.0) is not None
    assert backoff.delay(11.8) is not None
    assert backoff.delay(11.9) is None


def test_backoff_reset_restarts_delays_and_limit() -> None:
    backoff = Backoff(2.0, lambda: 1.0)
    backoff.delay(0.0)
    backoff.reset()
    assert [backoff.delay(100.0) for _ in range(4)] == [0.05, 0.1, 0.2, 0.2]


@pytest.mark.parametrize(("jitter", "delay"), [(0.0, 3.0), (1.0, 3.75)])
def test_backoff_delay_is_never_below_requested_minimum(jitter: float, delay: float) -> None:
    assert Backoff(10.0, lambda: jitter).delay(0.0, min_delay=3.0) == delay


def test_backoff_supports_limit_of_hours() -> None:
    backoff, now = Backoff(7200.0, lambda: 0.5), 0.0
    while (delay := backoff.delay(now)) is not None:
        now += delay
    assert 7198.0 < now <= 7200.0
