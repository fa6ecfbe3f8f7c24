"""Duration of agent sessions by the order of the queue, in virtual time.

Two H200s with 16 slots each serve sessions, whose next turn arrives a tool call after the end of
the previous one, so that a session takes longer if its turns wait. ``alike`` are sessions of 2 to
60 turns; of ``mixed`` nine in ten have 1 to 9 turns and the others 40 to 120. With a
``large_cache`` there are KV blocks for all sessions, which shows an order without its effect on
prefix-cache hits. Loads are shares of the saturation rate: the turns that end in a second when the
queue is never empty. At the start of a run, the sessions that would be in progress continue. The
duration of a session is from its first turn's arrival to its last turn's end. Only sessions that
start after the first minute are counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, dropwhile, product
from multiprocessing import get_context
from os import sched_getaffinity
from statistics import fmean

from benchmarks.agent_sessions import AgentSessions
from benchmarks.scheduling.scheduling_forecast import Figures, spec
from cluster.simulator.scenario import Scenario, WorkerSpec
from cluster.simulator.simulate import simulate
from cluster.simulator.summary import Quantiles, Record
from cluster.simulator.workloads.arrivals import Arrival
from cluster.simulator.workloads.lengths import LogNormal
from router.config import Order, RouterConfig

_ALIKE = AgentSessions(
    name="alike",
    first=LogNormal(500, 0.7, most=8000),
    added=LogNormal(200, 1.0, most=4000),
    min_turns=2,
    max_turns=60,
    max_prompt_tokens=60_000,
    prefix_tokens=1024,
)
_SHORT = replace(_ALIKE, name="short", min_turns=1, max_turns=9)
_LONG = replace(_ALIKE, name="long", min_turns=40, max_turns=120)
#: By name, kinds of sessions and their shares.
WORKLOADS: Mapping[str, tuple[tuple[AgentSessions, float], ...]] = {
    "alike": ((_ALIKE, 1.0),),
    "mixed": ((_SHORT, 0.9), (_LONG, 0.1)),
}
#: KV blocks of an H200, and more than all sessions take.
KV_BLOCKS = spec().config.num_blocks
_LARGE_CACHE = 8 * KV_BLOCKS
_ORDERS: tuple[Order, ...] = ("fifo", "shortest", "attained")
_LOADS = (0.9, 1.1)
#: Saturation rate of either workload, in turns per second.
_SATURATION = 11.5
#: Seconds before the run in which sessions may have started; nearly all are shorter, without waits.
_HISTORY_S = 700.0
_WARM_UP_S = 60.0
_SEED = 1


class ClosedLoop:
    """Sessions of a workload, ``rate`` of which start in a second until ``duration_s``."""

    def __init__(self, workload: str, rate: float, duration_s: float) -> None:
        #: by session: its latest turn, at its arrival time without waits, and its later turns
        self._last: dict[int, tuple[Arrival, Iterator[Arrival]]] = {}
        #: sessions that start during the run
        self.starting: set[int] = set()
        for turns in _sessions(workload, rate, _HISTORY_S + duration_s):
            first = next(turns, None)
            left = dropwhile(_is_past, turns if first is None else chain((first,), turns))
            if first is not None and (coming := next(left, None)) is not None:
                self._last[first.session] = coming, left
                if not _is_past(first):
                    self.starting.add(first.session)
        now = [replace(it, at=it.at - _HISTORY_S) for it, _ in self._last.values()]
        self.arrivals = sorted(now, key=lambda it: it.at)

    def follow_up(self, record: Record) -> Arrival | None:
        """Return the turn after the one that has ended; None if the session has no other."""
        last, turns = self._last[record.arrival.session]
        if (turn := next(turns, None)) is None:
            return None
        self._last[turn.session] = turn, turns
        tool_s = turn.at - last.at - last.output_tokens * _ALIKE.tpot_s
        return replace(turn, at=record.finished + tool_s)


def _is_past(turn: Arrival) -> bool:
    return turn.at < _HISTORY_S


def _sessions(workload: str, rate: float, until_s: float) -> Iterator[Iterator[Arrival]]:
    kinds = WORKLOADS[workload]
    for kind, (sessions, share) in enumerate(kinds):
        for turns in sessions.at_rate(share * rate).sessions(_SEED, until_s):
            yield _numbered(turns, kind, len(kinds))


def _numbered(turns: Iterator[Arrival], kind: int, num_kinds: int) -> Iterator[Arrival]:
    return (replace(it, session=it.session * num_kinds + kind) for it in turns)


@dataclass(frozen=True, slots=True)
class Run:
    workload: str
    order: Order
    load: float
    duration_s: float = 300.0
    #: of each worker
    num_blocks: int = KV_BLOCKS

    @property
    def name(self) -> str:
        """Name of the workload, the cache and the load."""
        size = "" if self.num_blocks == KV_BLOCKS else "_large_cache"
        return f"{self.workload}{size}_{self.load:g}"

    @property
    def rate(self) -> float:
        """Sessions that start per second."""
        turns = fmean(len([*it]) for it in _sessions(self.workload, 1.0, 1000.0))
        return self.load * _SATURATION / turns

    @property
    def _worker(self) -> WorkerSpec:
        return spec(max_num_seqs=16, num_blocks=self.num_blocks)

    def figures(self) -> Figures:
        loop = ClosedLoop(self.workload, self.rate, self.duration_s)
        router = RouterConfig(order=self.order, max_queued=10**9)
        scenario = Scenario((self._worker,) * 2, router, weights=None)
        records = simulate(loop.arrivals, scenario, follow_up=loop.follow_up).records
        of_session: dict[int, list[Record]] = defaultdict(list)
        for record in records:
            of_session[record.arrival.session].append(record)
        measured = [
            turns
            for session, turns in of_session.items()
            if session in loop.starting and turns[0].arrival.at >= _WARM_UP_S
        ]
        session_s = Quantiles.of(it[-1].finished - it[0].arrival.at for it in measured)
        ttft_s = Quantiles.of(record.ttft_s for turns in measured for record in turns)
        prompts = sum(it.arrival.prompt_tokens for it in records)
        return {
            "sessions": len(measured),
            "session_mean_s": session_s.mean,
            "session_p50_s": session_s.p50,
            "session_p90_s": session_s.p90,
            "session_p99_s": session_s.p99,
            "ttft_mean_s": ttft_s.mean,
            "ttft_p99_s": ttft_s.p99,
            "cached_share": sum(it.cached_tokens for it in records) / prompts,
        }


def measure() -> dict[str, dict[str, Figures]]:
    """Figures by workload and load, then by order."""
    runs = [
        Run(workload, order, load, num_blocks=num_blocks)
        for workload, num_blocks in (*product(WORKLOADS, (KV_BLOCKS,)), ("mixed", _LARGE_CACHE))
        for load in _LOADS
        for order in _ORDERS
    ]
    found: dict[str, dict[str, Figures]] = defaultdict(dict)
    with ProcessPoolExecutor(len(sched_getaffinity(0)), get_context("fork")) as players:
        for run, figures in zip(runs, players.map(Run.figures, runs), strict=True):
            found[run.name][run.order] = figures
            print(run.name, run.order, figures, flush=True)
    return dict(found)


def ratios(found: Mapping[str, Mapping[str, Figures]]) -> Figures:
    return {
        f"{name}_{order}_vs_fifo_{figure}": orders[order][figure] / orders["fifo"][figure]
        for name, orders in found.items()
        for order in orders
        if order != "fifo"
        for figure in ("session_mean_s", "session_p99_s")
    }
