"""Retention of agents' KV blocks between turns, beside requests without sessions, in virtual time.

    python benchmarks/session_retention.py [--regime NAME ...] [--seeds 2] [--out FILE]

Agents on eight H200s with a model of 8 billion parameters wait 2 to 30 s for a tool between two
turns. Other requests have no session and evict blocks meanwhile. ``reuse`` is the share of the
tokens of a conversation's earlier turns that are prefix-cache hits; ``lost`` is the share of turns
that miss more than half of them. Figures are means over seeds, and do not depend on the machine.

    documents       10 prompts per second of about 10,000 tokens, which share nothing
    light           5 such prompts per second
    conversations   8 such prompts per second; half of the agents send no session id
"""

from __future__ import annotations

import argparse
import heapq
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean

from benchmarks import report
from benchmarks.agent_sessions import AgentSessions
from benchmarks.scheduling.scheduling_forecast import spec
from cluster.simulator.scenario import Scenario
from cluster.simulator.simulate import simulate
from cluster.simulator.summary import Quantiles as Summary
from cluster.simulator.summary import Record
from cluster.simulator.workloads.arrivals import Arrival, Traffic
from cluster.simulator.workloads.lengths import LogNormal, Quantiles
from everlift.hashes import BLOCK_SIZE
from router.config import RouterConfig
from worker.config import WorkerConfig

WORKERS = 8
#: Turns that arrive before WARM_UP_S are not counted, and none arrives after END_S.
WARM_UP_S, END_S = 180.0, 360.0
TOOL_CALLS = Quantiles((0, 2000), (0.5, 8000), (1, 30_000))
AGENTS = AgentSessions(gap=TOOL_CALLS, min_turns=10, max_turns=40)
PROMPT, OUTPUT = LogNormal(8000, 0.6, most=60_000), LogNormal(200, 0.7, most=2000)
OFF = (0.0, 0.0)
DEFAULT = (WorkerConfig().session_retention_s, WorkerConfig().session_share)
GRID = [OFF, *((seconds, share) for seconds in (10, 24, 60, 120) for share in (0.1, 0.3, 0.5))]


@dataclass(frozen=True, slots=True)
class Regime:
    """Rates per second of new agents, documents, and agents without a session id.

    ``settings`` are pairs of session_retention_s and session_share.
    """

    agents: float
    documents: float
    conversations: float
    settings: Sequence[tuple[float, float]]


