"""Workloads of bench-locality: the requests of a run, at any rate.

    agents        sessions of 20 to 100 turns and 5,000 to 200,000 tokens, in a closed loop
    conversation, toolagent   generated traces in Mooncake's format (mooncake_traces.py)
    tenants       system prompts of 256 tenants, and short questions
    no-sharing    the same lengths, but nothing is shared

Rates are requests per second; those of ``agents`` are new sessions per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from pathlib import Path
from random import Random
from typing import TypeAlias

from benchmarks.agent_sessions import AgentSessions, ClosedLoop
from benchmarks.mooncake_traces import SHAPES, write
from cluster.simulator.simulate import FollowUp
from cluster.simulator.summary import Record
from cluster.simulator.workloads.arrivals import Arrival
from cluster.simulator.workloads.lengths import LogNormal
from cluster.simulator.workloads.traces.trace import Trace

_TRACES = Path("build/bench/traces")


def _nothing(record: Record) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of a run: those that arrive by themselves, by time, and those that follow others."""

    arrivals: Sequence[Arrival]
    follow_up: FollowUp = field(default=_nothing)


#: Requests at a rate, with a seed, until a time in seconds.
Workload: TypeAlias = Callable[[float, int, float], Requests]


def agents(rate: float, seed: int, until_s: float) -> Requests:
    loop = ClosedLoop(AgentSessions().at_rate(rate), seed, until_s)
    return Requests(loop.arrivals, loop.follow_up)


def generated_trace(name: str) -> Workload:
    """Return a workload that writes a trace of this shape, and reads it again."""

    def workload(rate: float, seed: int, until_s: float) -> Requests:
        path = _TRACES / f"{name}-{rate:.6g}-{seed}-{until_s:g}.jsonl"
        write(SHAPES[name].requests(rate, until_s, seed), path)
        return Requests([*Trace(path).arrivals()])

    return workload


def recorded_trace(path: Path) -> Workload:
    """Return a workload that replays a file, faster or slower than recorded."""
    recorded = [*Trace(path).arrivals()]
    recorded_rate = len(recorded) / max(recorded[-1].at, 1.0)

    def workload(rate: float, seed: int, until_s: float) -> Requests:
        arrivals = Trace(path, speed=rate / recorded_rate).arrivals()
        return Requests([*takewhile(lambda it: it.at < until_s, arrivals)])

    return workload


_NUM_TENANTS = 256
_PART_TOKENS = 512
_SYSTEM = LogNormal(3000, 0.6, most=16_000)
_QUESTION = LogNormal(300, 1.0, most=8000)
_OUTPUT = LogNormal(200, 0.9, most=2048)
_MAX_TOKENS = 2048


def tenants(rate: float, seed: int, until_s: float) -> Requests:
    return Requests([*_of_tenants(rate, seed, until_s, is_shared=True)])


def no_sharing(rate: float, seed: int, until_s: float) -> Requests:
    return Requests([*_of_tenants(rate, seed, until_s, is_shared=False)])


def _of_tenants(rate: float, seed: int, until_s: float, *, is_shared: bool) -> Iterator[Arrival]:
    rng = Random(f"tenants/{seed}")
    parts = [max(1, _SYSTEM.sample(rng) // _PART_TOKENS) for _ in range(_NUM_TENANTS)]
    popularity = [*accumulate(1 / rank for rank in range(1, _NUM_TENANTS + 1))]
    at = rng.expovariate(rate)
    while at < until_s:
        tenant = rng.choices(range(_NUM_TENANTS), cum_weights=popularity)[0]
        system = parts[tenant]
        yield Arrival(
            at,
            system * _PART_TOKENS + _QUESTION.sample(rng),
            _OUTPUT.sample(rng),
            _MAX_TOKENS,
            tenant=f"t{tenant}",
            prefix=tuple(range(system)) if is_shared else (),
            prefix_part_tokens=_PART_TOKENS,
        )
        at += rng.expovariate(rate)


WORKLOADS: dict[str, Workload] = {
    "agents": agents,
    **{name: generated_trace(name) for name in SHAPES},
    "tenants": tenants,
    "no-sharing": no_sharing,
}
