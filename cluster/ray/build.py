"""Application for Ray Serve's own tools.

``everlift build`` writes what ``serve deploy`` and KubeRay read, and they call ``application`` with
its args.

Settings that change without a restart of actors are not among the args
(cluster/ray/deployments.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from cluster.config import Config
from cluster.model import pinned
from cluster.ray import deployments, ray_cluster
from everlift import settings
from everlift.errors import SettingsError
from router.ledger.config import EMBEDDED, URL_VARIABLE

if TYPE_CHECKING:
    from ray.serve import Application

_HEAD = f"""\
# Written by `everlift build`, for `serve deploy` and KubeRay. The args are Everlift's settings: any
# other may be added, but for those of the deployments below, which change without a restart. The
# ledger's url, which has a password, comes from {URL_VARIABLE}, which every process of Ray has to
# have in its environment.
"""


def application(args: Mapping[str, object]) -> Application:
    """Return the Serve application of ``args``, nested settings. Ray must run.

    Raises:
        SettingsError: An argument is no setting, or one that deployments have.
        ModelUnavailable: The model cannot be had.
    """
    _, run_time = _divided(args)
    if run_time:
        raise SettingsError(
            f"{', '.join(run_time)}: must be set in `deployments`, as `everlift build` does, and "
            "not in `args`, which restart all actors"
        )
    config = settings.load(Config, args)
    check_shown(config)
    return ray_cluster.upgradable_application(
        asyncio.run(pinned(replace(config, ray_address="auto")))
    )


def serve_yaml(config: Config) -> str:
    """Return a file for ``serve deploy`` with all that ``config`` sets. Raises SettingsError."""
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
    """Return the settings that restart actors, and the paths of the others."""
    args: dict[str, Any] = {}
    run_time: list[str] = []
    for name, value in values.items():
        if path + name in deployments.RUN_TIME_SETTINGS:
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
    """Serve shows the args of an application to whoever may look at it. Raises SettingsError."""
    if config.ledger.url != EMBEDDED:
        raise SettingsError(
            f"ledger.url: must not be among the settings that Serve shows; set {URL_VARIABLE} where"
            " Ray starts"
        )


def _set(config: Config) -> dict[str, Any]:
    """Return the settings that differ from the defaults, and always the model."""
    # What is set for the whole cluster is no setting of a part.
    whole = Config(
        model=config.model,
        model_revision=config.model_revision,
        chaos=config.chaos,
        internal_tls=config.internal_tls,
    )
    values = settings.to_dict(config)
    in_common = {
        name: values[name] for name in ("model", "model_revision", "chaos", "internal_tls")
    }
    shown = _different(in_common, settings.to_dict(Config()))
    return {"model": config.model} | shown | _different(values, settings.to_dict(whole))


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
