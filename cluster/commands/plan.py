"""Command ``everlift plan``: number of workers that meets a target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster import picture_file
from cluster.errors import ForecastFailed
from cluster.simulator import as_json, plan_views, target
from cluster.simulator.command import ledger_requests, load, machines
from cluster.simulator.command.load import Requests
from cluster.simulator.command.progress import with_progress
from cluster.simulator.hardware.kind import Kind
from cluster.simulator.plan import Plan, Trial, fewest, meets_targets, saturation_rate
from cluster.simulator.scenario import Scenario, WorkerSpec
from cluster.simulator.target import Target
from cluster.simulator.workloads import options

EXAMPLES = """
Each number of workers is tried in a simulation, as `everlift simulate` does. A request that does
not finish counts as infinitely slow.

**Examples**

- `everlift plan --slo ttft_p99=1s,tpot_p99=50ms --rate 40 --kind h100 --kind h200`
- `everlift plan --slo ttft_p90=2s --trace AzureLLMInferenceTrace_code.csv --to 1200 --kind l4`
- `everlift plan --slo ttft_p99=1s --from-ledger --kind h100`
"""

SloTargets = Annotated[
    str,
    typer.Option(
        "--slo",
        metavar="TARGETS",
        help="Latency targets such as ttft_p99=1s: a percentile or mean of ttft, tpot or latency.",
    ),
]
Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--kind",
        metavar="KIND",
        help="Kind of worker, as in `everlift simulate --workers`. Repeatable. "
        f"Default: {machines.DEFAULT_KIND}.",
    ),
]
Most = Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of workers to try.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="File for the plan as JSON.")
]
Picture = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File for a picture of the plan.")
]


def plan(
    slo: SloTargets,
    kind: Kinds = None,
    most: Most = 256,
    workload: options.Workloads = None,
    trace: options.TraceFile = None,
    begin: options.Begin = 0.0,
    end: options.End = None,
    speed: options.Speed = 1.0,
    from_ledger: ledger_requests.FromLedger = False,
    limit: ledger_requests.Limit = ledger_requests.DEFAULT_LIMIT,
    rate: load.Rate = None,
    duration: load.Duration = None,
    steady: options.Steady = False,
    seed: options.Seed = 0,
    model: machines.Model = machines.DEFAULT_MODEL,
    config: machines.SettingsFile = None,
    assignments: machines.Assignments = None,
    foresight: machines.Foresight = None,
    json_file: JsonFile = None,
    picture: Picture = None,
) -> None:
    """Find the smallest number of workers that meets the targets, for each kind of worker."""
    if picture is not None:
        picture_file.check("--picture", picture)
    targets = target.targets(slo)
    settings = machines.config_of(config, assignments)
    ledger = ledger_requests.requests_or_none(from_ledger, settings, limit)
    synthetic = rate, None, duration, steady, seed
    requests = Requests(workload, trace, begin, end, speed, *synthetic, ledger)
    scenario_options = {
        "router": settings.router,
        "foresight_sigma": foresight,
        "seed": seed,
        "weights": requests.weights,
    }
    kinds = _by_name(machines.kind_of(name, model) for name in kind or (machines.DEFAULT_KIND,))
    specs = {name: machines.spec_of(one, config, assignments) for name, one in kinds.items()}
    plans = {
        name: _plan(name, requests, spec, scenario_options, targets, most)
        for name, spec in specs.items()
    }
    _show(plans, targets)
    if json_file is not None:
        as_json.write(plan_views.as_json(plans, targets), json_file)
    if picture is not None:
        plan_views.draw(plans, targets, picture)
    if all(each.workers is None for each in plans.values()):
        raise typer.Exit(1)


def _by_name(kinds: Iterable[Kind]) -> Mapping[str, Kind]:
    found: dict[str, Kind] = {}
    for kind in kinds:
        if found.setdefault(kind.name, kind) is not kind:
            raise ForecastFailed(f"--kind: two kinds have the name {kind.name}")
    return found


def _show(plans: Mapping[str, Plan], targets: Sequence[Target]) -> None:
    console = Console(highlight=False, markup=False)
    console.print(plan_views.table(plans, targets))
    for name, each in plans.items():
        console.print(plan_views.verdict(name, each, targets), soft_wrap=True)


def _plan(
    name: str,
    requests: Requests,
    spec: WorkerSpec,
    scenario_options: Mapping[str, object],
    targets: Sequence[Target],
    most: int,
) -> Plan:
    from cluster.simulator.simulate import simulate

    limits = [each.most_s for each in targets]

    def attempt(workers: int) -> Trial:
        with machines.as_modelled():
            scenario = Scenario.uniform(workers, spec, **scenario_options)
        arrivals = with_progress(requests.arrivals(()), f"with {workers} of {name}")
        answer = simulate(arrivals, scenario)
        attained = tuple(each.attained(answer.records) for each in targets)
        return Trial(workers, attained, meets_targets(attained, limits), answer.summary().refused)

    return fewest(attempt, _guess(requests, spec), most)


def _guess(requests: Requests, spec: WorkerSpec) -> int:
    arrivals = list(islice(requests.arrivals(()), load.SAMPLE))
    if not arrivals:
        raise ForecastFailed("there are no requests to plan for")
    return ceil(requests.average_rate() / saturation_rate(arrivals, spec))
