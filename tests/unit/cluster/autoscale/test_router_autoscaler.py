"""Number of routers that the requests need."""

from __future__ import annotations

import pytest

from cluster.autoscale.config import AutoscaleConfig
from cluster.config import Config, load
from cluster.ray.deployments import ROUTER, ROUTER_POLICY, options
from everlift.errors import SettingsError
from everlift.v1.session_pb2 import ClusterLoad

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Ray

CONFIG = AutoscaleConfig(requests_per_router=100.0, down_delay=60.0)


def test_router_policy_adds_at_once_and_removes_after_a_delay() -> None:
    from cluster.autoscale.router_policy import Routers

    routers = Routers()

    def decide(requests: int, now: float, there: int) -> int:
        return routers.decide(ClusterLoad(running=requests), CONFIG, there, now)

    assert decide(0, 0.0, 1) == 1
    assert decide(101, 1.0, 1) == 2
    assert decide(450, 2.0, 2) == 5
    # Fewer routers suffice, but not yet for long enough.
    assert decide(150, 3.0, 5) == 5
    assert decide(150, 61.0, 5) == 5
    assert decide(150, 63.0, 5) == 2
    assert decide(0, 64.0, 2) == 2
    assert decide(0, 124.0, 2) == 1


def test_router_policy_counts_queued_requests() -> None:
    from cluster.autoscale.router_policy import Routers

    load = ClusterLoad(running=90, queued=111)
    assert Routers().decide(load, CONFIG, 1, 0.0) == 3


def test_router_options_set_bounds_or_a_fixed_number() -> None:
    assert options(Config(num_routers=3))[ROUTER]["num_replicas"] == 3
    config = load(None, {}, ["num_routers=2", "autoscale.max_routers=5"])
    bounds = options(config)[ROUTER]["autoscaling_config"]
    assert (bounds["min_replicas"], bounds["max_replicas"]) == (2, 5)
    assert bounds["policy"]["policy_function"] == ROUTER_POLICY
    assert "max_routers" not in options(config)[ROUTER]["user_config"]["autoscale"]
    with pytest.raises(SettingsError, match=r"max_routers \(1\) must be at least num_routers"):
        load(None, {}, ["num_routers=2", "autoscale.max_routers=1"])
