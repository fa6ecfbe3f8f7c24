"""Command line options of a forecast's workers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cluster import config as configuration
from cluster.config import Config
from cluster.errors import ForecastFailed
from cluster.simulator.hardware import kind_file
from cluster.simulator.hardware.kind import GPUS, Kind, on_gpus
from cluster.simulator.hardware.model_size import MODELS, ModelSize
from cluster.simulator.scenario import WorkerSpec

_PANEL = "The cluster"
_GPUS = re.compile(rf"({'|'.join(GPUS)})(?:x([1-9]\d?))?")
DEFAULT_KIND = "h100"
DEFAULT_MODEL = "llama-3.1-8b"

Workers = Annotated[
    list[str] | None,
    typer.Option(
        "--workers",
        metavar="[KIND=]N",
        help=f"Number of workers of a kind: {', '.join(GPUS)}, h100x2 (two GPUs per worker), or a "
        f"file that `everlift measure` wrote. Repeatable. Default: num_workers of {DEFAULT_KIND}.",
        rich_help_panel=_PANEL,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help=f"Model of GPU workers, in bfloat16: {', '.join(MODELS)}, or a directory with a "
        "config.json.",
        rich_help_panel=_PANEL,
    ),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Settings of the cluster in YAML.", rich_help_panel=_PANEL
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting, e.g. router.order=hrrn.",
        rich_help_panel=_PANEL,
    ),
]
Foresight = Annotated[
    float | None,
    typer.Option(
        min=0,
        # A larger error would predict nothing at all, and its lengths would overflow a float.
        max=10,
        metavar="SIGMA",
        help="Error of predicted output lengths: standard deviation of log(predicted / actual). "
        "Default: the recorded predictions, else the mean of earlier outputs.",
        rich_help_panel=_PANEL,
    ),
]


def kind_of(name: str, model: str) -> Kind:
    """Return the kind of worker with a name such as ``h100x2``, or the one in a ``.json`` file.

    ``model`` names the model of a GPU worker, or is a directory with a config.json. Raises
    ForecastFailed for an unknown name or an invalid file.
    """
    if name.endswith(".json"):
        return kind_file.read(Path(name))
    size = _size(model)
    match = _GPUS.fullmatch(name)
    if match is None:
        raise ForecastFailed(
            f"{name}: must be one of {', '.join(GPUS)}, with the suffix x2 for two GPUs, or a "
            ".json file"
        )
    return on_gpus(GPUS[match[1]], size, int(match[2] or 1))


def _size(model: str) -> ModelSize:
    if model in MODELS:
        return MODELS[model]
    directory = Path(model).expanduser()
    if not (directory / "config.json").exists():
        names = ", ".join(MODELS)
        raise ForecastFailed(
            f"--model {model}: must be one of {names}, or a directory with a config.json"
        )
    return ModelSize.of(directory)


def config_of(
    file: Path | None, assignments: Sequence[str] | None, kind: Kind | None = None
) -> Config:
    """Return the cluster's settings from ``file``, the environment and ``assignments``.

    Each of these sources overrides those before it. ``assignments`` are texts such as
    ``router.order=hrrn``. The worker settings of ``kind`` apply where no source sets a value.
    Raises SettingsError for invalid settings or an invalid file.
    """
    base = {"worker": kind.worker} if kind else {}
    return configuration.load(file, os.environ, assignments or (), base=base)


def spec_of(kind: Kind, file: Path | None, assignments: Sequence[str] | None) -> WorkerSpec:
    """Return the spec of a worker of ``kind`` with the settings of ``file`` and ``assignments``.

    Raises ForecastFailed for settings that the simulator does not model, and SettingsError for
    invalid ones.
    """
    config = config_of(file, assignments, kind).worker
    with as_modelled():
        return WorkerSpec(config, kind.step_time)


@contextmanager
def as_modelled() -> Iterator[None]:
    """Context manager: replace a ValueError by a ForecastFailed with the same message.

    Scenarios and worker specs raise ValueError for settings that the simulator does not model.
    """
    try:
        yield
    except ValueError as error:
        raise ForecastFailed(str(error)) from None


def specs_of(
    workers: Sequence[str] | None, model: str, file: Path | None, assignments: Sequence[str] | None
) -> tuple[WorkerSpec, ...]:
    """Return one spec per worker that ``workers`` describes, in the same order.

    ``workers`` has texts such as ``4`` or ``h100x2=4``. None stands for as many workers of the
    default kind as the setting ``num_workers`` states. ``model`` is the model of GPU workers.
    Raises ForecastFailed, SettingsError.
    """
    numbers = workers or (str(config_of(file, assignments).num_workers),)
    specs: list[WorkerSpec] = []
    for text in numbers:
        name, number = _kind_and_number(text)
        specs += [spec_of(kind_of(name, model), file, assignments)] * number
    return tuple(specs)


def _kind_and_number(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition("=")
    if not number.isdecimal() or int(number) < 1:
        raise ForecastFailed(f"--workers {text}: must be a number, or KIND=NUMBER")
    return name or DEFAULT_KIND, int(number)
