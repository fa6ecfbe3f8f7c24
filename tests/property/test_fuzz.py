"""Fuzz tests of every parser of client input, on mutated requests.

A parser must return a value, or raise an error that names its cause. ``make soak`` runs a million
cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everlift.errors import EverliftError, InvalidRequest
from tests.fuzz import targets
from tests.fuzz.mutation import case
from tests.fuzz.target import Finding, Run, Target, opened
from tests.support.example_counts import examples

few = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
#: Targets whose cases take a process each.
_SLOW = ("grammar",)


@pytest.fixture(params=targets.TARGETS, ids=lambda target: target.name)
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.param
    return found


@pytest.fixture
def run(target: Target) -> Iterator[Run]:
    with opened(target) as run:
        yield run


def test_mutated_requests_are_accepted_or_refused(target: Target, run: Run) -> None:
    for seed in target.seeds:
        run(seed)

    @settings(few, max_examples=examples(20 if target.name in _SLOW else 200))
    @given(rng=st.randoms(use_true_random=False))
    def changed(rng: Random) -> None:
        run(case(rng, target.seeds, target.reshape))

    @settings(few, max_examples=examples(10 if target.name in _SLOW else 100))
    @given(data=st.binary(max_size=300))
    def anything(data: bytes) -> None:
        run(data)

    changed()
    anything()


def raising(error: Exception) -> Target:
    from contextlib import nullcontext

    def run(data: bytes) -> None:
        raise error

    return Target("t", lambda: nullcontext(run), (b"a",), lambda rng, data, seeds: data)


@pytest.mark.parametrize("error", [KeyError("x"), EverliftError(), RecursionError()])
def test_fuzz_target_reports_unnamed_error(error: Exception) -> None:
    with opened(raising(error)) as run, pytest.raises(Finding):
        run(b"")


def test_fuzz_target_accepts_named_error() -> None:
    with opened(raising(InvalidRequest())) as run:
        run(b"")


def test_fuzz_cases_are_reproducible() -> None:
    target = targets.by_name("http2")
    assert targets.numbered(target, 1, 7) == targets.numbered(target, 1, 7)
    assert len({targets.numbered(target, 1, number) for number in range(50)}) > 40


def test_fuzz_shares_cover_all_cases_and_targets() -> None:
    shares = targets.shares(1000)
    assert sum(shares.values()) >= 1000 and min(shares.values()) > 0
