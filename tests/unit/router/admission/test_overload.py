"""Overload in virtual time, with the real schedulers of engines, leader and gateways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import inf
from statistics import fmean, median

import pytest

from router.config import RouterConfig
from tests.support.router.overload_support import TPOT_S, Asked, VirtualCluster, chats

#: Requests per second that one worker serves of ``chats``; more make the queue grow.
CAPACITY = 41.0
#: Interval of the evaluated arrivals; the queue has its final length when it begins.
_BEGIN_S, _END_S = 6.0, 20.0


@cache
def played(load: float, **settings: object) -> list[Asked]:
    cluster = VirtualCluster(RouterConfig(**settings), num_workers=1)
    return cluster.play(chats(load * CAPACITY, _END_S), _END_S + 3)


def goodput(load: Iterable[Asked]) -> float:
    """Return the requests per second that met their targets for TTFT and TPOT."""
    good = sum(it.is_good for it in load if _BEGIN_S <= it.arrived < _END_S)
    return good / (_END_S - _BEGIN_S)


def slugs(load: Iterable[Asked]) -> Counter[str]:
    return Counter(error.slug for asked in load for _, error in asked.refusals)


def test_goodput_holds_under_overload() -> None:
    strict = {"refuse_late": True, "tpot_target": TPOT_S}
    usual, overload = played(1.0, **strict), played(1.3, **strict)
    assert goodput(overload) >= 0.95 * goodput(usual) > 0.8 * CAPACITY
    assert slugs(overload).keys() <= {"deadline_unmeetable", "queue_timeout"}
    assert goodput(played(1.3)) < 0.5 * goodput(usual), "all wait, and nobody is in time"


@pytest.mark.long
def test_load_below_capacity_is_rarely_refused() -> None:
    load = played(0.8, refuse_late=True, tpot_target=TPOT_S)
    assert slugs(load).total() <= 0.01 * len(load)


def test_ttft_prediction_is_accurate_under_overload() -> None:
    load = [it for it in played(1.2) if it.first_token and it.predicted_ttft_s]
    errors = [
        abs(it.predicted_ttft_s / (it.first_token - it.arrived) - 1)
        for it in load
        if it.arrived > _BEGIN_S and it.first_token and it.predicted_ttft_s
    ]
    assert len(errors) > 300
    assert median(errors) < 0.25


@pytest.mark.long
def test_tpot_target_bounds_mean_time_per_token() -> None:
    wanted = 0.025
    assert 0.9 * wanted < tpot_s(played(1.3, tpot_target=wanted)) < 1.02 * wanted
    assert tpot_s(played(1.3)) > 1.05 * wanted


def tpot_s(load: Iterable[Asked]) -> float:
    """Return the mean TPOT of the requests that ended."""
    return fmean(it.tpot_s for it in load if it.ended and it.first_token and it.arrived > _BEGIN_S)


@pytest.mark.parametrize(
    "load, num_burst, priority, settings",
    [
        (1.1, 200, 0, {"max_queued": 50}),
        pytest.param(1.6, 30, 1, {"max_queued": 50}, marks=pytest.mark.long),
        pytest.param(
            *(1.1, 200, 0, {"refuse_late": True, "tpot_target": TPOT_S}), marks=pytest.mark.long
        ),
    ],
    ids=["queue_full", "shed", "deadline_unmeetable"],
)
def test_refused_burst_is_served_after_few_retries(
    load: float, num_burst: int, priority: int, settings: dict[str, object]
) -> None:
    config = RouterConfig(**settings)
    cluster = VirtualCluster(config, num_workers=1, num_gateways=3, comes_back=True)
    burst = chats(2000.0, 1.0, seed=3)[:num_burst]
    for asked in burst:
        asked.name, asked.arrived = f"burst-{asked.name}", 10.0 + asked.arrived
        asked.priority = priority
    everybody = cluster.play([*chats(load * CAPACITY, 10.0), *burst], 60.0)
    tries = [len(it.refusals) for it in everybody if it.refusals]
    assert len(tries) >= 20 and fmean(tries) < 3.0
    assert all(it.ended for it in burst)


@cache
def with_deadlines(load: float, *, is_length_known: bool) -> list[Asked]:
    """Return requests that need all of their tokens within three seconds."""
    asked = [
        replace(
            it,
            ttft_target_s=inf,
            deadline_s=3.0,
            least_tokens=it.output_tokens if is_length_known else 1,
        )
        for it in chats(load * CAPACITY, _END_S)
    ]
    cluster = VirtualCluster(RouterConfig(refuse_late=True), num_workers=1)
    return [it for it in cluster.play(asked, _END_S + 3) if it.arrived > _BEGIN_S]


@pytest.mark.long
def test_known_output_lengths_prevent_late_outputs() -> None:
    unknown = with_deadlines(1.3, is_length_known=False)
    known = with_deadlines(1.3, is_length_known=True)
    assert sum(it.is_cut_off for it in unknown) > 0.25 * len(unknown)
    assert sum(it.is_cut_off for it in known) < 0.07 * len(known)
    ended = [sum(it.ended is not None for it in load) for load in (unknown, known)]
    assert ended[1] > 1.2 * ended[0]


@pytest.mark.long
def test_timely_outputs_are_rarely_refused() -> None:
    load = with_deadlines(0.8, is_length_known=True)
    refused = [it for it in load if it.refusals]
    assert 0 < len(refused) < 0.1 * len(load)
    by_length = sorted(it.output_tokens for it in load)
    assert min(it.output_tokens for it in refused) > by_length[-2 * len(refused)]
    unknown = with_deadlines(0.8, is_length_known=False)
    served = [sum(it.ended is not None for it in each) for each in (unknown, load)]
    assert served[1] >= served[0]


def test_tpot_prediction_is_accurate_under_overload() -> None:
    load = [it for it in played(1.2) if it.ended and it.output_tokens > 16]
    errors = [abs((it.predicted_tpot_s or 0.0) / it.tpot_s - 1) for it in load]
    assert len(errors) > 300 and median(errors) < 0.1


@pytest.mark.long
def test_unnamed_requests_are_served_after_few_retries() -> None:
    cluster = VirtualCluster(
        RouterConfig(max_queued=50), num_workers=1, comes_back=True, has_names=False
    )
    load = cluster.play(chats(1.3 * CAPACITY, _END_S), 40.0)
    tries = [len(it.refusals) for it in load if it.refusals]
    assert len(tries) > 200 and fmean(tries) < 2.5
    assert all(it.ended for it in load)


@pytest.mark.long
@pytest.mark.parametrize("order", ["deadline", "shortest"])
def test_goodput_holds_under_overload_in_other_orders(order: str) -> None:
    load = played(1.3, order=order, refuse_late=True, tpot_target=TPOT_S)
    assert goodput(load) >= 0.9 * CAPACITY
