"""Sessions of agents: requests each of which extends the previous one of its session. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Self

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
        rng = Random(f"{self.name}/{seed}")
        times = self.traffic.times(Random(f"{self.name}/{seed}/times"))
        open_turns: list[tuple[float, int, Iterator[Arrival], Arrival]] = []
        for number in count(1):
            start = next(times)
            while open_turns and (start >= until_s or open_turns[0][0] <= start):
                _, session, turns, arrival = open_turns[0]
                yield arrival
                following = next(turns, None)
                if following is None:
                    heapq.heappop(open_turns)
                else:
                    heapq.heapreplace(open_turns, (following.at, session, turns, following))
            if start >= until_s:
                return
            turns = self._turns(start, number, Random(rng.random()))
            # A session whose first prompt would be too long has no turn.
            if (first := next(turns, None)) is not None:
                heapq.heappush(open_turns, (first.at, number, turns, first))

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
