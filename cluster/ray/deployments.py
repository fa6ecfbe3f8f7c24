"""Options of the Serve deployments that take effect without a restart of actors.

Serve restarts every actor of an application when one of its ``args`` changes. The number of actors
and the ``user_config`` of a deployment change in place. Therefore the settings of this module are
options of the deployments and not ``args``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cluster.autoscale.config import AutoscaleConfig
from cluster.config import Config
from cluster.groups import WorkerGroup
from everlift import settings
from router.config import RouterConfig
from router.leader.policy_store import ROUTER_SETTINGS

#: Name of the Serve application.
APPLICATION = "everlift"
ROUTER = "router"
#: Dotted paths of the settings that are options of deployments, with "*" for the name of a model.
#: ``autoscale`` is a whole section.
RUN_TIME_SETTINGS = (
    *("num_routers", "num_workers", "log_level", "autoscale"),
    *("models.*.num_workers", "models.*.autoscale"),
    *(f"router.{name}" for name in ROUTER_SETTINGS),
)
WORKER_POLICY = "cluster.autoscale.serve_policy:QueuePolicy"
ROUTER_POLICY = "cluster.autoscale.router_policy:RouterPolicy"
#: Bounds of Serve's autoscaling, which Serve passes to a policy with each call.
_BOUNDS = ("min_workers", "max_workers", "max_routers")


def is_run_time(path: str) -> bool:
    """Return whether the setting with the dotted ``path`` changes without a restart of actors.

    Such settings are options of the Serve deployments; all others are ``args``.
    """
    section, *names = path.split(".")
    if section == "models" and names:
        names[0] = "*"
    return ".".join((section, *names)) in RUN_TIME_SETTINGS


def options(config: Config) -> dict[str, dict[str, Any]]:
    """Return Serve's options of each deployment, by the name of the deployment.

    The workers of a model are a deployment, whose name is the label of their group.
    """
    workers = {
        group.label: {**_workers(config, group), "user_config": {"log_level": config.log_level}}
        for group in config.groups
    }
    return {ROUTER: {**_routers(config), "user_config": _router_settings(config)}, **workers}


def _router_settings(config: Config) -> dict[str, Any]:
    """Return the ``user_config`` of the router deployment.

    The result has the log level and, as ``router``, the router's run-time settings. ``num_workers``
    maps the name of each worker deployment to its number of workers, or to None if the model's
    autoscaler decides. ``autoscale`` maps these names to the settings of the autoscalers, without
    the bounds on the numbers of workers and routers. Router and autoscaler settings with default
    values are left out.
    """
    groups = config.groups
    return {
        "log_level": config.log_level,
        "num_workers": {
            group.label: None if group.autoscale.is_on else group.num_workers for group in groups
        },
        "router": {
            name: value
            for name, value in _changed(config.router, RouterConfig()).items()
            if name in ROUTER_SETTINGS
        },
        "autoscale": {
            group.label: {
                name: value
                for name, value in _changed(group.autoscale, AutoscaleConfig()).items()
                if name not in _BOUNDS
            }
            for group in groups
        },
    }


def _changed(section: object, default: object) -> dict[str, Any]:
    defaults = settings.to_dict(default)
    values = settings.to_dict(section)
    return {name: value for name, value in values.items() if value != defaults[name]}


def _routers(config: Config) -> dict[str, Any]:
    most = config.autoscale.max_routers
    if most is None:
        return {"num_replicas": config.num_routers}
    return _autoscaled(config.num_routers, most, ROUTER_POLICY, _policy_arguments(config))


def _workers(config: Config, group: WorkerGroup) -> dict[str, Any]:
    autoscale = group.autoscale
    if autoscale.max_workers is None:
        return {"num_replicas": group.num_workers}
    arguments = {**_policy_arguments(config), "model": group.model}
    return _autoscaled(autoscale.min_workers, autoscale.max_workers, WORKER_POLICY, arguments)


def _autoscaled(least: int, most: int, policy: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            # The policy decides when to change the number, and Serve applies it without a delay.
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            # A change of the policy's arguments restarts all actors, so they contain no setting
            # that may change at run time.
            "policy": {"policy_function": policy, "policy_kwargs": arguments},
        }
    }


def _policy_arguments(config: Config) -> Mapping[str, Any]:
    ledger = asdict(config.ledger)
    # Serve shows and logs the arguments, and the URL may contain a password.
    del ledger["url"]
    return {"ledger": ledger, "state_dir": str(config.state_dir)}
