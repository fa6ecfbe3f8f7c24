"""The policy as Ray Serve calls it: within the control loop of its controller, ten times a second,
so that nothing here may wait."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.util.metrics import Gauge

from cluster.autoscale.config import AutoscaleConfig
from cluster.autoscale.decisions import Decisions
from cluster.autoscale.exchange import LedgerExchange
from cluster.autoscale.gauges import Gauges
from cluster.autoscale.policy import Autoscaler, Decision
from cluster.config import Config
from everlift import logs, settings
from everlift.v1.session_pb2 import ClusterLoad
from router.ledger.config import URL_VARIABLE, LedgerConfig

log = logs.get(__name__)


class QueuePolicy:
    """``autoscale`` and ``ledger`` are settings. The ledger's url, which has a password, is none of
    them, since Serve logs and shows them: it is in the environment, or in the file ``url_file``."""

    def __init__(
        self,
        autoscale: Mapping[str, Any],
        ledger: Mapping[str, Any],
        url_file: str,
        log_level: str,
        log_file: str,
    ) -> None:
        logs.configure("autoscaler", log_level, Path(log_file))
        config = settings.load(AutoscaleConfig, autoscale)
        self._autoscaler = Autoscaler(config)
        self._gauges = Gauges(Gauge, config.max_workers or 0)
        self._decisions = Decisions(config.max_workers or 0)
        self._exchange = LedgerExchange(partial(_ledger_config, dict(ledger), url_file))
        # Serve drops a policy when another one is deployed.
        weakref.finalize(self, self._exchange.stop)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        report = self._exchange.latest()
        load, age_s = (report.load, report.age_s) if report else (None, 0.0)
        target, now = context.target_num_replicas, time.monotonic()
        decision = self._autoscaler.decide(load, age_s, target, now)
        self._gauges.show(decision, load or ClusterLoad(), age_s)
        self._say(decision, target, now)
        return decision.workers, {}

    def _say(self, decision: Decision, target: int, now: float) -> None:
        self._decisions.note(decision, target, now)
        self._exchange.say(self._decisions.told(now))
        if decision.workers != target:
            log.info("workers", before=target, now=decision.workers, reason=decision.reason)


def serve_autoscaling(config: Config, log_dir: Path, url_file: Path) -> AutoscalingConfig:
    """What the worker's deployment is configured with. How long to wait before a change is the
    policy's to decide: Serve carries it out at once."""
    autoscale, ledger = config.autoscale, asdict(config.ledger)
    del ledger["url"]
    assert autoscale.max_workers is not None, "asked for only where workers come and go"
    return AutoscalingConfig(
        min_replicas=autoscale.min_workers,
        initial_replicas=config.num_workers,
        max_replicas=autoscale.max_workers,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
            policy_function=f"{QueuePolicy.__module__}:{QueuePolicy.__name__}",
            policy_kwargs={
                "autoscale": asdict(autoscale),
                "ledger": ledger,
                "url_file": str(url_file),
                "log_level": config.log_level,
                "log_file": str(log_dir / "autoscaler.log"),
            },
        ),
    )


def _ledger_config(ledger: dict[str, Any], url_file: str) -> LedgerConfig:
    url = os.environ.get(URL_VARIABLE) or Path(url_file).read_text().strip()
    return replace(settings.load(LedgerConfig, ledger), url=url)
