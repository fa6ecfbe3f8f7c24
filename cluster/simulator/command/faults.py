"""Command line options of events during a forecast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Annotated

import typer

from cluster.errors import ForecastFailed
from cluster.simulator.scenario import Event, WorkerDrain, WorkerLoss, WorkerSpec, WorkerStart

_PANEL = "Events"


def _events(text: str, example: str) -> object:
    return typer.Option(metavar=example, help=f"{text} Repeatable.", rich_help_panel=_PANEL)


Lose = Annotated[list[str] | None, _events("Lose WORKER (from 0) at S seconds.", "WORKER@S")]
Drain = Annotated[list[str] | None, _events("Drain WORKER (from 0) at S seconds.", "WORKER@S")]
Add = Annotated[
    list[str] | None,
    _events("Start N workers like the first one at S seconds.", "N@S"),
]
Slow = Annotated[
    list[str] | None,
    _events("Factor by which the steps of WORKER take longer.", "WORKER=FACTOR"),
]
StartTime = Annotated[
    float,
    typer.Option(
        min=0, metavar="S", help="Time to start a worker, in seconds.", rich_help_panel=_PANEL
    ),
]


def events(
    lose: Sequence[str] | None,
    drain: Sequence[str] | None,
    add: Sequence[str] | None,
    workers: Sequence[WorkerSpec],
    start_s: float,
    is_scaled: bool = False,
) -> tuple[Event, ...]:
    """Return the events that the command line options describe, sorted by time.

    ``lose`` and ``drain`` have texts such as ``2@60`` (worker 2 at 60 s), ``add`` has texts such as
    ``3@60`` (3 workers at 60 s). ``workers`` exist at the beginning. Added workers are like the
    first one, at its normal speed, and take ``start_s`` seconds to start.

    Raises ForecastFailed for an invalid text, or for a worker that does not exist yet at that time.
    The latter is not checked if ``is_scaled``, because an autoscaler may then add workers.
    """
    lost, drained, added = _pairs("lose", lose, 0), _pairs("drain", drain, 0), _pairs("add", add, 1)
    if not is_scaled:
        start_times = sorted(at + start_s for number, at in added for _ in range(number))
        for worker, at in (*lost, *drained):
            _check_worker_exists(worker, at, [-inf] * len(workers) + start_times)
    found: list[Event] = [WorkerLoss(at, worker) for worker, at in lost]
    found += [WorkerDrain(at, worker) for worker, at in drained]
    for number, at in added:
        found += [WorkerStart(at, replace(workers[0], slowness=1.0), start_s)] * number
    return tuple(sorted(found, key=lambda event: event.at))


def _check_worker_exists(worker: int, at: float, start_times: Sequence[float]) -> None:
    if worker >= len(start_times):
        raise ForecastFailed(f"there is no worker {worker}; workers are numbered from 0")
    if at <= (start_time := start_times[worker]):
        raise ForecastFailed(
            f"worker {worker} cannot be removed at {at:g} s: it starts at {start_time:g} s"
        )


def slowed(workers: Sequence[WorkerSpec], slow: Sequence[str] | None) -> tuple[WorkerSpec, ...]:
    """Return the workers with the slowness factors of ``slow``.

    ``slow`` has texts such as ``2=1.5``: the steps of worker 2 take 1.5 times as long. Raises
    ForecastFailed for an invalid text or an unknown worker.
    """
    specs = list(workers)
    for worker, factor in _pairs("slow", slow, 0, separator="="):
        if worker >= len(specs) or not factor > 0:
            raise ForecastFailed(
                f"--slow {worker}={factor:g}: the worker must exist and the factor be above 0"
            )
        specs[worker] = replace(specs[worker], slowness=factor)
    return tuple(specs)


def _pairs(
    option: str, texts: Sequence[str] | None, least: int, separator: str = "@"
) -> list[tuple[int, float]]:
    return [_pair(option, text, least, separator) for text in texts or ()]


def _pair(option: str, text: str, least: int, separator: str) -> tuple[int, float]:
    first, _, second = text.partition(separator)
    number, moment = _read(int, first), _read(float, second)
    if number is None or moment is None or number < least or not 0 <= moment < inf:
        raise ForecastFailed(f"--{option} {text}: must be two numbers, such as 3{separator}60")
    return int(number), moment


def _read(kind: Callable[[str], float], text: str) -> float | None:
    try:
        return kind(text)
    except ValueError:
        return None
