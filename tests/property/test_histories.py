"""Random histories of a simulated cluster: each client receives the right output, once.

Hypothesis generates them, and shrinks a failing one to a few events. In make test they are always
the same; in make test-long, as many others are played as HISTORIES_MINUTES allow.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.simulated_cluster.client import Manners
from tests.simulated_cluster.history import Event, History, Kind, Played, play
from tests.support.example_counts import examples

_BATCH = 50
_BATCHES = 5

#: Durations below and above the permitted silence of the parts, in seconds.
_DURATIONS = st.sampled_from([0.05, 0.3, 0.8, 1.2, 2.5])
_MANNERS = st.one_of(
    st.just(Manners()),
    st.builds(Manners, pause=st.just(0.05)),
    st.builds(
        Manners, leaves_after=st.integers(1, 30), away=st.sampled_from([0.05, 0.5, 1.5, 8.0])
    ),
    st.builds(Manners, cancels_after=st.integers(1, 30)),
)
_FAULTS = [kind for kind in Kind if kind is not Kind.SUBMIT]
#: Half of the events are requests; a sixth fills the caches, so that chunks are evicted.
_KINDS = st.one_of(
    *[st.just(Kind.SUBMIT) for _ in range(3)],
    st.sampled_from(_FAULTS),
    st.sampled_from(_FAULTS[::-1]),
    st.just(Kind.FILL_CACHES),
)
#: Two thirds of the requests are among the four with the longest prompts that fit the KV cache.
_WHICH = st.one_of(st.integers(0, 12), st.integers(-4, -1), st.integers(-2, -1))
_EVENTS = st.builds(
    Event,
    after=st.sampled_from([0.0, 0.003, 0.02, 0.1, 0.4]),
    kind=_KINDS,
    which=_WHICH,
    other=st.integers(0, 3),
    seconds=_DURATIONS,
    manners=_MANNERS,
)
_HISTORIES = st.builds(
    History,
    events=st.lists(_EVENTS, min_size=3, max_size=18).map(tuple),
    num_routers=st.integers(1, 3),
    num_workers=st.integers(1, 3),
    num_blocks=st.sampled_from([6, 10, 12, 18, 26]),
    seed=st.integers(0, 99),
)


def play_all(numbers: Iterable[int]) -> tuple[int, Counter[str]]:
    """Return the number of histories, and the sums of their counters."""
    sums: Counter[str] = Counter()

    def add(played: Played) -> None:
        sums.update(requests=played.requests, tokens=played.tokens)
        sums.update(migrations=played.migrations, preemptions=played.preemptions)
        sums.update(played.errors)

    batches = 0
    for number in numbers:
        batches += 1
        _batch(number, add)
    return batches * examples(_BATCH), sums


def _until(end: float, first_seed: int) -> Iterator[int]:
    for number in count(first_seed):
        yield number
        if time.monotonic() > end:
            return


def _batch(number: int, add) -> None:  # type: ignore[no-untyped-def]
    @seed(number)
    @settings(
        max_examples=examples(_BATCH),
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(_HISTORIES)
    def batch(history: History) -> None:
        add(play(history))

    batch()


def test_cluster_random_histories_are_correct(capsys: pytest.CaptureFixture[str]) -> None:
    check_sums(capsys, *play_all(range(_BATCHES)))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_cluster_random_histories_are_correct_for_minutes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    minutes = float(os.environ.get("HISTORIES_MINUTES", "20"))
    numbers = _until(time.monotonic() + minutes * 60, first_seed=int(time.time()))
    check_sums(capsys, *play_all(numbers))


def check_sums(capsys: pytest.CaptureFixture[str], number: int, sums: Counter[str]) -> None:
    assert sums["requests"] > number
    assert sums["migrations"] > 0
    with capsys.disabled():
        print(f"\n{number} histories: {dict(sums)}")
