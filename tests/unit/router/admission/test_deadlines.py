"""Predictions whether a request meets its deadlines."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.load_shedding import Deadlines, MissedDeadline

SECONDS = st.floats(0, 100)


@pytest.mark.parametrize(
    ("wanted", "late"),
    [
        (Deadlines(), None),
        (Deadlines(first_token_s=5.0), None),
        (Deadlines(first_token_s=4.5), MissedDeadline(False, 0.5)),
        (Deadlines(end_s=4.5), MissedDeadline(False, 2.5)),
        (Deadlines(end_s=7.0), None),
        (Deadlines(end_s=6.5), MissedDeadline(True, 0.5)),
        (Deadlines(first_token_s=4.5, end_s=6.5), MissedDeadline(False, 0.5)),
        (Deadlines(first_token_s=0.5), MissedDeadline(False, 4.0)),
    ],
)
def test_deadlines_missed_compares_wait_prefill_and_output_time(
    wanted: Deadlines, late: MissedDeadline | None
) -> None:
    assert wanted.missed(4.0, 1.0, 2.0) == late


def test_deadlines_without_wait_are_missed_by_output_alone() -> None:
    assert Deadlines(first_token_s=0.5, end_s=2.0).missed(0.0, 9.0, 2.0) is None
    assert Deadlines(first_token_s=0.5, end_s=1.5).missed(0.0, 9.0, 2.0) == MissedDeadline(
        True, 0.0
    )


@given(SECONDS, SECONDS, SECONDS, SECONDS | st.just(inf), SECONDS | st.just(inf))
def test_deadlines_are_met_after_the_reported_shorter_wait(
    wait_s: float, prefill_s: float, output_s: float, first_token_s: float, end_s: float
) -> None:
    """The wait is reduced by the reported number of seconds."""
    wanted = Deadlines(first_token_s, end_s)
    late = wanted.missed(wait_s, prefill_s, output_s)
    assert late is None or 0 <= late.shorter_s <= wait_s
    if late is not None and late.shorter_s < wait_s:
        again_s = wait_s - late.shorter_s
        slack = Deadlines(first_token_s + 1e-6, end_s + 1e-6)
        assert slack.missed(again_s, prefill_s, output_s) is None
