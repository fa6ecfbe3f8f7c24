"""Load: the requests, and when each of them is due. Pure, except that traces are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice, repeat, takewhile
from math import inf, isfinite, isinf
from pathlib import Path
from random import Random
from typing import Any, Protocol

from cluster.errors import BenchFailed
from cluster.simulator.workloads import options
from cluster.simulator.workloads.arrivals import Arrival, Traffic
from cluster.simulator.workloads.lengths import Exactly
from cluster.simulator.workloads.traces.trace import Trace
from cluster.simulator.workloads.workload import Workload, merged

#: Each word, with a space before it, is a single token in the vocabularies of most models.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law"
).split()


class Prompts(Protocol):
    def prompt(self, arrival: Arrival, number: int) -> tuple[str | tuple[int, ...], int]:
        """Return the prompt for an arrival, as text or token ids, and its number of tokens.

        ``number`` is the position of the request in the load. The number of tokens may be an
        estimate.
        """
        ...


class TokenPrompts:
    """Prompts of random token ids; the id 0 is not used, because it often stands for no text."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._ids = range(1, vocab_size)
        self._seed = seed

    def prompt(self, arrival: Arrival, number: int) -> tuple[tuple[int, ...], int]:
        ids = tuple(_sample_units(self._ids, arrival, f"{self._seed}/{number}"))
        return ids, len(ids)


class WordPrompts:
    """Prompts of random words, one word for each wanted token.

    With a ``tokenizer`` (of the tokenizers library) the text is cut to the wanted number of tokens,
    and its tokens are counted. Otherwise the number of tokens is an estimate.
    """

    def __init__(self, tokenizer: Any | None, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed

    def prompt(self, arrival: Arrival, number: int) -> tuple[str, int]:
        text = " ".join(_sample_units(_WORDS, arrival, f"{self._seed}/{number}"))
        return (
            self._cut(text, arrival.prompt_tokens)
            if self._tokenizer
            else (
                text,
                arrival.prompt_tokens,
            )
        )

    def _cut(self, text: str, tokens: int) -> tuple[str, int]:
        assert self._tokenizer is not None
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        cut = self._tokenizer.decode(ids[:tokens])
        return cut, len(self._tokenizer.encode(cut, add_special_tokens=False).ids)


def _sample_units(units: Sequence[Any], arrival: Arrival, name: str) -> list[Any]:
    sampled: list[Any] = []
    for part in arrival.prefix:
        sampled += Random(f"part/{part}").choices(units, k=arrival.prefix_part_tokens)
    del sampled[arrival.prompt_tokens :]
    return sampled + Random(name).choices(units, k=arrival.prompt_tokens - len(sampled))


def arrival_times(rate: float, burstiness: float, rng: Random) -> Iterator[float]:
    """Yield arrival times in seconds, endlessly, with a mean of ``rate`` arrivals per second.

    Gaps are Gamma-distributed with the shape ``burstiness``: 1 is a Poisson process, a lower value
    results in bursts, a higher one in more even gaps, and infinity in constant gaps. At an infinite
    rate all requests are due at once.
    """
    if isinf(rate):
        return repeat(0.0)
    if burstiness == inf:
        return (number / rate for number in count(1))
    return Traffic(rate, cv=burstiness**-0.5).times(rng)


@dataclass(frozen=True, slots=True)
class Request:
    """Request of a load; ``due`` is in seconds after the start of the load.

    ``prompt`` is a text or token ids, of about ``prompt_tokens`` tokens; an endpoint may count
    differently. ``fields`` are added to the body of an OpenAI request and override its other
    fields.
    """

    due: float
    prompt: str | tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    fields: Mapping[str, object] = field(default_factory=dict)


#: Default number of requests, if neither a duration nor a trace limits the load.
REQUESTS = 200
#: Default lengths of prompts and outputs in tokens, without a workload or trace.
INPUT_TOKENS, OUTPUT_TOKENS = 256, 64


@dataclass(frozen=True, slots=True)
class Load:
    """Options of a load, as on the command line.

    Lengths come from the workloads or the trace, else from ``input_tokens`` and ``output_tokens``.
    Lengths above ``longest_input`` or ``longest_output`` are reduced to that limit. Arrival times
    come from ``rate`` if it is set, else from the workload or the trace; without any of these, all
    requests are due at once. Raises BenchFailed for invalid or contradictory options;
    ``all_requests`` raises WorkloadFailed if the requests cannot be created.
    """

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
            raise BenchFailed("--workload and --trace exclude each other")
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
        if self.duration_s is not None and not self.has_arrival_times:
            raise BenchFailed("--duration needs a finite --rate, a workload or a trace")

    @property
    def has_arrival_times(self) -> bool:
        """Return whether requests have arrival times; without these, all are due at once.

        Arrival times come from a finite ``rate``, or from a workload or trace if ``rate`` is None.
        """
        paced = self.rate is not None and isfinite(self.rate)
        return paced or (self.rate is None and bool(self.trace or self.workloads))

    def all_requests(self, prompts: Prompts) -> list[Request]:
        return [_request(each, number, prompts) for number, each in enumerate(self._arrivals())]

    def _arrivals(self) -> Iterator[Arrival]:
        arrivals: Iterator[Arrival] = map(self._clipped, self._source_arrivals())
        if self.rate is not None or not self.has_arrival_times:
            times = arrival_times(self.rate or inf, self.burstiness, Random(f"moments/{self.seed}"))
            arrivals = (
                replace(arrival, at=at) for arrival, at in zip(arrivals, times, strict=False)
            )
        if self.duration_s is not None:
            end_s = self.duration_s
            arrivals = takewhile(lambda arrival: arrival.at < end_s, arrivals)
        return islice(arrivals, self._limit())

    def _limit(self) -> int | None:
        ends = self.trace is not None or self.duration_s is not None
        return self.requests if self.requests is not None or ends else REQUESTS

    def _source_arrivals(self) -> Iterator[Arrival]:
        if self.trace is not None:
            end_s = inf if self.end_s is None else self.end_s
            return Trace(self.trace, self.begin_s, end_s, self.speed).arrivals()
        if self.workloads:
            mix = options.mix(self.workloads, self.is_steady)
            own = [workload for workload, _ in mix]
            return merged(own if self.rate is None else list(options.at_rate(mix, 1.0)), self.seed)
        return self._uniform_workload().arrivals(self.seed)

    def _uniform_workload(self) -> Workload:
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
    prompt, tokens = prompts.prompt(arrival, number)
    return Request(arrival.at, prompt, tokens, arrival.output_tokens)
