"""Figures of a console from counters and histograms, and the workers that it shows."""

from __future__ import annotations

from math import inf

import pytest

from everlift.v1.session_pb2 import Counts, LatencyCounts, TenantPrompts
from router.console.counting import Aggregates
from router.console.failures import FailureCount, Failures, History
from router.console.prompts import Prompts, RecentPrompts
from router.console.rates import Percentiles, Rates, RecentHistogram, percentiles, quantile
from router.console.slot_grid import Lanes
from router.console.workers import MOST_CELLS, cells, names, row, summary
from tests.support.router.console_support import link


def test_quantile_is_linear_within_its_bucket() -> None:
    bounds, cumulative = (1.0, 2.0, 4.0, inf), (0, 10, 30, 30)
    assert [quantile(bounds, cumulative, part) for part in (0.1, 1 / 3, 2 / 3, 1.0)] == [
        *(pytest.approx(1.3), pytest.approx(2.0), pytest.approx(3.0), pytest.approx(4.0))
    ]


def test_quantile_is_capped_at_the_last_bound() -> None:
    assert quantile((1.0, inf), (1, 10), 0.99) == 1.0


def test_percentiles_are_of_the_last_minute() -> None:
    bounds = (1.0, inf)
    histogram = RecentHistogram(bounds)

    def of_late() -> Percentiles:
        return percentiles(bounds, [histogram.recent])

    assert of_late() == Percentiles(0)
    histogram.note((100, 100), 0.0)
    assert of_late() == Percentiles(0), "nobody knows when these came"
    histogram.note((110, 110), 10.0)
    assert of_late() == Percentiles(10, 0.5, 0.9, 0.99)
    for second in range(11, 72):
        histogram.note((110, 110), float(second))
    assert of_late() == Percentiles(0)
    assert len(histogram._samples) <= 62


def test_failures_are_counted_for_five_minutes() -> None:
    failures = Failures()
    failures.note({"queue_full": 1}, 0.0)
    failures.note({"queue_full": 2, "no_worker": 3}, 100.0)
    assert failures.recent(101.0) == [
        FailureCount("no_worker", 3, 1.0),
        FailureCount("queue_full", 2, 1.0),
    ]
    failures.note({"queue_full": 2, "no_worker": 3}, 300.0)
    assert failures.recent(300.0) == [
        FailureCount("no_worker", 3, 200.0),
        FailureCount("queue_full", 1, 200.0),
    ]


def test_rate_needs_two_samples_a_second_apart() -> None:
    rates = Rates()
    assert [rates.of("a", tokens, now) for tokens, now in ((10, 0.0), (50, 0.5), (90, 1.0))] == [
        *(0.0, 0.0, 80.0)
    ]
    assert rates.of("a", 90, 2.5) == 0.0
    assert rates.of("other", 5, 2.5) == 0.0
    rates.retain(["other"])
    assert rates.of("a", 200, 5.0) == 0.0


def test_cells_are_shared_by_excess_workers() -> None:
    links = [link(f"w{number:05}") for number in range(2 * MOST_CELLS + 1)]
    links[3].is_up = False
    for each in links:
        each.state.num_running = 2
    rows = [
        row(each, None, 0.0, Prompts(300 * number, 100)) for number, each in enumerate(links[:4])
    ]
    rows += [row(each, None, 0.0, Prompts()) for each in links[4:]]
    shown = cells(rows)
    assert len(shown) == len(names(rows)["ids"]) <= MOST_CELLS
    assert sum(names(rows)["sizes"]) == len(links)
    assert shown[0] == ["up", 12, 6, 0, 0, 0, 0, 33]
    assert shown[1] == ["lost", 12, 4, 0, 0, 0, 0, None]
    assert shown[2] == ["up", 12, 6, 0, 0, 0, 0, None]


def test_cached_tokens_are_summed_over_present_workers() -> None:
    links = [link(f"w{number}") for number in range(3)]
    links[2].is_up = False
    found = summary([row(each, None, 0.0, Prompts(100, 10)) for each in links])
    assert (found["prompt_tokens"], found["cached_tokens"]) == (200, 20)


def test_recent_prompts_are_those_of_five_minutes() -> None:
    recent = RecentPrompts()
    recent.note([("w", Prompts(1000, 500))], 0.0)
    assert recent.of("w") == Prompts(), "nobody knows when these came"
    for second in range(1, 1000):
        total = Prompts(1000 + 10 * min(second, 600), 500 + min(second, 600))
        expected = Prompts(10 * min(second, 300), min(second, 300))
        recent.note([("w", total)], float(second))
        noted = recent.of("w")
        if second <= 600:
            assert abs(noted.tokens - expected.tokens) <= 50, second
            assert abs(noted.cached - expected.cached) <= 5, second
    assert recent.of("w") == Prompts()
    assert len(recent._counters["w"]._samples) <= 61


