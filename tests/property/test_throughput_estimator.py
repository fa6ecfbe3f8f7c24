"""Slow workers are found without comparing every worker with every other one."""

from __future__ import annotations

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from router.admission.throughput import ThroughputEstimator, Work, slow_workers

FACTOR = 2.0
NOW = 1.0

#: Steps of one worker, one per second: tokens and duration in seconds.
histories = st.lists(st.tuples(st.integers(0, 4000), st.floats(0.001, 0.5)), min_size=0, max_size=3)


def estimator_of(history: list[tuple[int, float]]) -> ThroughputEstimator:
    throughput, work = ThroughputEstimator(), Work()
    throughput.measure(work, False, -float(len(history)))
    for second, (tokens, seconds) in enumerate(history, 1 - len(history)):
        work = Work(
            step=work.step + 1,
            computed_tokens=work.computed_tokens + tokens,
            busy_s=work.busy_s + seconds,
        )
        throughput.measure(work, False, float(second))
    return throughput


@given(st.lists(histories, max_size=7))
def test_slow_workers_match_pairwise_comparison(
    all_histories: list[list[tuple[int, float]]],
) -> None:
    estimators = {str(index): estimator_of(history) for index, history in enumerate(all_histories)}
    seconds = [throughput.step_s for throughput in estimators.values() if throughput.step_s]
    expected = {
        name
        for name, throughput in estimators.items()
        if len(seconds) > 1
        and throughput.step_s > median(seconds)
        and throughput.is_slower(
            [it for it in estimators.values() if it is not throughput], FACTOR, NOW
        )
    }
    assert slow_workers(estimators, FACTOR, NOW) == expected
