"""Continuation of interrupted requests."""

from __future__ import annotations

import pytest

from everlift.v1 import inference_pb2 as pb
from router.ledger.entry import Tally
from router.requests.continuation import arithmetic_with, continuation

EXACT, SAME = pb.CONTINUATION_EXACT, pb.CONTINUATION_SAME_DISTRIBUTION


def after(*attempts: tuple[str | None, bool]) -> int:
    """Return the arithmetic after attempts at workers, each with whether output exists before."""
    arithmetic = 0
    for worker, has_output in attempts:
        arithmetic = arithmetic_with(arithmetic, worker, has_output=has_output)
    return arithmetic


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([("a", False), ("a", True)], EXACT),
        ([("a", False), ("b", True)], SAME),
        ([("a", False), ("b", True), ("a", True)], SAME),
        # The first attempt generated nothing.
        ([("a", False), ("b", False), ("b", True)], EXACT),
        ([("", False), ("", True)], SAME),
        ([("", False), ("a", True)], SAME),
        # No worker received the second attempt.
        ([("a", False), (None, True), ("a", True)], EXACT),
        # Nothing is known of the attempts.
        ([], SAME),
    ],
)
def test_continuation_is_exact_for_one_arithmetic(
    attempts: list[tuple[str | None, bool]], expected: pb.Continuation.ValueType
) -> None:
    assert continuation(Tally(migrations=1, arithmetic=after(*attempts))) == expected


def test_continuation_of_preempted_request_depends_on_its_worker() -> None:
    assert continuation(Tally(preemptions=1, arithmetic=after(("a", False)))) == EXACT
    assert continuation(Tally(preemptions=1, arithmetic=after(("", False)))) == SAME


def test_continuation_is_none_without_interruption() -> None:
    assert continuation(Tally(arithmetic=after(("a", False)))) == pb.CONTINUATION_UNSPECIFIED
