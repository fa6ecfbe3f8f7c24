"""Number of routers, as Ray Serve asks for it.

No request passes through Serve's handles, by which Serve counts them. What the leader reports in
the ledger is counted instead.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from ray.serve.config import AutoscalingContext

from cluster.autoscale.config import AutoscaleConfig
from cluster.autoscale.exchange import LedgerExchange
from cluster.autoscale.policy import SlidingMaximum
from cluster.autoscale.serve_policy import ledger_config
from everlift import logs, settings
from everlift.errors import SettingsError
from everlift.v1.session_pb2 import ClusterLoad

log = logs.get_logger(__name__)


class Routers:
    """Number of routers that the requests need. Pure."""

    def __init__(self) -> None:
        self._needs = SlidingMaximum(0.0)
        self._down_delay = 0.0

    def decide(self, load: ClusterLoad, config: AutoscaleConfig, routers: int, now: float) -> int:
        """Return how many routers there should be, without bounds.

        Args:
            load: Work of the cluster as its leader reported it.
            config: Requests of a router, and how long fewer routers must be enough before one goes.
            routers: Routers that there are to be until now.
            now: Monotonic time in seconds.
        """
        if config.down_delay != self._down_delay:
            self._down_delay = config.down_delay
            self._needs = SlidingMaximum(config.down_delay)
        need = max(1, ceil((load.running + load.queued) / config.requests_per_router))
        self._needs.note(need, now)
        if need > routers:
            return need
        return ceil(self._needs.largest) if self._needs.covers(now) else routers


class RouterPolicy:
    """Serve's autoscaling policy of the router deployment; arguments as QueuePolicy has them."""

    def __init__(self, ledger: Mapping[str, Any], state_dir: str) -> None:
        logs.configure("router-autoscaler", path=Path(state_dir, "logs", "router-autoscaler.log"))
        self._routers = Routers()
        self._exchange = LedgerExchange(partial(ledger_config, dict(ledger), Path(state_dir)))
        # Serve drops a policy when another one is deployed.
        weakref.finalize(self, self._exchange.stop)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        target, report = context.target_num_replicas, self._exchange.latest()
        config = _config(report.load if report is not None else None)
        if report is not None and report.age_s <= config.stale:
            target = self._routers.decide(report.load, config, target, time.monotonic())
        least, most = (
            context.capacity_adjusted_min_replicas,
            context.capacity_adjusted_max_replicas,
        )
        bounded = min(max(target, least), most)
        if bounded != context.target_num_replicas:
            log.info("routers", before=context.target_num_replicas, now=bounded)
        return bounded, {}


def _config(load: ClusterLoad | None) -> AutoscaleConfig:
    try:
        return settings.load(AutoscaleConfig, dict(load.autoscale) if load is not None else {})
    except SettingsError:
        return AutoscaleConfig()