REGIMES = {
    "documents": Regime(0.5, 10.0, 0.0, GRID),
    "light": Regime(0.5, 5.0, 0.0, (OFF, (60, 0.3), (60, 0.5))),
    "conversations": Regime(0.25, 8.0, 0.25, (OFF, (60, 0.3), (60, 0.5))),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """Request, and the number of its leading tokens that an earlier turn has computed."""

    arrival: Arrival
    reusable: int
    is_conversation: bool = False


def documents(rate: float, seed: int) -> Iterator[Turn]:
    lengths = Random(f"documents/{seed}")
    for at in Traffic(rate).times(Random(f"documents/{seed}/times")):
        tokens = PROMPT.sample(lengths), OUTPUT.sample(lengths), 4096
        yield Turn(Arrival(at, *tokens, tenant="documents"), 0)


def agents(rate: float, seed: int, name: str, *, has_session: bool) -> Iterator[Turn]:
    computed: dict[int, int] = {}
    for arrival in replace(AGENTS, name=name).at_rate(rate).arrivals(seed, END_S):
        session, prompt = arrival.session, arrival.prompt_tokens
        reusable = computed.get(session, 0)
        computed[session] = prompt + arrival.output_tokens if has_session else prompt
        if not has_session:
            arrival, computed[session] = without_session(arrival)
        yield Turn(arrival, reusable // BLOCK_SIZE * BLOCK_SIZE, not has_session)


def without_session(arrival: Arrival) -> tuple[Arrival, int]:
    """Return a turn without a session whose whole prompt parts later turns of its session share.

    A part has ``prefix_part_tokens`` tokens. Return also the number of tokens in whole parts.
    Outputs are not reused.
    """
    parts = arrival.prompt_tokens // arrival.prefix_part_tokens
    own = (arrival.session << 20 | part for part in range(len(arrival.prefix), parts))
    prefix = (*arrival.prefix, *own)
    return replace(arrival, session=0, prefix=prefix), parts * arrival.prefix_part_tokens


def turns(regime: Regime, seed: int) -> Iterator[Turn]:
    """Yield the requests of a regime, by arrival."""
    sources = [
        documents(regime.documents, seed),
        agents(regime.agents, seed, "agents", has_session=True),
    ]
    if (rate := regime.conversations) > 0:
        sources.append(agents(rate, seed, "conversations", has_session=False))
    for turn in heapq.merge(*sources, key=lambda turn: turn.arrival.at):
        if turn.arrival.at >= END_S:
            return
        yield turn


def run(name: str, setting: tuple[float, float], seed: int) -> dict[str, float]:
    """Return the figures of a regime with a retention time in seconds and a share of the pool."""
    seconds, share = setting
    asked = [*turns(REGIMES[name], seed)]
    worker = spec(session_retention_s=seconds, session_share=share)
    router = RouterConfig(max_queued=1_000_000)
    scenario = Scenario((worker,) * WORKERS, router, weights=None)
    records = simulate((turn.arrival for turn in asked), scenario).records
    counted = [(turn, it) for turn, it in zip(asked, records, strict=True)]
    counted = [(turn, it) for turn, it in counted if it.arrival.at >= WARM_UP_S]
    with_session = [each for each in counted if each[0].arrival.session]
    conversations = [each for each in counted if each[0].is_conversation]
    alone = [each for each in counted if each[0].arrival.tenant == "documents"]
    parts = {"agents": with_session, "conversations": conversations, "documents": alone}
    figures: dict[str, float] = {}
    for part, those in parts.items():
        if those:
            figures |= {f"{part}_{name}": value for name, value in _figures(those).items()}
    print(name, setting, seed, figures, flush=True)
    return figures


def _figures(counted: Sequence[tuple[Turn, Record]]) -> dict[str, float]:
    ttft = Summary.of(record.ttft_s for _, record in counted)
    figures = {"ttft_p50_s": ttft.p50, "ttft_p99_s": ttft.p99, "turns": len(counted)}
    later = [
        (min(record.cached_tokens, turn.reusable), turn.reusable)
        for turn, record in counted
        if turn.reusable
    ]
    if later:
        figures["reuse"] = sum(hits for hits, _ in later) / sum(most for _, most in later)
        figures["lost"] = sum(2 * hits < most for hits, most in later) / len(later)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--regime", nargs="+", choices=REGIMES, default=[*REGIMES])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/bench/session_retention.json"))
    args = parser.parse_args()
    cases = [(name, setting) for name in args.regime for setting in REGIMES[name].settings]
    jobs = [(*case, seed) for case in cases for seed in range(1, args.seeds + 1)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork")) as pool:
        figures = [*pool.map(run, *zip(*jobs, strict=True))]
    found = {
        case: _means(figures[number * args.seeds : (number + 1) * args.seeds])
        for number, case in enumerate(cases)
    }
    report.write(
        args.out,
        packages=(),
        settings={"workers": WORKERS, "seeds": args.seeds, "default": DEFAULT},
        raw={f"{name} {setting}": each for (name, setting), each in found.items()},
        ratios={
            f"{name}_{figure}_vs_off": found[name, DEFAULT][figure] / off
            for name in args.regime
            for figure, off in found[name, OFF].items()
        },
    )


def _means(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(each[name] for each in figures) for name in figures[0]}


if __name__ == "__main__":
    main()
