"""Command line options of a model that runs in the command's own process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cluster import config as configuration
from cluster.config import Config
from cluster.errors import ClusterFailed
from everlift import logs
from everlift.errors import SettingsError

if TYPE_CHECKING:
    from cluster.llm.llm import LLM

_PANEL = "Without a cluster"

Local = Annotated[
    bool,
    typer.Option(
        "--local", help="Run the model in this process, without a cluster.", rich_help_panel=_PANEL
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="With --local: any value of `everlift up --model`. Default: the demo model.",
        rich_help_panel=_PANEL,
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="With --local: any setting, e.g. worker.dtype=float32.",
        rich_help_panel=_PANEL,
    ),
]


def local_config(
    local: bool, model: str | None, assignments: Sequence[str] | None
) -> Config | None:
    """Return the settings of a model in this process; None if ``local`` is False.

    Raises SettingsError for an invalid setting, or if ``model`` or ``assignments`` are given
    although ``local`` is False.
    """
    if local:
        options = {} if model is None else {"model": model}
        return configuration.load(None, os.environ, assignments or (), options)
    for name, given in (("--model", model), ("--set", assignments)):
        if given:
            raise SettingsError(
                f"{name} needs --local: model and settings of a cluster come from `everlift up`"
            )
    return None


@contextmanager
def opened(config: Config) -> Iterator[LLM]:
    """Context manager: load the model that ``config`` names, and yield it.

    Log messages are written to a file in the state directory.

    Raises ClusterFailed if the model cannot run on this machine, and UnknownModel or
    ModelUnavailable if its files cannot be loaded.
    """
    # Imported here because most commands use a cluster and need no engine.
    from cluster.llm.llm import LLM
    from worker.parallel.step_log import ChannelBroken

    log_dir = config.state_dir / "logs"
    logs.configure("offline", config.log_level, log_dir / "offline.log")
    try:
        llm = LLM.of(config)
    except (ValueError, ChannelBroken) as error:
        raise ClusterFailed(str(error)) from error
    with llm:
        yield llm
