"""Autoscaling policy of a worker deployment, called by Ray Serve in its controller's loop.

Serve calls it up to ten times a second. A call must not block.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ray import get_runtime_context
from ray.serve.config import AutoscalingContext
from ray.util.metrics import Gauge

from cluster.autoscale.config import AutoscaleConfig
from cluster.autoscale.decisions import Decisions, Gauges
from cluster.autoscale.exchange import LedgerExchange
from cluster.autoscale.policy import Autoscaler, Decision
from cluster.local.own_ledger import url_file
from everlift import logs, settings
from everlift.errors import SettingsError
from everlift.v1.session_pb2 import ClusterLoad
from router.ledger.base import LoadReport
from router.ledger.config import URL_VARIABLE, LedgerConfig
from router.replaced_workers import replaced_workers

log = logs.get_logger(__name__)

T = TypeVar("T")


class QueuePolicy:
    """Serve's autoscaling policy for the deployment of the workers of ``model``.

    ``ledger`` has the settings of the ledger except its URL. The URL contains a password, and Serve
    logs and shows the arguments. So the URL is read from the environment or from ``state_dir``. In
    each call Serve passes the minimum and maximum number of workers. The autoscaler's other
    settings are part of the leader's load report.
    """

    def __init__(self, ledger: Mapping[str, Any], state_dir: str, model: str) -> None:
        self._model = model
        logs.configure("autoscaler", path=Path(state_dir, "logs", "autoscaler.log"))
        self._autoscaler = Autoscaler(AutoscaleConfig(max_workers=1))
        self._gauges = Gauges(Gauge, model)
        self._decisions = Decisions()
        self._exchange = LedgerExchange(partial(ledger_config, dict(ledger), Path(state_dir)))
        #: invalid settings that were logged last, so that they are logged only once
        self._refused: Mapping[str, float] = {}
        self._is_missing = False
        # Serve only drops its reference to a policy when it deploys another one.
        weakref.finalize(self, self._exchange.stop)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        report = self._exchange.latest()
        load = _of_model(self._model, report.load.models) if report else None
        age_s = report.age_s if report else 0.0
        self._warn_if_missing(report, load)
        target, now = context.target_num_replicas, time.monotonic()
        config = self._settings(context, load)
        self._autoscaler.configure(config)
        others = _num_other_workers(load) if load is not None else 0
        replaced = self._num_replaced_workers(report.load if report else None)
        decision = self._autoscaler.decide(load, age_s, target, now, others, replaced)
        most = config.max_workers or 0
        self._gauges.show(decision, load or ClusterLoad(), age_s, most)
        self._publish(decision, target, most, now)
        return decision.workers, {}

    def _warn_if_missing(self, report: LoadReport | None, load: ClusterLoad | None) -> None:
        """Log an error if ``report`` has the loads of models, but not that of the policy's model.

        ``load`` is the load of the policy's model in ``report``, or None if it is missing. Nothing
        can be decided without ``load``. The error is logged once, and again only if the
        condition has ended in between.
        """
        is_missing = report is not None and load is None and len(report.load.models) > 0
        if is_missing and not self._is_missing:
            assert report is not None
            log.error(
                "model of the autoscaler is not served",
                model=self._model,
                known=sorted(report.load.models),
            )
        self._is_missing = is_missing

    def _settings(self, context: AutoscalingContext, load: ClusterLoad | None) -> AutoscaleConfig:
        bounds = {
            "min_workers": context.capacity_adjusted_min_replicas,
            "max_workers": context.capacity_adjusted_max_replicas,
        }
        given = dict(load.autoscale) if load is not None else {}
        try:
            return settings.load(AutoscaleConfig, given, bounds)
        except SettingsError as error:
            # A leader of another version may have settings that this version does not know.
            if given != self._refused:
                self._refused = given
                log.warning("invalid autoscaler settings: using the defaults", cause=str(error))
            return settings.load(AutoscaleConfig, bounds)

    def _num_replaced_workers(self, own: ClusterLoad | None) -> int:
        replaced = self._exchange.replaced_load()
        if own is None or replaced is None:
            return 0
        return _of_model(self._model, replaced_workers(replaced, own.models)) or 0

    def _publish(self, decision: Decision, target: int, most: int, now: float) -> None:
        self._decisions.note(decision, target, now)
        self._exchange.publish(self._decisions.as_json(now, most, _ray_cluster(), self._model))
        if decision.workers != target:
            log.info(
                "target number of workers changed",
                model=self._model,
                before=target,
                now=decision.workers,
                reason=decision.reason,
            )


def _of_model(model: str, values: Mapping[str, T]) -> T | None:
    """Return the value of the model named ``model``; None if there is none.

    The only value in ``values`` is returned whatever its model's name, because routers may
    determine another name than this process. Routers name a local model after its directory or
    file, with symbolic links resolved. A process without the files cannot resolve the links.
    """
    if len(values) == 1:
        [only] = values.values()
        return only
    return values.get(model)


def _num_other_workers(load: ClusterLoad) -> int:
    """Return the number of workers in ``load`` that belong to other Ray clusters than this one.

    Workers are counted by the name of their Ray cluster. Subtracting Serve's number of workers of
    this cluster from the total would be wrong, because ``load`` still includes stopping workers
    that Serve no longer lists.
    """
    own = _ray_cluster()
    return sum(workers for cluster, workers in load.ray_clusters.items() if cluster != own)


def _ray_cluster() -> str:
    name: str = get_runtime_context().get_session_name()
    return name


def ledger_config(ledger: dict[str, Any], state_dir: Path) -> LedgerConfig:
    """Return the ledger's settings, with the URL from the environment or else the state directory.

    Raises SettingsError if a setting is invalid, and OSError if the URL is needed from the state
    directory but cannot be read.
    """
    url = os.environ.get(URL_VARIABLE) or url_file(state_dir).read_text().strip()
    return replace(settings.load(LedgerConfig, ledger), url=url)
