"""What-ifs of a request in a running cluster: its ledger's requests come again, to workers like
those that run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cluster.connection import connected
from cluster.errors import ForecastFailed
from cluster.explain.what_if import WhatIf, what_if
from cluster.forecast.command import machines
from cluster.forecast.command.policies import routers
from cluster.forecast.command.progress import watched
from cluster.forecast.hardware import kind_file, learned
from cluster.forecast.history import surroundings
from cluster.forecast.record import Record
from cluster.forecast.scenario import Scenario, WorkerSpec
from cluster.forecast.simulate import simulate
from cluster.ledger_connection import connected_ledger
from everlift.v1 import admin_pb2
from everlift.v1 import inference_pb2 as pb
from router.rulebook import SETTINGS


async def replayed(
    explanation: pb.Explanation,
    policies: Sequence[str],
    address: str | None,
    file: Path | None,
    assignments: Sequence[str] | None,
) -> WhatIf:
    """Raises ForecastFailed and SettingsError, and what asking cluster and ledger raises."""
    async with connected(address) as client:
        kinds, policy = (await client.capacity()).kinds, await client.set_policy()
    ran = _order(explanation) or policy.order
    rules = [*(assignments or ()), *_in_force(policy)]
    configured = routers([ran, *policies], file, rules)
    specs = _specs(kinds, file, assignments)
    async with connected_ledger(machines.config_of(file, assignments)) as ledger:
        around = await surroundings(ledger, explanation.request_id)
    arrivals = around.arrivals

    def replay(name: str, slowness: float) -> Sequence[Record]:
        workers = tuple(replace(spec, slowness=slowness) for spec in specs)
        scenario = Scenario(workers, router=configured[name], link_s=around.link_s)
        return simulate(watched(arrivals, name), scenario).records

    return what_if(around, [*configured], replay)


def _order(explanation: pb.Explanation) -> str:
    """The queue's, when it left it last; empty where nobody told."""
    orders = (attempt.queue.order for attempt in reversed(explanation.attempts))
    return next(filter(None, orders), "")


def _in_force(policy: admin_pb2.SetPolicyResponse) -> list[str]:
    """As settings."""
    values = ((name, getattr(policy, name)) for name in SETTINGS)
    return [f"router.{name}={str(value).lower()}" for name, value in values]


def _specs(
    kinds: Sequence[admin_pb2.WorkerKind], file: Path | None, assignments: Sequence[str] | None
) -> list[WorkerSpec]:
    """Of the workers that run. Raises ForecastFailed where there are none, or nothing is known of
    their steps yet."""
    if not kinds:
        raise ForecastFailed("no worker is connected")
    specs: list[WorkerSpec] = []
    for kind in kinds:
        made = kind_file.made(kind.device, learned.content(kind))
        specs += [machines.spec_of(made, file, assignments)] * kind.workers
    return specs
