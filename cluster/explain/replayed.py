"""What-ifs of a request: its ledger's requests come again, to workers like those that run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.errors import ForecastFailed
from cluster.explain.what_if import what_if
from cluster.forecast.hardware import kind_file, learned
from cluster.forecast.history import surroundings, weights
from cluster.forecast.record import Record
from cluster.forecast.scenario import Scenario, WorkerSpec
from cluster.forecast.simulate import simulate
from everlift import settings
from everlift.v1 import admin_pb2
from router.gateway.what_if import Estimates, Question
from router.ledger.base import Ledger
from worker.config import Scheduling, WorkerConfig

#: Of outputs. Beyond, workers are simulated in a few numbers each, in a tenth of the time.
_MAX_EXACT_TOKENS = 100_000


async def estimated(ledger: Ledger, question: Question) -> Estimates:
    """Raises ForecastFailed, UnknownRequest, SettingsError, LedgerUnavailable."""
    specs = _specs(question.kinds)
    around = await surroundings(ledger, question.request_id)
    arrivals = around.arrivals
    router, *_ = question.policies.values()
    shares = await weights(ledger, router, {arrival.tenant for arrival in arrivals})
    is_fluid = sum(arrival.output_tokens for arrival in arrivals) > _MAX_EXACT_TOKENS
    if is_fluid:
        specs = [_continuous(spec) for spec in specs]

    def replay(policy: str, slowness: float) -> Sequence[Record]:
        workers = tuple(replace(spec, slowness=slowness) for spec in specs)
        scenario = Scenario(
            workers,
            router=question.policies[policy],
            link_s=around.link_s,
            fluid=is_fluid,
            weights=shares,
        )
        return simulate(arrivals, scenario).records

    return what_if(around, [*question.policies], replay)


def _specs(kinds: Sequence[admin_pb2.WorkerKind]) -> list[WorkerSpec]:
    """Of the workers that run. Raises ForecastFailed where there are none, or nothing is known of
    their steps yet."""
    if not kinds:
        raise ForecastFailed("no worker is connected")
    specs: list[WorkerSpec] = []
    for kind in kinds:
        specs += [_spec(kind)] * kind.workers
    return specs


def _continuous(spec: WorkerSpec) -> WorkerSpec:
    """As fluid workers are. How far that is from what was, the estimates say."""
    return replace(spec, config=replace(spec.config, scheduling=Scheduling()))


def _spec(kind: admin_pb2.WorkerKind) -> WorkerSpec:
    """What its kind does not say is as by default."""
    made = kind_file.made(kind.device, learned.content(kind))
    return WorkerSpec(settings.load(WorkerConfig, made.worker), made.step_time)
