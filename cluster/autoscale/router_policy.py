"""Autoscaling policy of the router deployment, called by Ray Serve.

Serve counts the requests that pass through its handles, but Everlift's requests do not. Instead,
the policy uses the load that the leader reports to the ledger.
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
    """Policy that derives the number of routers from the number of unfinished requests. Pure."""

    def __init__(self) -> None:
        self._needs = SlidingMaximum(0.0)
        self._down_delay = 0.0

    def decide(self, load: ClusterLoad, config: AutoscaleConfig, routers: int, now: float) -> int:
        """Return the target number of routers, before minimum and maximum are applied.

        Args:
            load: Load of the cluster as its leader reported it.
            config: Settings; ``requests_per_router``, and ``down_delay``, the seconds for which
                fewer routers must have been enough before any is removed.
            routers: Present target number of routers.
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
    """Autoscaling policy that Ray Serve calls for the router deployment.

    ``ledger`` has the settings of the ledger except its URL, which is read from the environment or
    from ``state_dir``. A call returns the target number of routers.
    """

    def __init__(self, ledger: Mapping[str, Any], state_dir: str) -> None:
        logs.configure("router-autoscaler", path=Path(state_dir, "logs", "router-autoscaler.log"))
        self._routers = Routers()
        self._exchange = LedgerExchange(partial(ledger_config, dict(ledger), Path(state_dir)))
        # Serve only drops its reference to a policy when it deploys another one.
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
            log.info(
                "target number of routers changed", before=context.target_num_replicas, now=bounded
            )
        return bounded, {}


def _config(load: ClusterLoad | None) -> AutoscaleConfig:
    try:
        return settings.load(AutoscaleConfig, dict(load.autoscale) if load is not None else {})
    except SettingsError:
        return AutoscaleConfig()
