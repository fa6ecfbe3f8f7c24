"""Command ``everlift replay``: simulation of recorded requests under other policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from cluster.errors import ForecastFailed
from cluster.simulator import as_json, comparison
from cluster.simulator.command import ledger_requests, machines
from cluster.simulator.command.load import Requests
from cluster.simulator.command.policies import alike, routers
from cluster.simulator.command.progress import with_progress
from cluster.simulator.scenario import Scenario
from cluster.simulator.workloads import options
from router.config import Order, RouterConfig

EXAMPLES = """
Finished requests are replayed in a simulation for each policy: they arrive at the same times, with
prompts and outputs of the same lengths. Each choice is a separate request. A policy is an order of
the admission queue, optionally followed by settings. No prompt is shown.

**Examples**

- `everlift replay --from-ledger --policy fifo,hrrn,ranked --foresight 0.5 --workers h100=2`
- `everlift replay --from-ledger --policy "fifo router.fair_share=false" --workers here.json=2`
- `everlift replay --trace AzureLLMInferenceTrace_conv.csv --policy fifo,hrrn --workers l4=4`
"""

#: Name of the recorded outcome in the output, beside the names of the simulated policies.
_RECORDED = "was"

Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="ORDER,...",
        help=f"Queue policy: {', '.join(get_args(Order))}; ltr is ranked, vtc is fifo with fair "
        "share. Repeatable. Default: the configuration's.",
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="File for the forecast as JSON.")
]


def replay(
    from_ledger: ledger_requests.FromLedger = False,
    policy: Policies = None,
    limit: ledger_requests.Limit = ledger_requests.DEFAULT_LIMIT,
    trace: options.TraceFile = None,
    begin: options.Begin = 0.0,
    end: options.End = None,
    speed: options.Speed = 1.0,
    workers: machines.Workers = None,
    model: machines.Model = machines.DEFAULT_MODEL,
    config: machines.SettingsFile = None,
    assignments: machines.Assignments = None,
    foresight: machines.Foresight = None,
    json_file: JsonFile = None,
) -> None:
    """Replay recorded requests in the simulator under other policies."""
    from cluster.simulator.simulate import simulate

    if from_ledger == (trace is not None):
        raise ForecastFailed("give either --from-ledger or --trace")
    specs = machines.specs_of(workers, model, config, assignments)
    policies = _routers(policy, config, assignments)
    settings = machines.config_of(config, assignments)
    ledger = ledger_requests.requests_or_none(from_ledger, settings, limit)
    requests = Requests(trace=trace, begin_s=begin, end_s=end, speed=speed, ledger=ledger)
    answers = {_RECORDED: comparison.recorded_forecast(ledger.records)} if ledger else {}
    arrivals = list(requests.arrivals(specs))
    with machines.as_modelled():
        scenario = Scenario(specs, foresight_sigma=foresight, weights=requests.weights)
    for name, router in policies.items():
        answers[name] = simulate(with_progress(arrivals, name), replace(scenario, router=router))
    console = Console(highlight=False, markup=False)
    console.print(comparison.table(answers))
    for names in alike(policies):
        console.print(f"{' and '.join(names)} are the same policy with the present router settings")
    if json_file is not None:
        as_json.write(comparison.as_json(answers), json_file)


def _routers(
    policies: Sequence[str] | None, file: Path | None, assignments: Sequence[str] | None
) -> Mapping[str, RouterConfig]:
    """Return the router settings of each policy in ``policies``, by the text that names the policy.

    Empty or absent ``policies`` result in one entry: the configured settings, by the value of
    ``router.order``. The configuration is ``file``, the environment and ``assignments``. Raises
    SettingsError for an invalid policy or configuration, and ForecastFailed for a policy with
    settings that are not the router's.
    """
    if policies:
        return routers(policies, file, assignments)
    router = machines.config_of(file, assignments).router
    return {router.order: router}
