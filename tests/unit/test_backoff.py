"""When to try again."""

import pytest

from everlift.backoff import Backoff


def test_delays_double_up_to_a_second() -> None:
    backoff = Backoff(100.0, lambda: 1.0)
    delays = [backoff.delay(0.0) for _ in range(7)]
    assert delays == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_jitter_takes_up_to_half_of_a_delay() -> None:
    assert Backoff(100.0, lambda: 0.0).delay(0.0) == 0.025


def test_a_failure_after_the_limit_is_the_last() -> None:
    backoff = Backoff(2.0, lambda: 1.0)
    assert backoff.delay(10.0) is not None
    assert backoff.delay(11.8) is not None
    assert backoff.delay(11.9) is None


def test_success_begins_anew() -> None:
    backoff = Backoff(2.0, lambda: 1.0)
    backoff.delay(0.0)
    backoff.reset()
    assert backoff.delay(100.0) == 0.05


def test_a_longer_wait_can_be_asked_for() -> None:
    assert Backoff(10.0, lambda: 1.0).delay(0.0, at_least=3.0) == pytest.approx(3.0)


def test_it_may_go_on_for_hours() -> None:
    backoff, now = Backoff(7200.0, lambda: 0.5), 0.0
    while (delay := backoff.delay(now)) is not None:
        now += delay
    assert 7198.0 < now <= 7200.0
