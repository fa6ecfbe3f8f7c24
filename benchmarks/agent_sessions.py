"""Sessions of agents: requests each of which extends the previous one of its session. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from operator import attrgetter
from random import Random
from typing import Self

from cluster.simulator.summary import Record
from cluster.simulator.workloads.arrivals import Arrival, Traffic
from cluster.simulator.workloads.lengths import Lengths, LogNormal

_PART_TOKENS = 512


_TRAFFIC = Traffic(0.2)
_FIRST, _ADDED = LogNormal(4000, 0.7, most=60_000), LogNormal(900, 1.0, most=30_000)
_OUTPUT, _GAP = LogNormal(180, 0.8, most=4096), LogNormal(2000, 0.8, most=60_000)


@dataclass(frozen=True, slots=True)
class AgentSessions:
    """Workload of sessions, of which ``traffic`` starts a number per second.

    A session begins with one of ``num_prefixes`` system prompts of ``prefix_tokens`` tokens. Its
    first prompt has about ``first`` tokens more, and each later one adds the previous output and
    ``added`` tokens. A session ends after its number of turns, or before its prompt would exceed
    ``max_prompt_tokens``. A turn arrives a tool call (``gap``, in milliseconds) and the previous
    turn's output at ``tpot_s`` seconds per token after the previous turn.

    The defaults are assumptions that follow published statistics of coding agents: 20 to 100 turns,
    prompts of 5,000 to 200,000 tokens, and about 2 s between two turns.
    """

    name: str = "agents"
    traffic: Traffic = _TRAFFIC
    first: Lengths = _FIRST
    added: Lengths = _ADDED
    output: Lengths = _OUTPUT
    gap: Lengths = _GAP
    min_turns: int = 20
    max_turns: int = 100
    max_prompt_tokens: int = 200_000
    tpot_s: float = 0.02
    num_prefixes: int = 4
    prefix_tokens: int = 4096
    tenants: tuple[str, ...] = ("t1", "t2", "t3", "t4")
    max_tokens: int = 4096

    def at_rate(self, rate: float) -> Self:
        """Return this workload with ``rate`` new sessions per second."""
        return replace(self, traffic=replace(self.traffic, rate=rate))

    def arrivals(self, seed: int, until_s: float) -> Iterator[Arrival]:
        """Yield the turns of the sessions that start before ``until_s`` seconds, by arrival.

        Only the arrival times depend on the rate; everything else depends on ``seed`` alone.
        """
        return heapq.merge(*self.sessions(seed, until_s), key=attrgetter("at"))

    def sessions(self, seed: int, until_s: float) -> Iterator[Iterator[Arrival]]:
        """Yield the turns of each session that starts before ``until_s`` seconds."""
        rng = Random(f"{self.name}/{seed}")
        times = self.traffic.times(Random(f"{self.name}/{seed}/times"))
        starts = takewhile(lambda start: start < until_s, times)
        for number, start in enumerate(starts, start=1):
            yield self._turns(start, number, Random(rng.random()))

    def _turns(self, at: float, session: int, rng: Random) -> Iterator[Arrival]:
        parts = self.prefix_tokens // _PART_TOKENS
        prefix = rng.randrange(self.num_prefixes)
        tenant = rng.choice(self.tenants)
        prompt_tokens = parts * _PART_TOKENS + self.first.sample(rng)
        for _ in range(rng.randint(self.min_turns, self.max_turns)):
            if prompt_tokens > self.max_prompt_tokens:
                return
            output_tokens = self.output.sample(rng)
            yield Arrival(
                at,
                prompt_tokens,
                output_tokens,
                self.max_tokens,
                tenant=tenant,
                application="agent",
                prefix=tuple(range(prefix * parts + 1, (prefix + 1) * parts + 1)),
                prefix_part_tokens=_PART_TOKENS,
                session=session,
            )
            prompt_tokens += output_tokens + self.added.sample(rng)
            at += self.gap.sample(rng) / 1000 + output_tokens * self.tpot_s


#: Seconds of history before the start; nearly all sessions are shorter if they never wait.
_HISTORY_S = 1000.0
_RAMP_S = 50.0


class ClosedLoop:
    """Sessions whose next turn arrives a tool call after the end of the previous one.

    At the start, sessions are in progress: those that would still run after ``_HISTORY_S`` seconds
    without any wait. They send their next turns one by one in the first ``_RAMP_S`` seconds, since
    no prompt is cached yet. No turn arrives at ``until_s`` seconds or later.
    """

    def __init__(self, sessions: AgentSessions, seed: int, until_s: float) -> None:
        self._until_s = until_s
        self._tpot_s = sessions.tpot_s
        #: by session: its latest turn, at its arrival time without waits, and its later turns
        self._last: dict[int, tuple[Arrival, Iterator[Arrival]]] = {}
        for turns in sessions.sessions(seed, _HISTORY_S + until_s):
            left = dropwhile(lambda turn: turn.at < _HISTORY_S, turns)
            if (first := next(left, None)) is not None:
                self._last[first.session] = first, left
        started = [it for it, _ in self._last.values() if it.at < _HISTORY_S + _RAMP_S]
        ramp = (replace(it, at=_RAMP_S * i / len(started)) for i, it in enumerate(started))
        later = (replace(it, at=it.at - _HISTORY_S) for it, _ in self._last.values())
        #: first turns of all sessions, by arrival
        self.arrivals = [
            *ramp,
            *sorted((it for it in later if it.at >= _RAMP_S), key=attrgetter("at")),
        ]

    def follow_up(self, record: Record) -> Arrival | None:
        """Return the turn after the one that has ended; None if the session has no other."""
        last, turns = self._last[record.arrival.session]
        if (turn := next(turns, None)) is None:
            return None
        self._last[turn.session] = turn, turns
        tool_s = turn.at - last.at - last.output_tokens * self._tpot_s
        at = record.finished + tool_s
        return replace(turn, at=at) if at < self._until_s else None
