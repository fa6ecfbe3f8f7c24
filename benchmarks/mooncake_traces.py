"""Synthetic traces in Mooncake's format: JSON lines of a request's time, lengths and block hashes.

    {"timestamp": 27482, "input_length": 955, "output_length": 52, "hash_ids": [46, 2353]}

``timestamp`` is in milliseconds, and each of ``hash_ids`` names a block of 512 tokens together with
all blocks before it. ``cluster.simulator.workloads.traces`` reads these files, and the original
ones (kvcache-ai/Mooncake, FAST25-release/traces), which are not part of this repository.

Published of the originals (README of FAST25-release; cache ratios from table 2 of the FAST'25
paper, quoted from memory):

                  requests in an hour   mean input   mean output   blocks that repeat earlier ones
    conversation               12,031       12,035           343                              40 %
    toolagent                  23,608        8,596           182                              59 %

Known as well are the quantiles of the conversations' inputs (p50 6,909, p90 27,367, p99 85,400) and
outputs (p50 350, p90 597, p99 1,119), which ``cluster.simulator.workloads.known`` has, that all
conversations begin with one common block, and that requests of tools share prompts of about 12
blocks (the two sample lines of the README share 6,144 tokens). Everything else is assumed, and
chosen so that the means and the cache ratios come out: numbers of turns, pauses between them, and
the popularity of tools.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from random import Random
from tempfile import NamedTemporaryFile
from typing import NamedTuple

from cluster.simulator.workloads.lengths import Lengths, LogNormal, Quantiles

BLOCK_TOKENS = 512
#: Longest prompt of a session, in tokens; a longer one would end it.
_MOST_TOKENS = 126_000


class Request(NamedTuple):
    at: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def line(self) -> str:
        fields = {
            "timestamp": round(self.at * 1000),
            "input_length": self.input_length,
            "output_length": self.output_length,
            "hash_ids": self.hash_ids,
        }
        return json.dumps(fields)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a trace: sessions that begin with one of several shared prompts.

    There are ``num_prompts`` shared prompts of ``shared`` blocks.

    The popularity of the shared prompts follows Zipf's law. ``first`` are the further tokens of the
    first turn; each later turn, which follows with probability ``continued`` and after ``pause``
    milliseconds, has the previous one's output and ``added`` tokens more.
    """

    name: str
    num_prompts: int
    shared: Lengths
    first: Lengths
    added: Lengths
    output: Lengths
    pause: Lengths
    continued: float

    @property
    def mean_turns(self) -> float:
        return 1 / (1 - self.continued)

    def requests(self, rate: float, seconds: float, seed: int) -> Iterator[Request]:
        """Yield ``rate`` requests per second, by time, for ``seconds``.

        The sessions begin long before the trace, so that its rate is the same from the beginning.
        """
        rng = Random(f"{self.name}/{seed}")
        ids = count(1)
        prompts = [
            tuple(next(ids) for _ in range(self.shared.sample(rng)))
            for _ in range(self.num_prompts)
        ]
        popularity = [*accumulate(1 / rank for rank in range(1, self.num_prompts + 1))]
        starts, begin = self._starts(rate / self.mean_turns, seconds, rng), -_HISTORY_S
        open_turns: list[tuple[Request, int, Iterator[Request]]] = []
        for number, start in enumerate((*starts, seconds)):
            while open_turns and open_turns[0][0].at <= start:
                request, session, turns = open_turns[0]
                if 0 <= request.at < seconds:
                    yield request
                following = next(turns, None)
                if following is None:
                    heapq.heappop(open_turns)
                else:
                    heapq.heapreplace(open_turns, (following, session, turns))
            if begin <= start < seconds:
                prompt = rng.choices(prompts, cum_weights=popularity)[0]
                turns = self._turns(start, prompt, ids, Random(rng.random()))
                heapq.heappush(open_turns, (next(turns), number, turns))

    def _starts(self, rate: float, seconds: float, rng: Random) -> Iterator[float]:
        at = -_HISTORY_S + rng.expovariate(rate)
        while at < seconds:
            yield at
            at += rng.expovariate(rate)

    def _turns(
        self, at: float, prompt: tuple[int, ...], ids: Iterator[int], rng: Random
    ) -> Iterator[Request]:
        blocks = prompt
        tokens = len(prompt) * BLOCK_TOKENS + self.first.sample(rng)
        while True:
            output = self.output.sample(rng)
            missing = tokens // BLOCK_TOKENS - len(blocks)
            blocks = (*blocks, *(next(ids) for _ in range(missing)))
            # A last block that is not full has an id of its own.
            last = (next(ids),) if tokens % BLOCK_TOKENS else ()
            yield Request(at, tokens, output, (*blocks, *last))
            tokens += output + self.added.sample(rng)
            if rng.random() >= self.continued or tokens > _MOST_TOKENS:
                return
            at += self.pause.sample(rng) / 1000


#: Seconds before a trace in which sessions begin that it may continue.
_HISTORY_S = 600.0

_CONVERSATION = Shape(
    "conversation",
    num_prompts=1,
    shared=LogNormal(1, 0.0, most=1),
    first=LogNormal(5500, 1.15, most=100_000),
    added=LogNormal(700, 1.2, most=30_000),
    output=Quantiles((0, 40), (0.5, 350), (0.75, 472), (0.9, 597), (0.99, 1119), (1, 2000)),
    pause=LogNormal(45_000, 0.9, most=400_000),
    continued=0.41,
)
_TOOLAGENT = Shape(
    "toolagent",
    num_prompts=64,
    shared=LogNormal(8.5, 0.35, most=40),
    first=LogNormal(2300, 1.0, most=100_000),
    added=LogNormal(500, 1.2, most=30_000),
    output=LogNormal(100, 1.1, most=4096),
    pause=LogNormal(8_000, 0.8, most=120_000),
    continued=0.15,
)
SHAPES = {shape.name: shape for shape in (_CONVERSATION, _TOOLAGENT)}


def write(requests: Iterator[Request], path: Path) -> Path:
    """Write a trace file, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The rename makes it safe that several processes write the same trace at a time.
    with NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.writelines(request.line() + "\n" for request in requests)
    return Path(file.name).replace(path)


class Statistics(NamedTuple):
    """Means of a trace, and the share of its blocks that repeat earlier ones."""

    requests: int
    input_length: float
    output_length: float
    cache_ratio: float

    @classmethod
    def of(cls, requests: list[Request]) -> Statistics:
        seen: set[int] = set()
        blocks = repeated = 0
        for request in requests:
            blocks += len(request.hash_ids)
            repeated += sum(block in seen for block in request.hash_ids)
            seen.update(request.hash_ids)
        number = len(requests)
        return cls(
            number,
            sum(it.input_length for it in requests) / number,
            sum(it.output_length for it in requests) / number,
            repeated / blocks,
        )