def test_recent_prompts_leave_given_totals_out() -> None:
    recent = RecentPrompts({"a": Prompts(10, 5)})
    recent.note([("a", Prompts(12, 6)), ("b", Prompts(30, 5))], 0.0)
    assert dict(recent.items()) == {"a": Prompts(2, 1), "b": Prompts(30, 5)}
    recent.note([("a", Prompts(99, 99))], 0.9)
    assert recent.of("a") == Prompts(2, 1), "updates are a second apart"
    recent.note([("b", Prompts(30, 5))], 1.0)
    assert dict(recent.items()) == {"b": Prompts(30, 5)}


def test_lanes_are_assigned_automatically_and_stay_fixed() -> None:
    lanes = Lanes(None)
    lanes.update(["a", "b"], 0.0)
    lanes.update(["b", "c"], 1.0)
    assert lanes.worker_ids == ["a", "b", "c"]
    lanes.update(["b", "c", "d", "e", "f", "g"], 60.9)
    assert lanes.worker_ids == ["a", "b", "c", "d", "e", "f"]
    lanes.update(["b", "c", "d", "e", "f", "g"], 61.0)
    assert lanes.worker_ids == ["g", "b", "c", "d", "e", "f"]


def test_chosen_lanes_are_deduplicated_and_limited() -> None:
    lanes = Lanes(["a", "a", *map(str, range(20))])
    lanes.update(["z"], 0.0)
    assert lanes.worker_ids == ["a", *map(str, range(7))]


def test_history_is_a_point_a_second_of_five_minutes() -> None:
    history = History()
    for number in range(1000):
        history.note({"queued": number}, number / 2)
    points = history.points
    assert (len(points), points[0]["at"], points[-1]) == (300, 200.0, {"at": 499.0, "queued": 998})


def counts(router_id: str, completed: int, ttft: tuple[int, int], **failures: int) -> Counts:
    latencies = [LatencyCounts(name="ttft", cumulative=ttft)]
    return Counts(router_id=router_id, completed=completed, latencies=latencies, failures=failures)


def test_aggregates_count_each_router_from_its_first_report() -> None:
    aggregates = Aggregates("a", {"ttft": (1.0, inf)})
    aggregates.note(counts("a", 5, (10, 10), queue_full=1), 0.0)
    aggregates.note(counts("b", 100, (900, 900), queue_full=50), 1.0)
    assert aggregates.totals()["completed"] == 105
    assert aggregates.latencies() == {"ttft": Percentiles(0)}
    assert aggregates.failures(1.0) == [FailureCount("queue_full", 1, 1.0)]
    aggregates.note(counts("a", 6, (13, 13), queue_full=1), 2.0)
    aggregates.note(counts("b", 101, (907, 907), queue_full=52, no_worker=1), 3.0)
    assert aggregates.latencies() == {"ttft": Percentiles(10, 0.5, 0.9, 0.99)}
    assert aggregates.failures(4.0) == [
        FailureCount("queue_full", 3, 1.0),
        FailureCount("no_worker", 1, 1.0),
    ]
    # Router b is gone.
    aggregates.note(counts("a", 6, (13, 13)), 63.0)
    aggregates.drop_routers(63.0)
    assert aggregates.totals()["completed"] == 6


def test_aggregates_sum_tenant_prompts_over_routers() -> None:
    def report(router_id: str, now: float, **tokens: int) -> None:
        prompts = [
            TenantPrompts(tenant=name, prompt_tokens=2 * each, cached_tokens=each)
            for name, each in tokens.items()
        ]
        aggregates.note(Counts(router_id=router_id, tenant_prompts=prompts), now)

    aggregates = Aggregates("a", {})
    report("a", 0.0, acme=10)
    report("b", 0.0, acme=1000)
    assert aggregates.tenant_prompts() == {"acme": Prompts(20, 10)}
    report("a", 1.0, acme=11)
    report("b", 1.0, acme=1005, other=7)
    assert aggregates.tenant_prompts() == {"acme": Prompts(32, 16), "other": Prompts(14, 7)}
    report("b", 61.0, acme=1005, other=7)
    aggregates.drop_routers(61.0)
    assert aggregates.tenant_prompts() == {"acme": Prompts(10, 5), "other": Prompts(14, 7)}


def test_aggregates_ignore_buckets_of_another_release() -> None:
    aggregates = Aggregates("a", {"ttft": (1.0, inf)})
    for number in range(2):
        other = counts("b", number, (0, 0))
        other.latencies[0].cumulative.append(number)
        other.latencies.add(name="more", cumulative=[number])
        aggregates.note(other, float(number))
    assert aggregates.latencies() == {"ttft": Percentiles(0)}
    assert aggregates.totals()["completed"] == 1
