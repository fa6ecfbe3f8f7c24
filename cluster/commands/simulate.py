"""Command ``everlift simulate``: simulation of a cluster with a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.simulator import as_json, tables, target
from cluster.simulator.command import faults, ledger_requests, load, machines
from cluster.simulator.command.load import Requests
from cluster.simulator.command.progress import with_progress
from cluster.simulator.forecast import Forecast
from cluster.simulator.scenario import Scenario
from cluster.simulator.summary import Slo
from cluster.simulator.workloads import options

EXAMPLES = """
The admission queue, the placement and the workers' scheduler are those of the product; only the
duration of a step is computed. It is derived from data sheets for GPUs, and from a file that
`everlift measure` wrote for any other machine. Requests are synthetic, recorded in a trace, or
those that a cluster has served; prompts are never shown. Default: the workload azure-conversation.

**Examples**

- `everlift simulate --workers h200=8 --load 0.9`
- `everlift simulate --workload chat --load 1.2 --set router.order=hrrn --foresight 0.5`
- `everlift simulate --trace AzureLLMInferenceTrace_conv.csv --to 600 --speed 4 --workers h100=6`
- `everlift simulate --workers l4=8 --load 0.8 --lose 3@60 --add 1@90 --pictures build/pictures`
- `everlift simulate --from-ledger --workers h100=2 --lose 1@3600`
"""

_OUTPUT = "Output"

SloText = Annotated[
    str | None,
    typer.Option(
        "--slo",
        metavar="ttft=1s,tpot=50ms",
        help="Limits of a good request. Goodput is the rate of good requests: those that finish "
        "within these limits and their own target and deadline.",
        rich_help_panel=_OUTPUT,
    ),
]
Groups = Annotated[
    bool,
    typer.Option(
        "--groups",
        help="Add a row for each class, tenant and application.",
        rich_help_panel=_OUTPUT,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="File for the forecast as JSON.", rich_help_panel=_OUTPUT
    ),
]
PictureDirectory = Annotated[
    Path | None,
    typer.Option(
        "--pictures",
        metavar="DIR",
        help="Directory for pictures of the forecast.",
        rich_help_panel=_OUTPUT,
    ),
]


def simulate(
    workload: options.Workloads = None,
    trace: options.TraceFile = None,
    begin: options.Begin = 0.0,
    end: options.End = None,
    speed: options.Speed = 1.0,
    from_ledger: ledger_requests.FromLedger = False,
    limit: ledger_requests.Limit = ledger_requests.DEFAULT_LIMIT,
    rate: load.Rate = None,
    load_part: load.Load = None,
    duration: load.Duration = None,
    steady: options.Steady = False,
    seed: options.Seed = 0,
    workers: machines.Workers = None,
    model: machines.Model = machines.DEFAULT_MODEL,
    config: machines.SettingsFile = None,
    assignments: machines.Assignments = None,
    foresight: machines.Foresight = None,
    lose: faults.Lose = None,
    drain: faults.Drain = None,
    add: faults.Add = None,
    slow: faults.Slow = None,
    start_time: faults.StartTime = 30.0,
    slo: SloText = None,
    groups: Groups = False,
    json_file: JsonFile = None,
    picture_directory: PictureDirectory = None,
) -> None:
    """Simulate a cluster with a workload in virtual time."""
    from cluster.simulator import simulate as simulation

    settings = machines.config_of(config, assignments)
    ledger = ledger_requests.requests_or_none(from_ledger, settings, limit)
    synthetic = rate, load_part, duration, steady, seed
    requests = Requests(workload, trace, begin, end, speed, *synthetic, ledger)
    limits = target.slo(slo)
    specs = faults.slowed(machines.specs_of(workers, model, config, assignments), slow)
    with machines.as_modelled():
        scenario = Scenario(
            specs,
            router=settings.router,
            autoscale=settings.autoscale,
            start_s=start_time,
            foresight_sigma=foresight,
            events=faults.events(lose, drain, add, specs, start_time, settings.autoscale.is_on),
            seed=seed,
            weights=requests.weights,
        )
    answer = simulation.simulate(with_progress(requests.arrivals(specs), "simulating"), scenario)
    _show(answer, limits, json_file, picture_directory, by_group=groups)
    _warn_of_late_events(answer, scenario)


def _show(
    answer: Forecast,
    limits: Slo,
    json_file: Path | None,
    picture_directory: Path | None,
    *,
    by_group: bool,
) -> None:
    console = Console(highlight=False, markup=False)
    console.print(tables.requests_table(answer, limits, by_group=by_group))
    console.print(tables.cluster_table(answer, limits))
    if json_file is not None:
        as_json.write(as_json.forecast_as_json(answer, limits), json_file)
    if picture_directory is not None:
        # Imported here because it takes seconds, and most forecasts are not drawn.
        from cluster.simulator import pictures

        for path in pictures.draw(answer, limits, picture_directory):
            console.print(f"drawn: {path}", soft_wrap=True)


def _warn_of_late_events(answer: Forecast, scenario: Scenario) -> None:
    last = answer.samples[-1].at
    if late := sum(event.at > last + scenario.sample_s for event in scenario.events):
        typer.echo(
            f"{late} events were due only after all requests had ended, at "
            f"{last + scenario.sample_s:g} s"
        )
