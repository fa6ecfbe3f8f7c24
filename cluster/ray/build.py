"""Serve application for Ray Serve's own tools.

``everlift build`` writes a file that ``serve deploy`` and KubeRay read. They call ``application``
with the ``args`` from that file. The args do not contain the settings that change without a restart
of actors (cluster/ray/deployments.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from cluster import config as configuration
from cluster.config import Config
from cluster.groups import OWN_OF_WORKERS, ModelGroup, inherited
from cluster.model import pinned
from cluster.ray import deployments, ray_cluster
from everlift import settings
from everlift.errors import SettingsError
from router.ledger.config import EMBEDDED, URL_VARIABLE

if TYPE_CHECKING:
    from ray.serve import Application

#: Settings that Config copies into its sections.
_IN_COMMON = ("model", "model_revision", "adapters", "chaos", "internal_tls")

_HEAD = f"""\
# Written by `everlift build`, for `serve deploy` and KubeRay. The args are Everlift's settings.
# Others may be added, except those of the deployments below, which change without a restart. The
# ledger's URL contains a password and is not in this file: set {URL_VARIABLE} in the environment of
# every process of Ray.
"""


def application(args: Mapping[str, object]) -> Application:
    """Return the Serve application with the nested settings ``args``; Ray must be running.

    Raises:
        SettingsError: An argument is not a valid setting, is the ledger's URL, or belongs in the
            ``deployments`` section of Serve's file because it changes without a restart.
        ModelUnavailable: The commit of a hub model or hub adapter cannot be determined.
        ClusterFailed: A worker of vLLM without GPUs needs several nodes.
    """
    _, run_time = _divided(args)
    if run_time:
        raise SettingsError(
            f"{', '.join(run_time)}: must be set in `deployments`, as `everlift build` does, and "
            "not in `args`, which restart all actors"
        )
    config = configuration.load(None, {}, options=args)
    check_shown(config)
    return ray_cluster.upgradable_application(
        asyncio.run(pinned(replace(config, ray_address="auto")))
    )


def serve_yaml(config: Config) -> str:
    """Return the YAML text of a file for ``serve deploy`` with the settings of ``config``.

    Raises SettingsError if ``config`` contains the ledger's URL.
    """
    check_shown(config)
    deployed = {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": deployments.APPLICATION,
                "route_prefix": None,
                "import_path": f"{__name__}:{application.__name__}",
                "args": _divided(_set(config))[0],
                "deployments": [
                    {"name": name, **options}
                    for name, options in deployments.options(config).items()
                ],
            }
        ],
    }
    return _HEAD + yaml.safe_dump(deployed, sort_keys=False)


def _divided(values: Mapping[str, Any], path: str = "") -> tuple[dict[str, Any], list[str]]:
    """Divide settings: return those whose change restarts actors, and the names of all others.

    The former are nested dicts, the latter dotted paths such as ``router.order``. ``path`` is the
    prefix of ``values``: empty, or a dotted path that ends with a dot.
    """
    args: dict[str, Any] = {}
    run_time: list[str] = []
    for name, value in values.items():
        if deployments.is_run_time(path + name):
            run_time.append(path + name)
        elif isinstance(value, Mapping):
            below, found = _divided(value, f"{path}{name}.")
            run_time += found
            if below or not value:
                args[name] = below
        else:
            args[name] = value
    return args, run_time


def check_shown(config: Config) -> None:
    """Raise SettingsError if ``config`` contains the ledger's URL, which has a password.

    Serve shows the args of an application to everyone who has access to Serve.
    """
    if config.ledger.url != EMBEDDED:
        raise SettingsError(
            f"ledger.url: must not be among the settings that Serve shows; set {URL_VARIABLE} where"
            " Ray starts"
        )


def _set(config: Config) -> dict[str, Any]:
    """Return, as nested dicts, the settings that differ from their defaults, and the model."""
    # Config copies these settings into its sections. The sections are compared with those of a
    # configuration that has the same values, so that the copies do not count as different.
    whole = Config(
        model=config.model,
        model_revision=config.model_revision,
        chaos=config.chaos,
        internal_tls=config.internal_tls,
    )
    values: dict[str, Any] = settings.to_dict(config)
    for section in ("router", "worker"):
        values[section]["adapters"] = []
    values["router"]["more_models"] = []
    models = {name: _set_of_model(values, each) for name, each in values.pop("models").items()}
    in_common = {name: values[name] for name in _IN_COMMON}
    shown = _different(in_common, settings.to_dict(Config()))
    shown = {"model": config.model} | shown | _different(values, settings.to_dict(whole))
    return shown | ({"models": models} if models else {})


def _set_of_model(whole: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the section of a further model must contain, as nested dicts.

    The result has ``model`` and the settings that differ from the inherited and default values. The
    argument ``model`` has all settings of the section, and ``whole`` those of the cluster.
    """
    defaults = settings.to_dict(ModelGroup(model=model["model"]))
    base = settings.merge(defaults, inherited(whole))
    worker = {name: value for name, value in model["worker"].items() if name not in OWN_OF_WORKERS}
    return {"model": model["model"]} | _different({**model, "worker": worker}, base)


def _different(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    different: dict[str, Any] = {}
    for name, value in values.items():
        default = defaults[name]
        if isinstance(value, dict) and isinstance(default, dict):
            if below := _different(value, default):
                different[name] = below
        elif value != default:
            different[name] = value
    return different
