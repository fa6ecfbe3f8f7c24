"""Gauges of the autoscaler."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.autoscale.config import AutoscaleConfig
from cluster.autoscale.decisions import REASONS, Gauges
from cluster.autoscale.policy import Decision
from everlift.v1.session_pb2 import ClusterLoad, Scaling
from router.ledger.base import LoadReport
from tests.support.fleet import Fleet

DEPLOY = Path(__file__).parents[4] / "deploy"


class FakeGauge:
    made: dict[str, FakeGauge]

    def __init__(self, name: str, *, description: str, tag_keys: tuple[str, ...]) -> None:
        self.values: dict[str, float] = {}
        self._tag_keys = tag_keys
        assert description.endswith(".")
        self.made[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self._tag_keys
        self.values[",".join(tags.values())] = value


@pytest.fixture(autouse=True)
def fresh() -> None:
    FakeGauge.made = {}


def serve_context(target: int, least: int = 1, most: int = 4) -> Any:
    """Return the argument with which Serve calls the policy."""
    return SimpleNamespace(
        target_num_replicas=target,
        capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most,
    )


def shown() -> dict[str, float]:
    return {name: it.values["m"] for name, it in FakeGauge.made.items() if "m" in it.values}


def test_gauges_show_a_decision_and_its_inputs() -> None:
    gauges = Gauges(FakeGauge, "m")
    load = ClusterLoad(queued_tokens=700, worker_rate=100.0)
    gauges.show(Decision(3, "requests would wait 7.0 s", need=2.5, wait_s=7.0), load, 0.25, 8)
    assert shown() == {
        "everlift_autoscaler_workers": 3,
        "everlift_autoscaler_max_workers": 8,
        "everlift_autoscaler_need_workers": 2.5,
        "everlift_autoscaler_wait_seconds": 7.0,
        "everlift_autoscaler_load_age_seconds": 0.25,
        "everlift_autoscaler_queue_tokens": 700,
        "everlift_autoscaler_worker_tokens_per_second": 100.0,
    }
    assert FakeGauge.made["everlift_autoscaler_reason"].values == {"m,requests would wait": 1}


def test_gauges_mark_only_the_latest_reason() -> None:
    gauges = Gauges(FakeGauge, "m")
    for reason in ("enough", "enough", "enough workers are starting", "something new"):
        gauges.show(Decision(1, reason), ClusterLoad(), 0.0, 8)
    reasons = FakeGauge.made["everlift_autoscaler_reason"].values
    assert reasons == {"m,enough": 0, "m,enough workers are starting": 0, "m,other": 1}


def test_gauges_label_every_decision_reason() -> None:
    fleet = Fleet(AutoscaleConfig(min_workers=0, max_workers=6, idle_delay=60.0))
    fleet.run(300, load=4.0).run(600, load=0.3).run(400, load=0.0).run(200, load=9.0)
    decisions = [decision for _, decision in fleet.decisions]
    gauges = Gauges(FakeGauge, "m")
    others = ("the load is not known", "limits", "another cluster serves as well")
    for decision in [*decisions, *(Decision(1, reason) for reason in others)]:
        gauges.show(decision, ClusterLoad(), 0.0, 6)
    labels = FakeGauge.made["everlift_autoscaler_reason"].values
    assert labels.keys() == {f"m,{reason}" for reason in REASONS}


class FakeExchange:
    """Ledger with the ``load`` of this cluster and that of the cluster that it replaces."""

    load: ClusterLoad
    replaced: ClusterLoad | None
    published: list[Scaling]

    def __init__(self, config: object) -> None: ...

    def latest(self) -> LoadReport:
        return LoadReport(self.load, 0.1)

    def replaced_load(self) -> ClusterLoad | None:
        return self.replaced

    def publish(self, scaling: Scaling) -> None:
        self.published.append(scaling)

    def stop(self) -> None: ...


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that makes the policy for a model."""
    from cluster.autoscale import serve_policy

    FakeExchange.load, FakeExchange.replaced, FakeExchange.published = ClusterLoad(), None, []
    monkeypatch.setattr(serve_policy, "LedgerExchange", FakeExchange)
    monkeypatch.setattr(serve_policy, "Gauge", FakeGauge)
    monkeypatch.setattr(serve_policy, "_ray_cluster", lambda: "this")
    monkeypatch.setattr(serve_policy.logs, "configure", lambda *args, **more: None)
    return lambda model="m": serve_policy.QueuePolicy({}, str(tmp_path), model)


