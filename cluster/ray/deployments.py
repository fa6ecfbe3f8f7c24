"""Options of the Serve deployments that take effect without a restart of actors.

Serve restarts every actor of an application when one of its ``args`` changes. The number of actors
and the ``user_config`` of a deployment change in place. Therefore the settings of this module are
options of the deployments and not ``args``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cluster.config import Config
from everlift import settings
from router.leader.policy_store import ROUTER_SETTINGS

#: Name of the Serve application.
APPLICATION = "everlift"
ROUTER, WORKER = "router", "worker"
#: Dotted paths of the settings that are options of deployments. ``autoscale`` is a whole section.
RUN_TIME_SETTINGS = (
    *("num_routers", "num_workers", "log_level", "autoscale"),
    *(f"router.{name}" for name in ROUTER_SETTINGS),
)
WORKER_POLICY = "cluster.autoscale.serve_policy:QueuePolicy"
ROUTER_POLICY = "cluster.autoscale.router_policy:RouterPolicy"
#: Bounds of Serve's autoscaling, which Serve passes to a policy with each call.
_BOUNDS = ("min_workers", "max_workers", "max_routers")


def options(config: Config) -> dict[str, dict[str, Any]]:
    """Return Serve's options of each deployment, by the name of the deployment."""
    return {
        ROUTER: {**_routers(config), "user_config": _router_settings(config)},
        WORKER: {**_workers(config), "user_config": {"log_level": config.log_level}},
    }


def _router_settings(config: Config) -> dict[str, Any]:
    values: Any = settings.to_dict(config)
    defaults: Any = settings.to_dict(Config())
    changed = {
        section: {
            name: value
            for name, value in values[section].items()
            if value != defaults[section][name]
        }
        for section in ("router", "autoscale")
    }
    return {
        "log_level": config.log_level,
        "num_workers": None if config.autoscale.is_on else config.num_workers,
        "router": {n: v for n, v in changed["router"].items() if n in ROUTER_SETTINGS},
        "autoscale": {
            name: value for name, value in changed["autoscale"].items() if name not in _BOUNDS
        },
    }


def _routers(config: Config) -> dict[str, Any]:
    most = config.autoscale.max_routers
    if most is None:
        return {"num_replicas": config.num_routers}
    return _autoscaled(config, config.num_routers, most, ROUTER_POLICY)


def _workers(config: Config) -> dict[str, Any]:
    autoscale = config.autoscale
    if autoscale.max_workers is None:
        return {"num_replicas": config.num_workers}
    return _autoscaled(config, autoscale.min_workers, autoscale.max_workers, WORKER_POLICY)


def _autoscaled(config: Config, least: int, most: int, policy: str) -> dict[str, Any]:
    return {
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            # The policy decides when to change the number, and Serve applies it without a delay.
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            # A change of the policy's arguments restarts all actors, so they contain no setting
            # that may change at run time.
            "policy": {"policy_function": policy, "policy_kwargs": _policy_arguments(config)},
        }
    }


def _policy_arguments(config: Config) -> Mapping[str, Any]:
    ledger = asdict(config.ledger)
    # Serve shows and logs the arguments, and the URL may contain a password.
    del ledger["url"]
    return {"ledger": ledger, "state_dir": str(config.state_dir)}
