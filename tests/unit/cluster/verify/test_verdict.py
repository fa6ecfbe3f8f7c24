"""Verdicts on disturbed streams."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cluster.verify.verdict import Verdict, verdict

EXPECTED = "one two three four five six"


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (EXPECTED, Verdict.EXACT),
        ("one two thr", Verdict.LOST),
        ("", Verdict.LOST),
        ("one two three one two three four five six", Verdict.RESTARTED),
        ("one two threeone two", Verdict.RESTARTED),
        ("one two three two three four five six", Verdict.REPEATED),
        ("one two three four four five six", Verdict.REPEATED),
        ("one two THREE four five six", Verdict.CHANGED),
        ("one two three four five six seven", Verdict.CHANGED),
        ("one two four five six", Verdict.CHANGED),
        ("two three", Verdict.CHANGED),
    ],
)
def test_verdict_names_what_became_of_a_stream(received: str, expected: Verdict) -> None:
    assert verdict(EXPECTED, received) is expected


@given(st.text("abc", min_size=1, max_size=40), st.integers(0, 40), st.integers(0, 40))
def test_repeated_part_is_never_exact(text: str, end: int, start: int) -> None:
    end = min(end, len(text))
    start = min(start, end)
    received = text[:end] + text[start:]
    found = verdict(text, received)
    assert (found is Verdict.EXACT) == (received == text)
    assert found is not Verdict.LOST