def busy(queued_tokens: int = 5000, **more: Any) -> ClusterLoad:
    figures = {"workers": 1, "slots": 8, "worker_rate": 100.0} | more
    return ClusterLoad(**{"term": 1, "queued": 9, "queued_tokens": queued_tokens} | figures)


@pytest.mark.filterwarnings("ignore")  # warnings of Serve
def test_policy_publishes_its_decision(policy: Any) -> None:
    FakeExchange.load = ClusterLoad(models={"m": busy(waited_s=9.0)})
    workers, _ = policy()(serve_context(target=1))
    values = shown()
    assert values["everlift_autoscaler_workers"] == workers == 3
    assert values["everlift_autoscaler_max_workers"] == 4
    assert values["everlift_autoscaler_wait_seconds"] == 50.0
    [scaling] = FakeExchange.published
    [change] = scaling.changes
    assert (scaling.workers, scaling.max_workers, scaling.wait_s) == (3, 4, 50.0)
    assert (change.before, change.workers, scaling.model) == (1, 3, "m")
    assert change.reason == scaling.reason == "requests would wait 50.0 s"


@pytest.mark.filterwarnings("ignore")  # warnings of Serve
def test_policy_takes_bounds_from_serve_and_targets_from_load(policy: Any) -> None:
    FakeExchange.load = ClusterLoad(models={"m": busy()})
    load, decide = FakeExchange.load.models["m"], policy()
    assert decide(serve_context(target=1, most=2))[0] == 2
    assert decide(serve_context(target=1, most=9))[0] == 3
    # 5,000 tokens take 50 s, which a target of 200 s allows without another worker.
    load.autoscale["ttft_target"] = 200.0
    assert decide(serve_context(target=1, most=9))[0] == 1
    # A setting that only a leader of another version knows changes nothing.
    load.autoscale["no_such_setting"] = 1.0
    assert decide(serve_context(target=1, most=9))[0] == 3
    # Two of three workers belong to another cluster: this cluster should have two as well.
    load.workers = 3
    load.ray_clusters.update({"this": 1, "other": 2})
    assert decide(serve_context(target=1, most=9))[0] == 2


@pytest.mark.filterwarnings("ignore")  # warnings of Serve
def test_policy_scales_each_model_by_its_own_load(policy: Any) -> None:
    FakeExchange.load = busy(9000, models={"a": busy(), "b": busy(0, queued=0)})
    assert [policy(name)(serve_context(target=1))[0] for name in "abc"] == [3, 1, 1]
    reasons = [scaling.reason for scaling in FakeExchange.published]
    assert reasons[2] == "the load is not known"


@pytest.mark.filterwarnings("ignore")  # warnings of Serve
def test_policy_of_the_only_model_needs_not_its_name(policy: Any) -> None:
    FakeExchange.load = ClusterLoad(models={"target-of-a-link": busy()})
    assert policy("link")(serve_context(target=1))[0] == 3


@pytest.mark.filterwarnings("ignore")  # warnings of Serve
def test_policy_replaces_the_workers_of_its_model(policy: Any) -> None:
    idle = {"queued": 0, "queued_tokens": 0}
    FakeExchange.load = ClusterLoad(models={"a": busy(**idle), "new": busy(**idle)})
    old = {"a": ClusterLoad(workers=2), "b": ClusterLoad(workers=3)}
    FakeExchange.replaced = ClusterLoad(workers=5, models=old)
    assert [policy(name)(serve_context(target=1))[0] for name in ("a", "new")] == [2, 3]


@pytest.mark.filterwarnings("ignore")  # warnings of Serve
def test_policy_excludes_own_stopping_workers_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster.autoscale import serve_policy

    monkeypatch.setattr(serve_policy, "_ray_cluster", lambda: "this")
    # Serve no longer lists the stopping workers.
    assert serve_policy._num_other_workers(ClusterLoad(workers=3, ray_clusters={"this": 3})) == 0
    assert (
        serve_policy._num_other_workers(ClusterLoad(workers=5, ray_clusters={"this": 3, "x": 2}))
        == 2
    )


def test_dashboard_and_alerts_query_existing_gauges() -> None:
    Gauges(FakeGauge, "m")
    files = (DEPLOY / "grafana/everlift.json", DEPLOY / "prometheus/alerts.yaml")
    asked_for = {
        name for file in files for name in re.findall(r"ray_(everlift_[a-z_]+)", file.read_text())
    }
    assert len(asked_for) == 4
    assert asked_for <= FakeGauge.made.keys()
