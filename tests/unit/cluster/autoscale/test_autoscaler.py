"""Number of workers that the autoscaler wants, for a fake cluster on a fake clock."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

from cluster.autoscale.config import AutoscaleConfig
from cluster.autoscale.policy import Autoscaler
from everlift.errors import SettingsError
from everlift.settings import load
from everlift.v1.session_pb2 import ClusterLoad
from tests.support.fleet import Fleet, Job

CONFIG = AutoscaleConfig(min_workers=1, max_workers=8)
FROM_ZERO = AutoscaleConfig(min_workers=0, max_workers=8)


def test_autoscaler_low_load_adds_no_worker() -> None:
    fleet = Fleet(CONFIG).run(1200, load=0.4)
    assert fleet.changes == []


@pytest.mark.parametrize("seed", range(5))
def test_autoscaler_adds_workers_within_two_seconds_of_a_queue(seed: int) -> None:
    fleet = Fleet(CONFIG, workers=3, seed=seed).run(120, load=2.0)
    assert fleet.target == 3
    fleet.run(60, load=4.0)
    moment, change = fleet.changes[0]
    assert change > 0
    assert moment - fleet.queued_since(moment) <= 2.0
    assert 5 <= fleet.target <= 7


@pytest.mark.parametrize("load", [0.6, 0.65, 0.7])
def test_autoscaler_detects_doubled_small_requests_in_time(load: float) -> None:
    waits = []
    for seed in range(20):
        fleet = Fleet(CONFIG, rate=480, speed=30, job_tokens=16, seed=seed).run(90, load)
        if fleet.target == 1:
            step = fleet.now
            fleet.run(30, 2 * load)
            waits.append(fleet.changes[0][0] - step)
            assert fleet.target <= 3
    assert len(waits) > 8
    assert median(waits) <= 2.0


def test_autoscaler_drains_a_burst_without_assuming_a_rate() -> None:
    config = AutoscaleConfig(min_workers=1, max_workers=40)
    fleet = Fleet(config).run(120, load=0.3)
    fleet.waiting.extend(Job(fleet.now, 300.0, 10) for _ in range(200))
    fleet.offered += 200 * 300.0
    fleet.run(60, load=0.3)
    assert 3 <= max(decision.workers for _, decision in fleet.decisions) <= 8


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(it, marks=pytest.mark.long) for it in range(1, 5))]
)
@pytest.mark.parametrize("load", [0.5, 0.9, 1.3, 2.2, 3.1, 4.4])
def test_autoscaler_steady_load_reverses_once_in_ten_minutes(load: float, seed: int) -> None:
    fleet = Fleet(CONFIG, seed=seed).run(3600, load)
    reversals = fleet.reversals
    assert all(later - earlier >= 600 for earlier, later in pairwise(reversals))
    # In the end the workers suffice for the load.
    assert load < fleet.target <= load / CONFIG.utilisation + 2


def test_autoscaler_adds_no_worker_for_a_batch() -> None:
    scaler = Autoscaler(FROM_ZERO)
    batch = {"term": 1, "queued": 900, "queued_tokens": 90_000, "waited_s": 600.0}
    busy = {"running": 64, "slots": 64, "blocks_total": 8, "worker_rate": 100.0}
    for second in range(300):
        load = ClusterLoad(**batch, **busy, workers=2, batch_tokens=90_000)
        assert scaler.decide(load, 0.0, 2, float(second)).workers == 2
    # Other requests are queued as well.
    load = ClusterLoad(**batch, **busy, workers=2, batch_tokens=80_000)
    assert scaler.decide(load, 0.0, 2, 300.0).workers > 2
    # A batch alone starts a worker.
    load = ClusterLoad(**batch, workers=0, batch_tokens=90_000)
    assert Autoscaler(FROM_ZERO).decide(load, 0.0, 0, 0.0).workers == 1


def test_autoscaler_unknown_load_removes_no_worker() -> None:
    """The delay before a removal starts at the first quiet load that is known."""
    config = AutoscaleConfig(min_workers=0, max_workers=8, down_delay=120.0, idle_delay=300.0)
    scaler = Autoscaler(config)
    busy = ClusterLoad(term=1, workers=8, running=60, slots=64, blocks_total=8, worker_rate=100.0)
    quiet = ClusterLoad(term=1, workers=8, running=2, slots=64, blocks_total=8, worker_rate=100.0)
    idle = ClusterLoad(term=1, workers=8, slots=64, blocks_total=8, worker_rate=100.0)
    for second in range(200):
        assert scaler.decide(busy, 0.0, 8, float(second)).workers == 8
    for second in range(200, 600):
        assert scaler.decide(None, 0.0, 8, float(second)).workers == 8
    for second in range(600, 719):
        assert scaler.decide(quiet, 0.0, 8, float(second)).workers == 8
    assert scaler.decide(quiet, 0.0, 8, 721.0).workers < 8
    for second in range(722, 1200):
        scaler.decide(busy, 60.0, 8, float(second))
    assert scaler.decide(idle, 0.0, 8, 1200.0).workers == 8


def test_autoscaler_removes_workers_after_the_down_delay() -> None:
    fleet = Fleet(CONFIG, workers=1).run(300, load=3.0)
    assert fleet.target >= 4
    since = fleet.now
    fleet.run(900, load=0.5)
    first = next(moment for moment, change in fleet.changes if moment > since and change < 0)
    assert first - since >= CONFIG.down_delay
    assert fleet.target == 1


def test_autoscaler_waits_ten_minutes_for_a_stuck_worker_start() -> None:
    """Serve retries for ever if the worker has no capacity or cannot start."""
    scaler = Autoscaler(CONFIG)

    def target(second: int, up: int, workers: int) -> int:
        load = ClusterLoad(
            term=1, workers=up, running=4, slots=16 * up, blocks_total=up, worker_rate=1000.0
        )
        return scaler.decide(load, 0.0, workers, float(second)).workers

    assert {target(second, 3, 4) for second in range(600)} == {4}
    assert target(600, 3, 4) == 1
    assert target(601, 3, 1) == 1


def test_autoscaler_square_wave_load_causes_no_flapping() -> None:
    fleet = Fleet(CONFIG).run(3600, load=lambda now: 3.0 if now % 120 < 60 else 0.3)
    windows = [
        sum(start <= moment < start + 600 for moment in fleet.reversals)
        for start in range(0, 3000, 60)
    ]
    assert max(windows) <= 2


def test_autoscaler_full_blocks_add_workers_despite_free_slots() -> None:
    fleet = Fleet(CONFIG, job_blocks=200, speed=20.0).run(60, load=0.8)
    assert fleet.target > 1
    assert fleet.workers * 16 > len(fleet.running)


def test_autoscaler_target_stays_within_its_bounds() -> None:
    config = AutoscaleConfig(min_workers=2, max_workers=3)
    fleet = Fleet(config, workers=2).run(300, load=9.0)
    assert fleet.target == 3
    fleet.waiting.clear()
    fleet.run(1200, load=0.0)
    assert fleet.target == 2
    few = Autoscaler(config).decide(ClusterLoad(term=1), 0.0, 1, 0.0)
    many = Autoscaler(config).decide(ClusterLoad(term=1), 0.0, 9, 0.0)
    assert (few.workers, many.workers) == (2, 3)


def test_autoscaler_scales_an_idle_cluster_to_zero_and_back() -> None:
    fleet = Fleet(FROM_ZERO).run(100, load=0.3)
    since = fleet.now
    fleet.run(FROM_ZERO.idle_delay + 30, load=0.0)
    assert fleet.target == 0
    gone = next(moment for moment, change in fleet.changes if moment > since and change < 0)
    assert gone - since >= FROM_ZERO.idle_delay
    woken = fleet.now
    fleet.run(20, load=0.3)
    came = next(moment for moment, change in fleet.changes if moment > woken and change > 0)
    first = next(it for it in fleet.decisions if it[0] == came)
    assert first[1].reason == "requests wait"
    assert fleet.workers == 1


def test_autoscaler_keeps_the_last_worker_under_little_load() -> None:
    fleet = Fleet(FROM_ZERO, job_tokens=50).run(3600, load=0.01)
    assert fleet.target == 1


def test_autoscaler_ignores_unknown_or_stale_load() -> None:
    autoscaler = Autoscaler(CONFIG)
    busy = ClusterLoad(term=1, workers=2, queued=100, queued_tokens=1 << 20, waited_s=60.0)
    assert autoscaler.decide(None, 0.0, 2, 0.0).workers == 2
    assert autoscaler.decide(busy, 5.1, 2, 1.0).workers == 2
    assert autoscaler.decide(busy, 4.9, 2, 2.0).workers == 2
    assert autoscaler.decide(busy, 4.9, 2, 4.0).workers == 3


def test_autoscaler_adds_one_worker_at_a_time_without_a_rate() -> None:
    def after(second: float, up: int, target: int) -> int:
        load = ClusterLoad(term=1, workers=up, queued=50, queued_tokens=9999, waited_s=3.0)
        return autoscaler.decide(load, 0.0, target, second).workers

    autoscaler = Autoscaler(CONFIG)
    assert after(0.0, up=1, target=1) == 1
    assert after(2.0, up=1, target=1) == 2
    assert after(30.0, up=1, target=2) == 2
    assert after(31.0, up=2, target=2) == 2
    assert after(33.0, up=2, target=2) == 3


def test_autoscaler_restarts_counters_with_a_new_leader() -> None:
    def moment(second: float, term: int, offered: int) -> float:
        load = ClusterLoad(
            term=term, workers=2, slots=64, offered_tokens=offered, worker_rate=100.0
        )
        return autoscaler.decide(load, 0.0, 2, second).need

    autoscaler = Autoscaler(CONFIG)
    needs = [moment(second, 1, 50 * second) for second in range(60)]
    needs += [moment(60 + second, 2, 50 * second) for second in range(60)]
    assert all(abs(need - 50 / (100 * CONFIG.utilisation)) < 1e-6 for need in needs[1:])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"min_workers": -1}, "min_workers"),
        ({"max_workers": 0}, "max_workers"),
        ({"min_workers": 3, "max_workers": 2}, "max_workers"),
        ({"utilisation": 1.5}, "utilisation"),
        ({"stale": 0}, "stale"),
        ({"down_delay": -1}, "down_delay"),
        ({"max_wrokers": 3}, "max_workers"),
    ],
)
def test_autoscale_config_rejects_invalid_settings_by_name(
    setting: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load(AutoscaleConfig, setting)


def test_autoscaler_upgrade_starts_with_as_many_workers_as_serve() -> None:
    load = ClusterLoad(term=1, workers=5, running=20, slots=40, worker_rate=100.0)
    new = Autoscaler(AutoscaleConfig(min_workers=1, max_workers=8))
    assert new.decide(load, 0.0, 1, 0.0, others=5).workers == 5
    # The new cluster starts from 0 workers if `min_workers` is 0, and stays within `max_workers`.
    small = Autoscaler(AutoscaleConfig(min_workers=0, max_workers=3))
    assert small.decide(load, 0.0, 0, 0.0, others=5).workers == 3


def test_autoscaler_model_upgrade_starts_with_replaced_workers() -> None:
    idle = ClusterLoad(term=1, workers=1, slots=8, worker_rate=100.0)
    new = Autoscaler(AutoscaleConfig(min_workers=1, max_workers=8, down_delay=10.0))
    for second in range(60):
        decision = new.decide(idle, 0.0, 1, float(second), replaced=5)
        assert (decision.workers, decision.reason) == (5, "another cluster serves as well")


def test_autoscaler_upgrade_keeps_workers_of_both_clusters() -> None:
    config = AutoscaleConfig(min_workers=1, max_workers=8, down_delay=10.0)
    old, new = Autoscaler(config), Autoscaler(config)
    quiet = ClusterLoad(term=1, workers=10, slots=80, worker_rate=100.0)
    for second in range(60):
        assert old.decide(quiet, 0.0, 5, float(second), others=5).workers == 5
        assert new.decide(quiet, 0.0, 5, float(second), others=5).workers == 5
    # The old cluster has gone: the delay before a removal starts now.
    alone = ClusterLoad(term=1, workers=5, slots=40, worker_rate=100.0)
    assert new.decide(alone, 0.0, 5, 60.0).workers == 5
    assert [new.decide(alone, 0.0, 5, second).workers for second in (65.0, 70.0)] == [5, 1]


def test_autoscaler_applies_settings_at_run_time() -> None:
    autoscaler = Autoscaler(AutoscaleConfig(max_workers=4))
    load = ClusterLoad(
        term=1, workers=4, queued=90, queued_tokens=90_000, waited_s=9.0, worker_rate=100.0
    )
    assert autoscaler.decide(load, 0.0, 4, 0.0).workers == 4
    autoscaler.configure(AutoscaleConfig(max_workers=6))
    assert autoscaler.decide(load, 0.0, 4, 1.0).workers == 6
    with pytest.raises(ValueError, match="max_workers"):
        autoscaler.configure(AutoscaleConfig())
