"""A load: which requests, and when each of them is due. Pure, but for a trace, which is a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from math import inf, isfinite
from pathlib import Path
from random import Random

from cluster.bench.arrivals import times
from cluster.bench.prompts import Prompts
from cluster.bench.request import Request
from cluster.errors import BenchFailed
from cluster.simulator.workloads import options
from cluster.simulator.workloads.arrival import Arrival
from cluster.simulator.workloads.lengths import Exactly
from cluster.simulator.workloads.traces.trace import Trace
from cluster.simulator.workloads.traffic import Traffic
from cluster.simulator.workloads.workload import Workload, merged

#: Where nothing says when it ends.
REQUESTS = 200
#: Where nothing says how long prompts and outputs are.
INPUT_TOKENS, OUTPUT_TOKENS = 256, 64


@dataclass(frozen=True, slots=True)
class Load:
    """What is said on the command line, in its words. Lengths are the workloads' or the trace's,
    else those of ``input_tokens`` and ``output_tokens``; none is above ``longest_input`` and
    ``longest_output``. Moments are theirs too, unless there is a ``rate``; without either, all
    requests are due at once. Raises BenchFailed, and WorkloadFailed as requests are made."""

    workloads: Sequence[str] | None = None
    trace: Path | None = None
    begin_s: float = 0.0
    end_s: float | None = None
    speed: float = 1.0
    is_steady: bool = False
    input_tokens: int = INPUT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    longest_input: int | None = None
    longest_output: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    requests: int | None = None
    duration_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trace is not None and self.workloads:
            raise BenchFailed("requests are of --workload or of --trace, not of both")
        if self.trace is None and (self.begin_s, self.end_s, self.speed) != (0.0, None, 1.0):
            raise BenchFailed("--from, --to and --speed need --trace")
        if self.rate is None and self.burstiness != 1.0:
            raise BenchFailed("--burstiness needs --rate")
        if self.rate is None and len(self.workloads or ()) > 1:
            raise BenchFailed("several workloads need --rate")
        for name, value in (("rate", self.rate), ("burstiness", self.burstiness)):
            if value is not None and not value > 0:
                raise BenchFailed(f"--{name} must be above 0, not {value:g}")
        if self.duration_s is not None and not 0 < self.duration_s < inf:
            raise BenchFailed(f"--duration must be above 0, not {self.duration_s:g}")
        if self.duration_s is not None and not self.has_moments:
            raise BenchFailed("--duration needs a finite --rate, a workload or a trace")

    @property
    def has_moments(self) -> bool:
        """Whether something says when requests come."""
        paced = self.rate is not None and isfinite(self.rate)
        return paced or (self.rate is None and bool(self.trace or self.workloads))

    def all_requests(self, prompts: Prompts) -> list[Request]:
        return [_request(each, number, prompts) for number, each in enumerate(self._arrivals())]

    def _arrivals(self) -> Iterator[Arrival]:
        arrivals: Iterator[Arrival] = map(self._clipped, self._recorded_or_made_up())
        if self.rate is not None or not self.has_moments:
            moments = times(self.rate or inf, self.burstiness, Random(f"moments/{self.seed}"))
            arrivals = (
                replace(arrival, at=at) for arrival, at in zip(arrivals, moments, strict=False)
            )
        if self.duration_s is not None:
            end_s = self.duration_s
            arrivals = takewhile(lambda arrival: arrival.at < end_s, arrivals)
        return islice(arrivals, self._most())

    def _most(self) -> int | None:
        """None: until they end by themselves."""
        ends = self.trace is not None or self.duration_s is not None
        return self.requests if self.requests is not None or ends else REQUESTS

    def _recorded_or_made_up(self) -> Iterator[Arrival]:
        if self.trace is not None:
            end_s = inf if self.end_s is None else self.end_s
            return Trace(self.trace, self.begin_s, end_s, self.speed).arrivals()
        if self.workloads:
            mix = options.mix(self.workloads, self.is_steady)
            own = [workload for workload, _ in mix]
            return merged(own if self.rate is None else list(options.at_rate(mix, 1.0)), self.seed)
        return self._alike().arrivals(self.seed)

    def _alike(self) -> Workload:
        return Workload(
            "alike",
            application="",
            prompt=Exactly(self.input_tokens),
            output=Exactly(self.output_tokens),
            max_tokens=self.output_tokens,
            traffic=Traffic(1.0),
        )

    def _clipped(self, arrival: Arrival) -> Arrival:
        return replace(
            arrival,
            prompt_tokens=min(arrival.prompt_tokens, self.longest_input or arrival.prompt_tokens),
            output_tokens=min(arrival.output_tokens, self.longest_output or arrival.output_tokens),
        )


def _request(arrival: Arrival, number: int, prompts: Prompts) -> Request:
    """It may have as many tokens as its output is to become long."""
    prompt, tokens = prompts.prompt(arrival, number)
    return Request(arrival.at, prompt, tokens, arrival.output_tokens)
